"""The positions of queries and keys in the row, and which blocks of them meet.

All keys are present, in order: first those before the row (`Memory`), then the row's. A rank's
queries may be in any order in which each block's positions are consecutive.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Places(NamedTuple):
    """Segment numbers, -1 at padding, and positions counted from the first key.

    q_index: [B, n] int32. q_position: [n] int32. k_index: [B, s] int32, of the keys 0..s-1.
    """

    q_index: jax.Array
    q_position: jax.Array
    k_index: jax.Array


class Blocks(NamedTuple):
    """Queries per block and keys per block; they divide n and s."""

    q: int
    k: int


def meeting(places: Places, blocks: Blocks) -> jax.Array:
    """[B, n / blocks.q, s / blocks.k] bool: whether any query of a block may see any key of one.

    Segment numbers never decrease along a row, so it suffices to compare the queries' lowest with
    the keys' highest number.
    """
    q_index = places.q_index.reshape(places.q_index.shape[0], -1, blocks.q)
    k_index = places.k_index.reshape(places.k_index.shape[0], -1, blocks.k)
    lowest = jnp.where(q_index < 0, jnp.iinfo(jnp.int32).max, q_index).min(2)
    shared = lowest[:, :, None] <= k_index.max(2)[:, None]
    last = places.q_position.reshape(-1, blocks.q)[:, -1]
    return shared & (last[:, None] >= blocks.k * jnp.arange(k_index.shape[1]))


def own_block(places: Places, blocks: Blocks) -> jax.Array:
    """[n / blocks.q, s / blocks.k] bool: whether a key block contains the position of a query."""
    position = places.q_position.reshape(-1, blocks.q)
    block = jnp.arange(places.k_index.shape[1] // blocks.k)
    first, last = position[:, :1] // blocks.k, position[:, -1:] // blocks.k
    return (first <= block) & (block <= last)
