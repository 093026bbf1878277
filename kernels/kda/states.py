"""Given states in and segment states out for the chunked form, where a segment starts or ends
inside a tile. The chunk algebra lives in `chunked`; here are plain functions for JAX to
differentiate.

The walk over tiles forgets everything at a segment's first token (decay factor 0), which is exact
for segments that start from zero. A segment that starts from a state S0 adds, with P the product of
its own decay factors up to a token (its first token's included): (beta k P) S0 to what the delta
rule subtracts in the tile it starts in, (q P) S0 to the output there, and P S0 to the tile's exit
state if it reaches it. Later tiles see nothing special.

A slot of `initial_state`, and a returned segment state, concern one tile of a chain: those tiles
are gathered ("events"), and the walk adds or reads them where it passes. `start_state` may concern
any number of tiles: `shared_start` handles all tiles of a step.

Arrays of events are [Q, n, ...] with Q = J G chains and n slots or segments.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda.chunk_math import CHUNK, blocks, dot
from kernels.kda.gate import Raw, Tokens, prepare
from kernels.kda.layout import Tiles
from kernels.kda.problem import Problem
from kernels.segments import Segments


class Starts(NamedTuple):
    """What given start states add, by tile (or event); see the module's text."""

    subtracted: jax.Array  # [..., C, V]
    out: jax.Array  # [..., C, V]
    exit: jax.Array  # [..., K, V]


class Events(NamedTuple):
    """Where the n-th segment of a chain starts (or ends)."""

    tile: jax.Array  # [Q, n] int32, 0 where not on this rank
    here: jax.Array  # [Q, n] bool


def start_events(segments: Segments, heads: int, number: int) -> Events:
    """Where segments 0 .. number - 1 start."""
    starts = segments.first[:, None] & _is_segment(segments, number)  # [B, n, T]
    tile = jnp.argmax(starts, axis=2).astype(jnp.int32) // CHUNK
    return _to_chains(tile, jnp.any(starts, axis=2), heads)


def end_events(segments: Segments, heads: int, number: int) -> Events:
    """Where segments 0 .. number - 1 have their last token in the whole row."""
    mine = segments.valid[:, None] & _is_segment(segments, number)
    here = jnp.any(mine, axis=2) & (segments.after != jnp.arange(number))
    last = mine.shape[2] - 1 - jnp.argmax(mine[..., ::-1], axis=2).astype(jnp.int32)
    return _to_chains(jnp.where(here, last, 0) // CHUNK, here, heads)


def _is_segment(segments: Segments, number: int):
    """[B, number, T] bool: the token is of segment n."""
    return segments.index[:, None] == jnp.arange(number)[:, None]


def _to_chains(tile, here, heads: int) -> Events:
    return Events(jnp.repeat(tile, heads, axis=0), jnp.repeat(here, heads, axis=0))


def gather(events: Events, x: jax.Array) -> jax.Array:
    """Of x [J, G, N, M, ...] the events' tiles [Q, n, ...]."""
    chains = events.tile.shape[0]
    x = x.reshape(chains, -1, *x.shape[4:])
    return x[jnp.arange(chains)[:, None], events.tile]


def scatter_add(events: Events, x: jax.Array, values: jax.Array) -> jax.Array:
    """x [J, G, N, M, ...] with the events' values [Q, n, ...] added to their tiles."""
    chains = events.tile.shape[0]
    flat = x.reshape(chains, -1, *x.shape[4:])
    flat = flat.at[jnp.arange(chains)[:, None], events.tile].add(values.astype(x.dtype))
    return flat.reshape(x.shape)


def slot_starts(problem: Problem, raw: Raw, tiles: Tiles, here: jax.Array, initial) -> Starts:
    """What slots add to the tiles their segments start in. raw, tiles: of those tiles
    [Q, n, C, .]; here [Q, n]; initial [Q, n, K, V]."""
    tokens = prepare(problem, raw, tiles.valid)
    number = jnp.arange(here.shape[1])[:, None, None]
    mine = here[..., None, None] & (tiles.owner == number)  # [Q, n, C, 1]
    prefix = prefix_product(jnp.where(mine, jnp.exp(tokens.a), 1))
    decay = jnp.where(mine, prefix, 0)
    return Starts(
        dot(tokens.beta * tokens.k * decay, initial, "ab"),
        dot(tokens.q * decay, initial, "ab"),
        decay[..., -1, :, None] * initial,
    )


def shared_start(tokens: Tokens, tiles: Tiles, state: jax.Array, slots: int) -> Starts:
    """Segments from number `slots` on all start from state [G, K, V]; tokens and tiles
    [G, M, C, .]."""
    mine = (tiles.started > 0) & (tiles.owner >= slots)
    decay = jnp.where(mine, _restarting_prefix(jnp.exp(tokens.a), tiles.first), 0)
    state = jnp.broadcast_to(state[:, None], (*tokens.k.shape[:2], *state.shape[1:]))
    return Starts(
        dot(tokens.beta * tokens.k * decay, state, "ab"),
        dot(tokens.q * decay, state, "ab"),
        decay[..., -1, :, None] * state,
    )


def segment_ends(problem: Problem, raw: Raw, tiles: Tiles, here, entries, deltas, starts):
    """States after segments [Q, n, K, V], 0 where the segment does not end on this rank.

    raw, tiles [Q, n, C, .], entry states `entries` [Q, n, K, V] and corrected values `deltas`
    [Q, n, C, V] are those of the tiles the segments end in; starts [Q, n, K, V] what they start
    from.
    """
    tokens = prepare(problem, raw, tiles.valid)
    number = jnp.arange(here.shape[1])[:, None, None]
    mine = tiles.valid & (tiles.owner == number)
    factor = jnp.where(mine, jnp.exp(tokens.a), 1)
    kept = jnp.where(mine, tokens.k * suffix_product(factor), 0)
    begins = jnp.any(tiles.first & mine, axis=-2, keepdims=True)
    state = prefix_product(factor)[..., -1, :, None] * jnp.where(begins, starts, entries)
    return jnp.where(here[..., None, None], state + dot(kept, deltas, "aa"), 0)


def start_states(initial_state, start_state, number: int, like: jax.Array):
    """What segments 0 .. number - 1 start from, [B, number, H, K, V]; `like` is a state
    [B, H, K, V]."""
    shape = (like.shape[0], number, *like.shape[1:])
    fresh = jnp.zeros_like(like, shape=shape)
    if start_state is not None:
        fresh = jnp.broadcast_to(start_state, shape)
    if initial_state is None:
        return fresh
    slots = min(number, initial_state.shape[1])
    return jnp.concatenate([initial_state[:, :slots], fresh[:, slots:]], axis=1)


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
    """Inclusive running product that begins anew at each first token [..., C, 1]."""
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
