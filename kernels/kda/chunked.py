"""Backend "chunked": the chunked form in plain jnp, for CPU, GPU, and to bisect with.

Everything inside chunks is batched over all chunks, rows and heads as matrix products; only the
state walks from chunk to chunk (`_walk_forward`, `_walk_backward`), rank after rank. Letters are
those of `chunk_math`, and with S a chunk's entry state, P and F the decay products from its start
and to its end, and G their product over the whole chunk:

    p = beta k P       w = A p     u = A (beta v - X)     vn = u - w S      kg = k F
    o = (q P) S + Aqk vn + O       S' = G S + kg^T vn + Z

X, O, Z is what given start states add (`states`). float32 inputs run in float32 throughout;
with bfloat16 inputs the operands of the matrix products are rounded to bfloat16, except the inverse
A; accumulation, gates, decay products and states are float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda import chunk_math as cm
from kernels.kda.chunk_math import dot
from kernels.kda.exchange_jnp import walk_in_turn
from kernels.kda.gate import log_decay, log_decay_backward
from kernels.kda.layout import Tiles, from_tiles, tile_segments, to_tiles
from kernels.kda.problem import FinalState, Inputs, Problem, StatePolicy
from kernels.kda.states import Starts, Tokens, row_state, segment_states, start_contributions
from kernels.kda.vma import vary
from kernels.segments import Segments


class Prepared(NamedTuple):
    """Tokens [N, B, H, C, .] in float32, and what their backward needs."""

    tokens: Tokens
    v: jax.Array
    x: jax.Array  # gate input
    q_rstd: jax.Array | None  # [N, B, H, C, 1]
    k_rstd: jax.Array | None


class Local(NamedTuple):
    """What chunks are before any state enters."""

    levels: list[cm.Level]
    P: jax.Array  # [N, B, H, C, K]
    F: jax.Array  # [N, B, H, C, K]
    A: jax.Array  # [N, B, H, C, C]
    Aqk: jax.Array  # [N, B, H, C, C]
    w: jax.Array  # [N, B, H, C, K]
    u: jax.Array  # [N, B, H, C, V]


class Walked(NamedTuple):
    """What the walk over chunks leaves."""

    S: jax.Array  # [N, B, H, K, V] entry states
    vn: jax.Array  # [N, B, H, C, V]
    exit: jax.Array  # [B, H, K, V] the rank's exit state


def forward(problem: Problem, inputs: Inputs, segments: Segments):
    """See `problem.py`. Residuals: the rank's entry state (REMAT), or all entry states and the
    chunks' matrices (SAVE)."""
    tiles = tile_segments(segments)
    prepared = _prepare(problem, inputs, tiles)
    starts = _starts(tiles, segments, prepared.tokens, inputs)
    local = _local(prepared, tiles, starts, _dot_dtype(inputs))
    entry = _zero_state(problem, inputs)
    walked = _walk_forward(problem.axis_name, prepared.tokens.k, local, starts, entry, inputs)
    out = dot(prepared.tokens.q * local.P, walked.S, "ab", _dot_dtype(inputs))
    out += dot(local.Aqk, walked.vn, "ab", _dot_dtype(inputs))
    if starts is not None:
        out += starts.out
    out = from_tiles(jnp.where(tiles.valid, out, 0).astype(inputs.v.dtype))
    final = _final_state(problem, tiles, segments, prepared.tokens, walked, inputs)
    if problem.state_policy is StatePolicy.SAVE:
        return out, final, (walked, local.A, local.Aqk)
    return out, final, (walked.S[0],)


def backward(problem: Problem, inputs: Inputs, segments: Segments, residuals, d_out, d_final):
    """See `problem.py`. The same walk reversed."""
    dtype = _dot_dtype(inputs)
    tiles = tile_segments(segments)
    prepared = _prepare(problem, inputs, tiles)
    tokens = prepared.tokens
    starts, pull_starts = _starts_vjp(tiles, segments, tokens, inputs)
    if problem.state_policy is StatePolicy.SAVE:
        walked, *matrices = residuals
        local = _local(prepared, tiles, starts, dtype, matrices)
    else:
        local = _local(prepared, tiles, starts, dtype)
        walked = _walk_forward(None, tokens.k, local, starts, residuals[0], inputs)
    d_out = jnp.where(tiles.valid, to_tiles(d_out.astype(jnp.float32)), 0)
    d_exit, pulled = _final_state_vjp(problem, tiles, segments, tokens, walked, inputs, d_final)

    d_vn = dot(local.Aqk, d_out, "aa", dtype)
    d_S = dot(tokens.q * local.P, d_out, "aa", dtype)
    if pulled is not None:
        d_vn, d_S = d_vn + pulled.deltas, d_S + pulled.entries
    d_vn, d_next = _walk_backward(problem.axis_name, tokens.k, local, d_vn, d_S, d_exit, inputs)
    d_tokens, d_v, d_rhs = _chunk_gradients(
        prepared, tiles, local, walked, d_out, d_vn, d_next, dtype
    )
    d_initial = d_start = None
    if pull_starts is not None:
        more, d_initial, d_start = pull_starts(Starts(-d_rhs, d_out, d_next))
        d_tokens = _add(d_tokens, more)
    if pulled is not None:
        d_tokens = _add(d_tokens, pulled.tokens)
        d_initial, d_start = _add(d_initial, pulled.initial), _add(d_start, pulled.start)
    return _unprepare(problem, inputs, tiles, prepared, d_tokens, d_v, d_initial, d_start)


def _dot_dtype(inputs: Inputs):
    return jnp.bfloat16 if inputs.v.dtype == jnp.bfloat16 else None


def _zero_state(problem: Problem, inputs: Inputs) -> jax.Array:
    rows, heads, _, keys = inputs.q.shape
    zeros = jnp.zeros((rows, heads, keys, inputs.v.shape[-1]), jnp.float32)
    return vary(zeros, jax.typeof(inputs.v).mat.varying)


def _prepare(problem: Problem, inputs: Inputs, tiles: Tiles) -> Prepared:
    q, k, v, x, beta = (
        jnp.where(tiles.valid, to_tiles(t).astype(jnp.float32), 0)
        for t in (*inputs[:4], inputs.beta[..., None])
    )
    q_rstd = k_rstd = None
    if problem.l2norm:
        (q, q_rstd), (k, k_rstd) = cm.normalize(q), cm.normalize(k)
    a = jnp.where(tiles.valid, log_decay(problem, x, inputs.a_log, inputs.dt_bias), 0)
    return Prepared(Tokens(q * problem.scale, k, beta, a), v, x, q_rstd, k_rstd)


def _local(prepared, tiles, starts: Starts | None, dtype, matrices=None) -> Local:
    tokens = prepared.tokens
    # A segment's first token forgets exactly what came before it.
    levels, P, F = cm.halves(jnp.where(tiles.first, 0, jnp.exp(tokens.a)))
    if matrices is None:
        below, Aqk = cm.intra(levels, tokens.q, tokens.k, tokens.beta, dtype)
        A = cm.solve(below)
    else:
        A, Aqk = matrices
    rhs = tokens.beta * prepared.v
    if starts is not None:
        rhs = rhs - starts.subtracted
    w = dot(A, tokens.beta * tokens.k * P, "ab", dtype)
    return Local(levels, P, F, A, Aqk, w, dot(A, rhs, "ab", dtype))


def _walk_forward(axis_name, k, local: Local, starts, entry, inputs) -> Walked:
    dtype = _dot_dtype(inputs)
    kg, G = k * local.F, local.P[..., -1, :, None]

    def step(c, carry):
        S, entries, deltas = carry
        vn = local.u[c] - dot(local.w[c], S, "ab", dtype)
        entries = jax.lax.dynamic_update_index_in_dim(entries, S, c, 0)
        deltas = jax.lax.dynamic_update_index_in_dim(deltas, vn, c, 0)
        S = G[c] * S + dot(kg[c], vn, "aa", dtype)
        if starts is not None:
            S = S + starts.exit[c]
        return S, entries, deltas

    count = k.shape[0]
    entries = jnp.zeros((count, *entry.shape), jnp.float32)
    entries = vary(entries, jax.typeof(entry).mat.varying)
    S, entries, deltas = walk_in_turn(
        axis_name, count, step, (entry, entries, jnp.zeros_like(local.u))
    )
    return Walked(entries, deltas, S)


def _walk_backward(axis_name, k, local: Local, d_vn, d_S, d_exit, inputs):
    """Whole gradients of vn and of each chunk's exit state, from their parts without the state."""
    dtype = _dot_dtype(inputs)
    kg, G = k * local.F, local.P[..., -1, :, None]
    count = k.shape[0]

    def step(i, carry):
        d_next, exits, deltas = carry
        c = count - 1 - i
        exits = jax.lax.dynamic_update_index_in_dim(exits, d_next, c, 0)
        d_vn = deltas[c] + dot(kg[c], d_next, "ab", dtype)
        deltas = jax.lax.dynamic_update_index_in_dim(deltas, d_vn, c, 0)
        d_next = G[c] * d_next + d_S[c] - dot(local.w[c], d_vn, "aa", dtype)
        return d_next, exits, deltas

    carry = (d_exit, jnp.zeros_like(d_S), d_vn)
    _, exits, deltas = walk_in_turn(axis_name, count, step, carry, upstream=True)
    return deltas, exits


def _chunk_gradients(prepared, tiles, local: Local, walked: Walked, d_out, d_vn, d_next, dtype):
    """Gradients of the tokens, of v and of the solve's right side, all inside chunks."""
    (q, k, beta, _), P, F = prepared.tokens, local.P, local.F
    d_rhs = dot(local.A, d_vn, "aa", dtype)
    d_state_rows = dot(jnp.concatenate([d_out, d_rhs], -2), walked.S, "bb", dtype)
    d_scores = dot(jnp.concatenate([d_out, d_rhs], -2), walked.vn, "bb", dtype)
    n = q.shape[-2]
    d_p = -d_state_rows[..., n:, :] * P  # towards beta k
    d_q, d_rows, d_columns = cm.intra_backward(
        local.levels, q, k, beta, -d_scores[..., n:, :], d_scores[..., :n, :], dtype
    )
    d_q += d_state_rows[..., :n, :] * P
    d_rows += d_p
    d_stored = dot(walked.vn, d_next, "bb", dtype) * F
    d_columns += d_stored
    d_beta = jnp.sum(d_rhs * prepared.v, -1, keepdims=True)
    d_beta += jnp.sum(d_rows * k, -1, keepdims=True)
    d_rows *= beta
    d_g = q * d_q + k * (d_rows - d_columns)
    d_end = jnp.sum(k * d_stored, -2) + P[..., -1, :] * jnp.sum(walked.S * d_next, -1)
    d_a = _sum_of_later(tiles, d_g, d_end)
    return Tokens(d_q, d_rows + d_columns, d_beta, d_a), beta * d_rhs, d_rhs


def _sum_of_later(tiles: Tiles, d_g, d_end):
    """Gradient of the log decay: of the running sums g from each token to its segment's last in the
    tile. Summing within the segment alone keeps segments apart bit for bit."""
    started = tiles.started
    same = started == jnp.swapaxes(started, -1, -2)
    later = jnp.triu(jnp.broadcast_to(same, (*d_g.shape[:-1], d_g.shape[-2])).astype(jnp.float32))
    d_a = dot(later, d_g, "ab") + jnp.where(started == started[..., -1:, :], d_end[..., None, :], 0)
    return jnp.where(tiles.valid & ~tiles.first, d_a, 0)


def _starts(tiles, segments, tokens: Tokens, inputs: Inputs) -> Starts | None:
    if inputs.initial_state is None and inputs.start_state is None:
        return None
    return start_contributions(tiles, segments, tokens, inputs.initial_state, inputs.start_state)


def _starts_vjp(tiles, segments, tokens: Tokens, inputs: Inputs):
    if inputs.initial_state is None and inputs.start_state is None:
        return None, None
    return jax.vjp(
        lambda *args: start_contributions(tiles, segments, *args),
        tokens,
        inputs.initial_state,
        inputs.start_state,
    )


class Pulled(NamedTuple):
    """Gradients that come through the returned final state."""

    tokens: Tokens
    entries: jax.Array
    deltas: jax.Array
    initial: jax.Array | None
    start: jax.Array | None


def _final_state(problem, tiles, segments, tokens, walked: Walked, inputs):
    last = _is_last_rank(problem)
    if problem.final_state is FinalState.LAST:
        given = inputs.initial_state, inputs.start_state
        return row_state(segments, walked.exit, *given, last)
    if problem.final_state is FinalState.ALL:
        return segment_states(
            tiles,
            segments,
            tokens,
            walked.S,
            walked.vn,
            inputs.initial_state,
            inputs.start_state,
            last,
        )
    return None


def _final_state_vjp(problem, tiles, segments, tokens, walked: Walked, inputs, d_final):
    """Gradient of the rank's exit state, and the rest of what flows through the final state."""
    d_exit = _zero_state(problem, inputs)
    if d_final is None:
        return d_exit, None

    def run(tokens, walked, initial, start):
        given = inputs._replace(initial_state=initial, start_state=start)
        return _final_state(problem, tiles, segments, tokens, walked, given)

    _, pull = jax.vjp(run, tokens, walked, inputs.initial_state, inputs.start_state)
    d_tokens, d_walked, d_initial, d_start = pull(d_final)
    return d_walked.exit, Pulled(d_tokens, d_walked.S, d_walked.vn, d_initial, d_start)


def _is_last_rank(problem: Problem):
    if problem.axis_name is None:
        return True
    return jax.lax.axis_index(problem.axis_name) == jax.lax.axis_size(problem.axis_name) - 1


def _add(x, y):
    return x if y is None else jax.tree.map(jnp.add, x, y)


def _unprepare(
    problem, inputs, tiles, prepared, d_tokens: Tokens, d_v, d_initial, d_start
) -> Inputs:
    """From gradients of prepared tokens to those of the call's inputs."""
    d_q, d_k, d_beta, d_a = d_tokens
    d_q *= problem.scale
    if problem.l2norm:
        q = prepared.tokens.q / problem.scale
        d_q = cm.normalize_backward(q, prepared.q_rstd, d_q)
        d_k = cm.normalize_backward(prepared.tokens.k, prepared.k_rstd, d_k)
    d_a = jnp.where(tiles.valid, d_a, 0)
    d_x, d_a_log, d_dt_bias = log_decay_backward(
        problem, prepared.x, inputs.a_log, inputs.dt_bias, prepared.tokens.a, d_a
    )

    def token_gradient(d, like):
        return from_tiles(jnp.where(tiles.valid, d, 0)).astype(like.dtype)

    return Inputs(
        token_gradient(d_q, inputs.q),
        token_gradient(d_k, inputs.k),
        token_gradient(d_v, inputs.v),
        token_gradient(d_x, inputs.decay),
        token_gradient(d_beta, inputs.beta[..., None])[..., 0],
        d_initial,
        d_start,
        d_a_log,
        d_dt_bias,
    )
