"""The computation of one step of the chunked form on its chunks [G, M, C, .] (`layout`), forward
and backward. Letters as in `chunked`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda.chunked import chunk_math as cm
from kernels.kda.chunked.layout import Chunks
from kernels.kda.chunked.states import Starts
from kernels.kda.chunked.tokens import Raw, Tokens
from kernels.kda.problem import CHUNK
from kernels.kda.products import dot
from kernels.vma import zeros_like_varying


class Here(NamedTuple):
    """One step's slice of a call: [G, M, C, .]; the gate's parameters [G, 1, 1, .]."""

    raw: Raw
    v: jax.Array
    chunks: Chunks


class Local(NamedTuple):
    """The state-independent quantities of a step's chunks [G, M, ...]."""

    levels: list[cm.Level]
    P: jax.Array  # [G, M, C, K]
    F: jax.Array  # [G, M, C, K]
    A: jax.Array  # [G, M, C, C]
    Aqk: jax.Array  # [G, M, C, C]
    w: jax.Array  # [G, M, C, K]
    u: jax.Array  # [G, M, C, V]


def local_part(tokens: Tokens, here: Here, starts: Starts | None, matrices=None) -> Local:
    """Computes everything that needs no state; matrices are (A, Aqk) if they were kept."""
    # A segment's first token forgets exactly what came before it.
    levels, P, F = cm.halves(jnp.where(here.chunks.first, 0, jnp.exp(tokens.a)))
    if matrices is None:
        below, Aqk = cm.intra(levels, tokens.q, tokens.k, tokens.beta)
        A = cm.solve(below)
    else:
        A, Aqk = matrices
    rhs = tokens.beta * here.v
    if starts is not None:
        rhs = rhs - starts.subtracted
    w = dot(A, tokens.beta * tokens.k * P, "ab")
    return Local(levels, P, F, A, Aqk, w, dot(A, rhs, "ab"))


def through_chunks(state, tokens: Tokens, local: Local, starts: Starts | None):
    """Passes the state through a step's chunks. Returns (exit state [G, K, V], entry states
    [G, M, K, V], v_new)."""
    kg, G = tokens.k * local.F, local.P[..., -1, :, None]
    S = zeros_like_varying(kg, (*kg.shape[:2], *state.shape[1:]))

    def chunk(m, loop):
        state, S, v_new = loop
        new = local.u[:, m] - dot(local.w[:, m], state, "ab")
        S = jax.lax.dynamic_update_index_in_dim(S, state, m, 1)
        v_new = jax.lax.dynamic_update_index_in_dim(v_new, new, m, 1)
        state = G[:, m] * state + dot(kg[:, m], new, "aa")
        return state if starts is None else state + starts.exit[:, m], S, v_new

    return jax.lax.fori_loop(0, kg.shape[1], chunk, (state, S, jnp.zeros_like(local.u)))


def back_through_chunks(d_state, tokens: Tokens, local: Local, d_v_new, d_S):
    """Passes the state's gradient through a step's chunks in reverse, from the parts of d_v_new and
    d_S that need no state.

    Returns (gradient of the entry state [G, K, V], d_v_new, gradients of the exit states [G, M, K,
    V]).
    """
    kg, G = tokens.k * local.F, local.P[..., -1, :, None]
    chunks = kg.shape[1]

    def chunk(i, loop):
        d_state, d_v_new, d_next = loop
        m = chunks - 1 - i
        d_next = jax.lax.dynamic_update_index_in_dim(d_next, d_state, m, 1)
        new = d_v_new[:, m] + dot(kg[:, m], d_state, "ab")
        d_v_new = jax.lax.dynamic_update_index_in_dim(d_v_new, new, m, 1)
        d_state = G[:, m] * d_state + d_S[:, m] - dot(local.w[:, m], new, "aa")
        return d_state, d_v_new, d_next

    return jax.lax.fori_loop(0, chunks, chunk, (d_state, d_v_new, jnp.zeros_like(d_S)))


def chunk_gradients(tokens: Tokens, here: Here, local: Local, S, v_new, d_o, d_v_new, d_next):
    """Gradients of tokens, of v and of the solve's right-hand side, all inside chunks."""
    (q, k, beta, _), P, F = tokens, local.P, local.F
    d_rhs = dot(local.A, d_v_new, "aa")
    both = jnp.concatenate([d_o, d_rhs], -2)
    d_state_rows, d_scores = dot(both, S, "bb"), dot(both, v_new, "bb")
    d_q, d_rows, d_columns, d_a = cm.intra_backward(
        local.levels, q, k, beta, -d_scores[..., CHUNK:, :], d_scores[..., :CHUNK, :]
    )
    d_q_state = d_state_rows[..., :CHUNK, :] * P
    d_rows_state = -d_state_rows[..., CHUNK:, :] * P
    d_stored = dot(v_new, d_next, "bb") * F
    d_q += d_q_state
    d_rows += d_rows_state
    d_columns += d_stored
    d_beta = jnp.sum(d_rhs * here.v, -1, keepdims=True) + jnp.sum(d_rows * k, -1, keepdims=True)
    # A token's decay acts on what the entry state gives to it and later tokens, on what earlier
    # tokens give to the exit state, and on what the entry state gives to the exit state.
    d_a += cm.later(q * d_q_state + beta * k * d_rows_state) + cm.earlier(k * d_stored)
    d_a += (P[..., -1, :] * jnp.sum(S * d_next, -1))[..., None, :]
    return Tokens(d_q, beta * d_rows + d_columns, d_beta, d_a), beta * d_rhs, d_rhs
