"""A rank's tokens as tiles of C = 64: layout, and what segments mean inside a tile.

Token arrays are [N, B, H, C, D] (N tile, B row, H head, C token in tile), so that the walk over
tiles takes slices along the leading axis. Masks are [N, B, 1, C, 1].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda.chunk_math import CHUNK
from kernels.segments import Segments


def to_tiles(x: jax.Array) -> jax.Array:
    """[B, H, T, D] -> [N, B, H, C, D]."""
    rows, heads, length, width = x.shape
    return jnp.moveaxis(x.reshape(rows, heads, length // CHUNK, CHUNK, width), 2, 0)


def from_tiles(x: jax.Array) -> jax.Array:
    """[N, B, H, C, D] -> [B, H, T, D]."""
    count, rows, heads, chunk, width = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(rows, heads, count * chunk, width)


class Tiles(NamedTuple):
    """Segments by tile, each [N, B, 1, C, 1].

    `owner` is the segment that the state belongs to after the token: padding keeps the owner before
    it, and it is -1 in a tile until the tile's first real token. `started` counts the segments
    started in the tile so far: tokens of one tile share a segment exactly if `started` is equal.
    """

    valid: jax.Array  # bool
    first: jax.Array  # bool
    owner: jax.Array  # int32
    started: jax.Array  # int32


def tile_segments(segments: Segments) -> Tiles:
    def tiled(x):
        return to_tiles(x[:, None, :, None])

    first, index = tiled(segments.first), tiled(segments.index)
    started = jnp.cumsum(first, axis=3, dtype=jnp.int32)
    return Tiles(tiled(segments.valid), first, jax.lax.cummax(index, axis=3), started)
