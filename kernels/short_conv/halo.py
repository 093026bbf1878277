"""The halo of the short convolution: inputs before a rank's tokens, received and passed on."""

import functools

import jax
import jax.numpy as jnp

from kernels.segments import Segments
from kernels.vma import vary, varying_axes


@jax.custom_vjp
def _with_rows(x, positions):
    """Returns x [B, T, D] and its tokens at `positions` [B, n]. The rows' gradient is added to x's
    in place; by default it would be an array as large as x, nearly all zeros."""
    return x, jnp.take_along_axis(x, positions[..., None], axis=1)


def _with_rows_backward(positions, cotangents):
    d_x, d_rows = cotangents
    return d_x.at[jnp.arange(d_x.shape[0])[:, None], positions].add(d_rows), None


_with_rows.defvjp(lambda x, positions: (_with_rows(x, positions), positions), _with_rows_backward)


def taken(x, segments: Segments, width: int):
    """(x; the rank's newest inputs, at most `width` of them, for the next rank's halo; the `width`
    inputs up to the rank's last real token, for the next tail, in which the rank's first input
    replaces those before it)."""
    (rows, length), count = segments.valid.shape, min(width, x.shape[1])
    newest = jnp.broadcast_to(jnp.arange(length - count, length), (rows, count))
    ends = jnp.maximum(_tail_places(segments, width) - width, 0)
    places = jnp.concatenate([newest, ends], axis=1)
    x, rows_taken = _with_rows(x, vary(places, varying_axes(x)))
    return x, rows_taken[:, :count], rows_taken[:, count:]


def _tail_places(segments: Segments, width: int) -> jax.Array:
    """The `width` positions up to each row's last real token [B, width], counted from the halo's
    first input; those of the halo if the rank has no real token."""
    position = jnp.arange(segments.valid.shape[1])
    last = jnp.max(jnp.where(segments.valid, position, -1), axis=1)
    return last[:, None] + 1 + jnp.arange(width)


def receive_halo(axis_name, newest, tail, segments: Segments, upstream):
    """The W - 1 inputs before the rank's tokens [B, W - 1, D], zero if not of the segment that
    continues here. The sender knows which segment that is, so no ids are sent."""
    width, length = tail.shape[1], segments.valid.shape[1]
    if axis_name is None or width == 0 or jax.lax.axis_size(axis_name) == 1:
        return tail
    ranks, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    started = segments.before + jnp.sum(segments.first, axis=1, keepdims=True, dtype=jnp.int32)
    current = jnp.maximum(started - 1, 0)
    own = jnp.where((segments.index == current)[:, -width:, None], newest, 0)
    goes_through = (current == upstream)[..., None]
    halo = jnp.where(rank == 0, tail, 0)
    # If a rank has fewer tokens than the halo, it passes on what it received, one rank per hop.
    for _ in range(min(ranks - 1, -(-width // length))):
        window = jnp.concatenate([jnp.where(goes_through, halo, 0), own], axis=1)[:, -width:]
        arrived = jax.lax.ppermute(window, axis_name, [(r, r + 1) for r in range(ranks - 1)])
        halo = jnp.where(rank == 0, tail, arrived)
    return halo


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def received_halo(axis_name, newest, tail, segments: Segments, upstream, halo):
    """The halo that `receive_halo` returned before, with the gradient of that call."""
    return halo


def _received_forward(axis_name, *arguments):
    return arguments[-1], arguments[:-1]


def _received_backward(axis_name, saved, d_halo):
    newest, tail, *where = saved
    # receive_halo is linear, so only cotangents are sent: the recomputed values are unused.
    receive = lambda newest, tail: receive_halo(axis_name, newest, tail, *where)  # noqa: E731
    return *jax.vjp(receive, newest, tail)[1](d_halo), None, None, None


received_halo.defvjp(_received_forward, _received_backward)


def next_tail(ends, halo, index, tail, segments: Segments, axis_name):
    width = tail.shape[1]
    if width == 0:
        return jnp.zeros(tail.shape, ends.dtype)
    places = _tail_places(segments, width)
    segment = jnp.take_along_axis(index, jnp.maximum(places[:, :1] - 1 + width, 0), axis=1)
    before = jnp.take_along_axis(halo, jnp.minimum(places, width - 1)[..., None], axis=1)
    inputs = jnp.where((places < width)[..., None], before, ends)
    same = jnp.take_along_axis(index, places, axis=1) == segment
    owner = (places[:, :1] > 0) & (segments.after == segments.count)
    tail_out = jnp.where((same & owner)[..., None], inputs, 0)
    rank = 0 if axis_name is None else jax.lax.axis_index(axis_name)
    empty = (segments.count == 0) & (rank == 0)
    tail_out = jnp.where(empty[..., None], tail.astype(ends.dtype), tail_out)
    return tail_out
