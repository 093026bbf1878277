"""Given start states and returned segment states in the chunked form, if a segment starts or ends
inside a chunk. The chunk algebra is in `chunked`; these are plain functions that JAX
differentiates.

The walk over chunks forgets everything at a segment's first token (decay factor 0), which is exact
for segments that start from zero. For a segment that starts from a state S0, let P be the product
of its own decay factors up to and including a token. In the chunk where it starts, it adds
(beta k P) S0 to what the delta rule subtracts, (q P) S0 to the output, and P S0 to the chunk's exit
state if it reaches the end of the chunk. Later chunks need no special treatment.

A slot of `initial_state`, and a returned segment state, each concern one chunk of a chain. These
chunks ("events") are gathered, and the walk adds or reads their values when it reaches them.
`default_initial_state` may concern any number of chunks, so `shared_start` handles all chunks of a
step.

Arrays of events are [Q, n, ...] with Q = J G chains and n slots or segments.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda.chunked.chunk_math import blocks
from kernels.kda.chunked.layout import Chunks
from kernels.kda.chunked.tokens import Raw, Tokens, prepare
from kernels.kda.problem import CHUNK, Problem
from kernels.kda.products import dot
from kernels.segments import Segments


class Starts(NamedTuple):
    """The contributions of given start states, by chunk (or event); see the module docstring."""

    subtracted: jax.Array  # [..., C, V]
    out: jax.Array  # [..., C, V]
    exit: jax.Array  # [..., K, V]


class Events(NamedTuple):
    """Where the n-th segment of a chain starts (or ends)."""

    chunk: jax.Array  # [Q, n] int32, 0 if not on this rank
    here: jax.Array  # [Q, n] bool


def start_events(segments: Segments, heads: int, number: int) -> Events:
    """Where segments 0 .. number - 1 start."""
    starts = segments.first[:, None] & _is_segment(segments, number)  # [B, n, T]
    chunk = jnp.argmax(starts, axis=2).astype(jnp.int32) // CHUNK
    return _to_chains(chunk, jnp.any(starts, axis=2), heads)


def end_events(segments: Segments, heads: int, number: int) -> Events:
    """Where segments 0 .. number - 1 have their last token in the whole row."""
    mine = segments.valid[:, None] & _is_segment(segments, number)
    here = jnp.any(mine, axis=2) & (segments.after != jnp.arange(number))
    last = mine.shape[2] - 1 - jnp.argmax(mine[..., ::-1], axis=2).astype(jnp.int32)
    return _to_chains(jnp.where(here, last, 0) // CHUNK, here, heads)


def _is_segment(segments: Segments, number: int):
    """[B, number, T] bool: whether the token belongs to segment n."""
    return segments.index[:, None] == jnp.arange(number)[:, None]


def _to_chains(chunk, here, heads: int) -> Events:
    return Events(jnp.repeat(chunk, heads, axis=0), jnp.repeat(here, heads, axis=0))


def gather(events: Events, x: jax.Array) -> jax.Array:
    """The events' chunks [Q, n, ...] of x [J, G, N, M, ...]."""
    chains = events.chunk.shape[0]
    x = x.reshape(chains, -1, *x.shape[4:])
    return x[jnp.arange(chains)[:, None], events.chunk]


def scatter_add(events: Events, x: jax.Array, values: jax.Array) -> jax.Array:
    """x [J, G, N, M, ...] with the events' values [Q, n, ...] added to their chunks."""
    chains = events.chunk.shape[0]
    flat = x.reshape(chains, -1, *x.shape[4:])
    flat = flat.at[jnp.arange(chains)[:, None], events.chunk].add(values.astype(x.dtype))
    return flat.reshape(x.shape)


def slot_starts(problem: Problem, raw: Raw, chunks: Chunks, here: jax.Array, initial) -> Starts:
    """The contributions of slots to the chunks in which their segments start. raw and chunks are
    those chunks' [Q, n, C, .]; here [Q, n]; initial [Q, n, K, V]."""
    tokens = prepare(problem, raw, chunks.valid)
    number = jnp.arange(here.shape[1])[:, None, None]
    mine = here[..., None, None] & (chunks.owner == number)  # [Q, n, C, 1]
    prefix = prefix_product(jnp.where(mine, jnp.exp(tokens.a), 1))
    decay = jnp.where(mine, prefix, 0)
    return Starts(
        dot(tokens.beta * tokens.k * decay, initial, "ab"),
        dot(tokens.q * decay, initial, "ab"),
        decay[..., -1, :, None] * initial,
    )


def shared_start(tokens: Tokens, chunks: Chunks, state: jax.Array, slots: int) -> Starts:
    """The contributions of `state` [G, K, V], from which all segments from number `slots` on start;
    tokens and chunks [G, M, C, .]."""
    mine = (chunks.started > 0) & (chunks.owner >= slots)
    decay = jnp.where(mine, _restarting_prefix(jnp.exp(tokens.a), chunks.first), 0)
    state = jnp.broadcast_to(state[:, None], (*tokens.k.shape[:2], *state.shape[1:]))
    return Starts(
        dot(tokens.beta * tokens.k * decay, state, "ab"),
        dot(tokens.q * decay, state, "ab"),
        decay[..., -1, :, None] * state,
    )


def segment_ends(problem: Problem, raw: Raw, chunks: Chunks, here, entries, deltas, starts):
    """States after segments [Q, n, K, V], 0 if the segment does not end on this rank.

    raw, chunks [Q, n, C, .], entry states `entries` [Q, n, K, V] and corrected values `deltas`
    [Q, n, C, V] are those of the chunks in which the segments end; starts [Q, n, K, V] are the
    segments' start states.
    """
    tokens = prepare(problem, raw, chunks.valid)
    number = jnp.arange(here.shape[1])[:, None, None]
    mine = chunks.valid & (chunks.owner == number)
    factor = jnp.where(mine, jnp.exp(tokens.a), 1)
    kept = jnp.where(mine, tokens.k * suffix_product(factor), 0)
    begins = jnp.any(chunks.first & mine, axis=-2, keepdims=True)
    state = prefix_product(factor)[..., -1, :, None] * jnp.where(begins, starts, entries)
    return jnp.where(here[..., None, None], state + dot(kept, deltas, "aa"), 0)


def prefix_product(factor):
    """Inclusive running product over the tokens of [..., C, K]."""
    shape, n = factor.shape, 1
    while n < shape[-2]:
        pairs = blocks(factor, n)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        factor = jnp.stack([first, second * first[..., -1:, :]], axis=-3).reshape(shape)
        n *= 2
    return factor


def suffix_product(factor):
    """Product over the tokens after each one, of [..., C, K]."""
    after = jnp.concatenate([factor[..., 1:, :], jnp.ones_like(factor[..., :1, :])], axis=-2)
    return jnp.flip(prefix_product(jnp.flip(after, -2)), -2)


def _restarting_prefix(factor, first):
    """Inclusive running product that restarts at each first token [..., C, 1]."""
    shape, n = factor.shape, 1
    whole = ~first  # no restart since the block's start
    while n < shape[-2]:
        pairs, clear = blocks(factor, n), blocks(whole, n)
        left, right = pairs[..., 0, :, :], pairs[..., 1, :, :]
        right = jnp.where(clear[..., 1, :, :], right * left[..., -1:, :], right)
        factor = jnp.stack([left, right], axis=-3).reshape(shape)
        on = clear[..., 1, :, :] & clear[..., 0, -1:, :]
        whole = jnp.stack([clear[..., 0, :, :], on], axis=-3).reshape(first.shape)
        n *= 2
    return factor
