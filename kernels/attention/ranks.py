"""What the ranks of a row exchange for attention.

The keys and values of the whole row are gathered, which is linear in the row length. Queries are
redistributed so that all ranks have equal work under causality: the row is cut into 2P pieces, and
rank r, which holds pieces 2r and 2r + 1, works on pieces r and 2P - 1 - r. Two permutations, each
of half the queries, send the queries, and two return the results.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Line(NamedTuple):
    """The ranks of a row: their mesh axis and number. axis_name is None for a single rank."""

    axis_name: str | None
    size: int

    @property
    def rank(self) -> jax.Array:
        return jnp.int32(0) if self.axis_name is None else jax.lax.axis_index(self.axis_name)


def line_of(axis_name: str | None) -> Line:
    """The ranks of the mesh axis, or a single rank if axis_name is None."""
    size = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    return Line(axis_name if size > 1 else None, size)


def gather(line: Line, x: jax.Array, axis: int) -> jax.Array:
    """The whole row of x, whose `axis` runs over tokens."""
    if line.axis_name is None:
        return x
    return jax.lax.all_gather(x, line.axis_name, axis=axis, tiled=True)


def pieces(line: Line) -> tuple[jax.Array, ...]:
    """Numbers of the pieces that this rank works on, in the order of `balance`."""
    if line.axis_name is None:
        return (jnp.int32(0),)
    low, high = line.rank, 2 * line.size - 1 - line.rank
    low_is_even = line.rank % 2 == 0
    return jnp.where(low_is_even, low, high), jnp.where(low_is_even, high, low)


def balance(line: Line, x: jax.Array, axis: int) -> jax.Array:
    """The tokens of this rank's `pieces`, from tokens that the ranks hold in order."""
    if line.axis_name is None:
        return x
    halves = jnp.split(x, 2, axis)
    moved = [
        jax.lax.ppermute(half, line.axis_name, routes)
        for half, routes in zip(halves, _routes(line.size))
    ]
    return jnp.concatenate(moved, axis)


def restore(line: Line, x: jax.Array, axis: int) -> jax.Array:
    """The inverse of `balance`."""
    if line.axis_name is None:
        return x
    halves = jnp.split(x, 2, axis)
    moved = [
        jax.lax.ppermute(half, line.axis_name, [(to, source) for source, to in routes])
        for half, routes in zip(halves, _routes(line.size))
    ]
    return jnp.concatenate(moved, axis)


def _routes(ranks: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(from, to) of every rank's first and second half, pieces 2r and 2r + 1."""

    def worker(piece: int) -> int:
        return min(piece, 2 * ranks - 1 - piece)

    first = [(rank, worker(2 * rank)) for rank in range(ranks)]
    return first, [(rank, worker(2 * rank + 1)) for rank in range(ranks)]
