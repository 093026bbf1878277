"""Sends tokens to the ranks of their experts and back, along the expert axis.

No token is dropped: a rank has room for every token of its group that could choose its experts, and
computes only those that did.

Axes: M row (a token for one of its experts), E expert, P rank of the expert axis, D width.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels import select
from kernels.vma import zeros_like_varying
from model.axes import EXPERT


class Slices(NamedTuple):
    """One direction of an exchange, as arguments of `ragged_all_to_all`; [E] int32 each."""

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


class Exchange(NamedTuple):
    """Both directions of an exchange. sizes: [E / P] int32, rows of each of this rank's experts.

    Rows that arrive are ordered by expert, and for each expert by the sending rank.
    """

    there: Slices
    back: Slices
    sizes: jax.Array


def plan_exchange(counts: jax.Array) -> Exchange:
    """Plans an exchange. counts [E] int32: this rank's rows of each expert, held in order.

    Inside `jax.shard_map`.
    """
    ranks, rank = jax.lax.axis_size(EXPERT), jax.lax.axis_index(EXPERT)
    own = counts.shape[0] // ranks
    everywhere = jax.lax.all_gather(counts, EXPERT)  # [P, E]
    begins = jnp.cumsum(everywhere, axis=1) - everywhere  # in the rows of each rank
    # Where a rank's rows of an expert begin on that expert's rank: after those of earlier experts
    # there, and after those of earlier ranks.
    totals = everywhere.sum(axis=0).reshape(ranks, own)
    arrivals = (jnp.cumsum(totals, axis=1) - totals).reshape(-1)
    arrivals = arrivals + jnp.cumsum(everywhere, axis=0) - everywhere  # [P, E]

    def of_own(x: jax.Array) -> jax.Array:
        """[P, E] -> [P * E / P]: this rank's experts, by sending rank."""
        return jax.lax.dynamic_slice_in_dim(x, rank * own, own, axis=1).reshape(-1)

    there = Slices(begins[rank], counts, arrivals[rank], of_own(everywhere))
    back = Slices(of_own(arrivals), of_own(everywhere), of_own(begins), counts)
    return Exchange(there, back, jax.lax.dynamic_index_in_dim(totals, rank, keepdims=False))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def move(x: jax.Array, there: Slices, back: Slices, length: int) -> jax.Array:
    """Rows x [M, D] -> [length, D]: those that arrive, then zeros. `back` is the reverse exchange,
    for the gradient."""
    out = zeros_like_varying(x, (length, x.shape[1]), x.dtype)
    if select.platform(x) == "tpu":
        return jax.lax.ragged_all_to_all(x, out, *there, axis_name=EXPERT)
    return _move_padded(x, out, there)


def _move_forward(x, there, back, length):
    return move(x, there, back, length), (there, back, x.shape[0])


def _move_backward(length, saved, d_out):
    there, back, rows = saved
    return move(d_out, back, there, rows), None, None


move.defvjp(_move_forward, _move_backward)


def _move_padded(x: jax.Array, out: jax.Array, slices: Slices) -> jax.Array:
    """`ragged_all_to_all` for devices without it: slices padded to the longest possible."""
    ranks, most = jax.lax.axis_size(EXPERT), min(x.shape[0], out.shape[0])
    to_all = functools.partial(
        jax.lax.all_to_all, axis_name=EXPERT, split_axis=0, concat_axis=0, tiled=True
    )
    sources = _places(slices.input_offsets, slices.send_sizes, ranks, most, 0)
    received = to_all(x[sources])
    starts = to_all(slices.output_offsets)
    return out.at[_places(starts, slices.recv_sizes, ranks, most, out.shape[0])].set(
        received, mode="drop"
    )


def _places(offsets: jax.Array, sizes: jax.Array, ranks: int, most: int, missing: int) -> jax.Array:
    """[P * most] int32: the rows of each rank's slices, one slice after another, then `missing`."""

    def of_rank(offsets: jax.Array, sizes: jax.Array) -> jax.Array:
        place, ends = jnp.arange(most), jnp.cumsum(sizes)
        which = jnp.searchsorted(ends, place, side="right")
        rows = jnp.take(offsets - ends + sizes, which, mode="clip") + place
        return jnp.where(place < ends[-1], rows, missing)

    by_rank = offsets.reshape(ranks, -1), sizes.reshape(ranks, -1)
    return jax.vmap(of_rank)(*by_rank).reshape(-1)
