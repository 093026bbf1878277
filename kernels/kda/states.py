"""Given states in and segment states out for the chunked form, where a segment starts or ends
inside a tile. Plain functions of JAX's own differentiation; the chunk algebra lives in `chunked`.

The walk over tiles forgets everything at a segment's first token (decay factor 0), which is exact
for segments that start from zero. A segment that starts from a state S0 adds, with P the product of
its own decay factors up to a token (its first token's included): (beta k P) S0 to what the delta
rule subtracts in the tile it starts in, (q P) S0 to the output there, and P S0 to the tile's exit
state if it reaches it. Later tiles see nothing special.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda.chunk_math import CHUNK, blocks, dot
from kernels.kda.layout import Tiles
from kernels.segments import Segments


class Tokens(NamedTuple):
    """Prepared tokens [N, B, H, C, .], float32: zero at padding (a: 0, no decay)."""

    q: jax.Array  # scaled, normalized where asked
    k: jax.Array
    beta: jax.Array  # [N, B, H, C, 1]
    a: jax.Array  # log decay


class Starts(NamedTuple):
    """What given start states add, by tile; see the module's text."""

    subtracted: jax.Array  # [N, B, H, C, V]
    out: jax.Array  # [N, B, H, C, V]
    exit: jax.Array  # [N, B, H, K, V]


def start_contributions(
    tiles: Tiles, segments: Segments, tokens: Tokens, initial_state, start_state
) -> Starts:
    """Contributions of initial_state [B, N, H, K, V] and start_state [H, K, V] (or None)."""
    slots = 0 if initial_state is None else initial_state.shape[1]
    parts = []
    if start_state is not None:
        parts.append(_shared_start(tiles, tokens, start_state, slots))
    if initial_state is not None:
        parts.append(_slot_starts(tiles, segments, tokens, initial_state))
    return jax.tree.map(lambda *x: sum(x), *parts)


def _shared_start(tiles, tokens, state, slots) -> Starts:
    """Every segment from number `slots` on starts from one state: one product for all tiles."""
    mine = (tiles.started > 0) & (tiles.owner >= slots)
    decay = jnp.where(mine, _restarting_prefix(jnp.exp(tokens.a), tiles.first), 0)

    def times_state(rows):
        return jnp.einsum("nbhck,hkv->nbhcv", rows, state, precision="highest")

    last = decay[..., -1, :, None]
    return Starts(
        times_state(tokens.beta * tokens.k * decay), times_state(tokens.q * decay), last * state
    )


def _slot_starts(tiles, segments, tokens, initial_state) -> Starts:
    """Segment n starts in one tile of one rank: gather that tile, add its part back there."""
    rows, slots = initial_state.shape[:2]
    starts = segments.first[:, None] & _is_segment(segments, slots)  # [B, slots, T]
    tile = jnp.argmax(starts, axis=2) // CHUNK
    here = jnp.any(starts, axis=2)[..., None, None, None]
    q, k, beta, a = (_gather(x, tile) for x in tokens)  # [B, slots, H, C, .]
    number = jnp.arange(slots)[:, None, None, None]
    mine = here & (_gather(tiles.owner, tile) == number)  # [B, slots, 1, C, 1]
    prefix = prefix_product(jnp.where(mine, jnp.exp(a), 1))
    decay = jnp.where(mine, prefix, 0)
    subtracted = dot(beta * k * decay, initial_state, "ab")
    out = dot(q * decay, initial_state, "ab")
    exits = decay[..., -1, :, None] * initial_state

    def scatter(x):
        count = tiles.valid.shape[0]
        whole = jnp.zeros((count, *x[:, 0].shape), x.dtype)
        return whole.at[tile, jnp.arange(rows)[:, None]].add(x)

    return Starts(scatter(subtracted), scatter(out), scatter(exits))


def segment_states(
    tiles: Tiles, segments: Segments, tokens: Tokens, entries, deltas, initial_state, start_state,
    is_last_rank,
):  # fmt: skip
    """States after segments 0 .. max_segments - 1, [B, max_segments, H, K, V], 0 on ranks where the
    segment does not end.

    entries [N, B, H, K, V] are the tiles' entry states, deltas [N, B, H, C, V] the delta rule's
    corrected values. A segment without tokens keeps its start state.
    """
    number = segments.max_segments
    mine = segments.valid[:, None] & _is_segment(segments, number)  # [B, M, T]
    here = jnp.any(mine, axis=2) & (segments.after != jnp.arange(number))
    length = mine.shape[2]
    tile = (length - 1 - jnp.argmax(mine[..., ::-1], axis=2)) // CHUNK
    _, k, _, a = (_gather(x, tile) for x in tokens)
    of_segment = _gather(tiles.valid, tile) & (
        _gather(tiles.owner, tile) == jnp.arange(number)[:, None, None, None]
    )
    factor = jnp.where(of_segment, jnp.exp(a), 1)
    kept = jnp.where(of_segment, k * suffix_product(factor), 0)
    begins = jnp.any(_gather(tiles.first, tile) & of_segment, axis=-2, keepdims=True)
    starts = start_states(initial_state, start_state, number, entries[0])
    entry = jnp.where(begins, starts, _gather(entries, tile))
    state = prefix_product(factor)[..., -1, :, None] * entry
    state = state + dot(kept, _gather(deltas, tile), "aa")
    here = here[..., None, None, None]
    empty = (jnp.arange(number) >= segments.count)[..., None, None, None]
    return jnp.where(here, state, jnp.where(empty & is_last_rank, starts, 0))


def row_state(segments: Segments, exit_state, initial_state, start_state, is_last_rank):
    """State after the row's last segment [B, H, K, V] on the last rank, 0 on others; a row without
    tokens keeps the first segment's start state."""
    starts = start_states(initial_state, start_state, 1, exit_state)[:, 0]
    empty = (segments.count == 0)[..., None, None]
    return jnp.where(is_last_rank, jnp.where(empty, starts, exit_state), 0)


def start_states(initial_state, start_state, number: int, like):
    """Start states of segments 0 .. number - 1: [B, number, H, K, V], from one state `like`."""
    fresh = jnp.zeros_like(like) if start_state is None else start_state
    shape = (like.shape[0], number, *like.shape[1:])
    fresh = jnp.broadcast_to(fresh[:, None] if start_state is None else fresh, shape)
    if initial_state is None:
        return fresh
    slots = min(number, initial_state.shape[1])
    return jnp.concatenate([initial_state[:, :slots], fresh[:, slots:]], axis=1)


def _is_segment(segments: Segments, number: int):
    """[B, number, T] bool: the token is of segment n."""
    return segments.index[:, None] == jnp.arange(number)[:, None]


def _gather(x, tile):
    """x [N, B, ...] at tile [B, n] -> [B, n, ...]."""
    return x[tile, jnp.arange(x.shape[1])[:, None]]


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
