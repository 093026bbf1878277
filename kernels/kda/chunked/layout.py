"""The order in which the chunked form processes a rank's tokens, and segments inside its chunks.

A chain is one head of one row; a chunk is C = CHUNK tokens of a chain. Chains are divided into
groups and chunks into steps, so that the arrays of one step fit the processor's cache:

    token arrays [B, H, T, ...] -> [J, G, N, M, C, ...]

with J groups of G chains and N steps of M chunks. If all chunks are full, this is a reshape without
a copy. One step works on [G, M, C, ...].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda.problem import CHUNK
from kernels.segments import Segments

STEP_CHUNKS = 16  # chunks per step: half a MB per float32 array of 128 channels; see NOTES.md


class Grid(NamedTuple):
    """Sizes of the walk."""

    groups: int  # J
    chains: int  # G
    steps: int  # N
    chunks: int  # M


def plan_grid(chains: int, length: int, ranks: int) -> Grid:
    """Grid for `chains` = B H chains of `length` tokens (a multiple of CHUNK) on each of the ranks.

    Ranks work on different chain groups at the same time (`wavefront`), so more ranks need more
    groups. The number of groups divides the number of chains.
    """
    sizes = [n for n in range(1, chains + 1) if chains % n == 0]
    wanted = 1 if ranks == 1 else max(n for n in sizes if n <= 2 * ranks)
    groups = next(n for n in sizes if n >= wanted and chains // n <= STEP_CHUNKS)
    chunks = length // CHUNK
    steps = -(-chunks // (STEP_CHUNKS // (chains // groups)))
    return Grid(groups, chains // groups, steps, -(-chunks // steps))


def deal(grid: Grid, x: jax.Array) -> jax.Array:
    """[B, H, T, ...] -> [J, G, N, M, C, ...]; zeros fill the last step's missing chunks."""
    missing = grid.steps * grid.chunks * CHUNK - x.shape[2]
    if missing:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, missing), *((0, 0),) * (x.ndim - 3)))
    return x.reshape(*grid, CHUNK, *x.shape[3:])


def collect(x: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of `deal`, with the leading [B, H, T] of `like`."""
    rows, heads, length = like.shape[:3]
    x = x.reshape(rows, heads, -1, *x.shape[5:])
    return x[:, :, :length]


def at_step(x: jax.Array, group, step) -> jax.Array:
    """[J, G, N, ...] -> [G, ...]."""
    sizes = (1, x.shape[1], 1, *x.shape[3:])
    return jax.lax.dynamic_slice(x, _start(x, group, step), sizes)[0, :, 0]


def put_step(x: jax.Array, value: jax.Array, group, step) -> jax.Array:
    """x [J, G, N, ...] with value [G, ...] at (group, step), in x's dtype."""
    value = value[None, :, None].astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, value, _start(x, group, step))


def _start(x: jax.Array, group, step) -> tuple:
    first = (group, 0, step, *(0,) * (x.ndim - 3))
    return tuple(jnp.asarray(i, jnp.int32) for i in first)


class Chunks(NamedTuple):
    """Segments by token, each [..., C, 1].

    `owner` is the segment to which the state belongs after the token. Padding keeps the previous
    owner; before the chunk's first real token it is -1. `started` counts the segments started in
    the chunk so far: two tokens of a chunk share a segment if and only if their counts are equal.
    """

    valid: jax.Array  # bool
    first: jax.Array  # bool
    owner: jax.Array  # int32
    started: jax.Array  # int32


def chunk_segments(grid: Grid, heads: int, segments: Segments) -> Chunks:
    """[J, G, N, M, C, 1] each."""

    def dealt(x, fill):
        missing = grid.steps * grid.chunks * CHUNK - x.shape[1]
        x = jnp.pad(x, ((0, 0), (0, missing)), constant_values=fill)
        x = jnp.broadcast_to(x[:, None], (x.shape[0], heads, x.shape[1]))
        return x.reshape(*grid, CHUNK, 1)

    first, index = dealt(segments.first, False), dealt(segments.index, -1)
    started = jnp.cumsum(first, axis=4, dtype=jnp.int32)
    return Chunks(dealt(segments.valid, False), first, jax.lax.cummax(index, axis=4), started)
