"""Causal depthwise convolution over a row's tokens that stops at segment boundaries."""

import functools
import importlib
import itertools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from kernels.segments import Segments
from kernels.select import choose
from kernels.short_conv.halo import next_tail, receive_halo, received_halo, taken
from kernels.vma import vary, varying_axes


def short_conv(
    x: Any,
    weight: Any,
    segments: Segments,
    *,
    heads: int | None = None,
    tail: Any = None,
    axis_name: str | None = None,
    activation: str | None = "silu",
    implementation: str | None = None,
) -> tuple[Any, Any]:
    """y[t] = activation(sum_j weight[W - 1 - j] x[t - j]) over the taps j < W of t's own segment.

    Taps are counted by position in the row; positions of padding or of another segment contribute
    0. Taps before the row's start read `tail`, for the row's first segment only. With axis_name the
    call must be inside `jax.shard_map`, and T is the rank's part (of any length); each rank sends
    W - 1 inputs to the next.

    x may be any tree of arrays with different D; weight, tail and both results are then trees of
    the same structure. The arrays share one exchange between ranks.

    Args:
        x: [B, T, D].
        weight: [W, D]; weight[W - 1] is for the token itself.
        heads: return y as [B, heads, T, D / heads], as KDA takes it, instead of [B, T, D].
        segments: of the same tokens, from `plan_segments` with the same axis_name.
        tail: [B, W - 1, D], the inputs before the row, zero in rows that do not continue; the same
            on all ranks of axis_name.
        activation: "silu" or None.
        implementation: "mosaic_tpu", the TPU kernels here (W <= 8); "chunked" or "recurrent",
            jax.numpy; None chooses "mosaic_tpu" on TPU, else jax.numpy.

    Returns:
        y [B, T, D], or see `heads`, in x's dtype, 0 at padding; and the next row's tail
        [B, W - 1, D], in x's dtype and the same on all ranks: the W - 1 positions up to the last
        segment's last token, as far as they belong to that segment (in `tail` too, if the segment
        continues it), and zero elsewhere. A row without tokens returns its own tail.

    Raises:
        ValueError: for shapes that do not match or an unknown activation.
    """
    y, next_row, _ = _on_rank(
        x, weight, segments, heads, tail, None, axis_name, activation, implementation
    )
    if axis_name is not None:
        next_row = jax.tree.map(lambda x: jax.lax.psum(x, axis_name), next_row)
    return y, next_row


def short_conv_on_rank(
    x: Any,
    weight: Any,
    segments: Segments,
    *,
    heads: int,
    tail: Any,
    halo: jax.Array | None,
    axis_name: str | None,
    implementation: str | None,
) -> tuple[Any, Any, jax.Array]:
    """`short_conv` without the final sum over ranks, which can be repeated without communication.

    Args:
        halo: None, or the halo that a call with the same arguments returned, which then replaces
            the one the rank would receive. Its gradient is that of the first call and is sent to
            the previous rank.

    Returns:
        y; the rank's share of the next row's tail, whose sum over the ranks of axis_name is the
        tail; and the halo, [B, W - 1, D of all of x].
    """
    return _on_rank(x, weight, segments, heads, tail, halo, axis_name, "silu", implementation)


def _on_rank(x, weight, segments, heads, tail, halo, axis_name, activation, implementation):
    """See `short_conv_on_rank`."""
    tree: Any  # mypy does not know its methods
    xs, tree = jax.tree.flatten(x)
    weights = tree.flatten_up_to(weight)
    tails = [None] * len(xs) if tail is None else tree.flatten_up_to(tail)
    implementation = choose(implementation, xs[0])
    for arrays in zip(xs, weights, tails):
        _check(*arrays, weights[0].shape[0], segments, heads, activation, implementation)
    if tail is None:
        before = (xs[0].shape[0], weights[0].shape[0] - 1)
        tails = [jnp.zeros((*before, x.shape[2]), x.dtype) for x in xs]
    ys, ends, halo = _convolve(
        (activation, implementation), heads, xs, weights, tails, halo, segments, axis_name
    )
    return tree.unflatten(ys), tree.unflatten(ends), halo


def _convolve(how, heads, xs, weights, tails, halo, segments: Segments, axis_name):
    """(results, contributions to the next tails, halo) of several inputs, which share one exchange
    between ranks."""
    width, tail = weights[0].shape[0], _joined(tails)
    # The segment of upstream inputs; the row's first segment if none has started yet.
    upstream = jnp.maximum(segments.before - 1, 0)
    index = jnp.concatenate(
        [jnp.broadcast_to(upstream, tail.shape[:2]).astype(jnp.int32), segments.index], axis=1
    )
    xs, newest, ends = map(list, zip(*(taken(x, segments, width - 1) for x in xs)))
    own, tail_in = _joined(newest), tail.astype(xs[0].dtype)
    own, tail_in = vary((own, tail_in), varying_axes((own, tail_in, segments)))
    if halo is None:
        halo = receive_halo(axis_name, own, tail_in, segments, upstream)
    else:
        halo = received_halo(axis_name, own, tail_in, segments, upstream, halo)
    tail_out = next_tail(_joined(ends), halo, index, tail, segments, axis_name)
    reach = _reach(index, segments.valid, width)
    ys = [_by_head(how, heads, *arrays, reach) for arrays in zip(xs, _cut(halo, xs), weights)]
    return ys, _cut(tail_out, xs), halo


def _joined(arrays) -> jax.Array:
    return jnp.concatenate(arrays, axis=-1)


def _cut(joined: jax.Array, like) -> list[jax.Array]:
    """The parts of `joined` that belong to each of `like`, by their channels."""
    ends = list(itertools.accumulate(x.shape[-1] for x in like))
    return [joined[..., end - x.shape[-1] : end] for x, end in zip(like, ends)]


def _by_head(how, heads: int | None, *arrays) -> jax.Array:
    """`_taps`, split into heads if they are given; by the kernel itself if it can."""
    arrays = vary(arrays, varying_axes(arrays))
    if heads is None:
        return _taps((*how, None), *arrays)
    size = arrays[0].shape[2] // heads
    direct = how[1] == "mosaic_tpu" and size % _backend(how[1]).LANE == 0
    y = _taps((*how, heads if direct else None), *arrays)
    return y if direct else split_heads(y, heads)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """[B, T, H * K] -> [B, H, T, K]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], heads, -1), 2, 1)


def _check(x, weight, tail, width, segments, heads, activation, implementation) -> None:
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[1] != x.shape[2] or weight.shape[0] < 1:
        raise ValueError(
            f"short_conv: x must be [B, T, D] and weight [W, D], got {x.shape} and {weight.shape}"
        )
    if weight.shape[0] != width:
        raise ValueError(
            f"short_conv: weights must have equally many taps, got {width} and {weight.shape[0]}"
        )
    if heads is not None and (heads < 1 or x.shape[2] % heads):
        raise ValueError(f"short_conv: heads must divide D = {x.shape[2]}, got {heads}")
    if segments.index.shape != x.shape[:2]:
        raise ValueError(
            f"short_conv: segments must be planned for [B, T] = {x.shape[:2]}, "
            f"got {segments.index.shape}"
        )
    wanted = (x.shape[0], weight.shape[0] - 1, x.shape[2])
    if tail is not None and tail.shape != wanted:
        raise ValueError(f"short_conv: tail must be [B, W - 1, D] = {wanted}, got {tail.shape}")
    if activation not in ("silu", None):
        raise ValueError(f'short_conv: activation must be "silu" or None, got {activation!r}')
    most = _backend(implementation).MOST_TAPS
    if most is not None and weight.shape[0] > most:
        raise ValueError(
            f"short_conv: weight must have at most {most} taps for the TPU kernels, "
            f'got {weight.shape[0]}; try implementation="chunked"'
        )


def _reach(index, valid, width: int) -> jax.Array:
    """How many tokens back, up to W - 1, a token's segment reaches, [B, T] int32; -1 at padding.

    All tokens in between belong to the segment, or are padding, whose inputs are 0. index is
    [B, W - 1 + T].
    """
    here = index[:, width - 1 :]
    reach = jnp.zeros_like(here)
    for j in range(1, width):
        before = jax.lax.slice_in_dim(index, width - 1 - j, index.shape[1] - j, axis=1)
        reach = jnp.where(before == here, j, reach)
    return jnp.where(valid, reach, -1)


def _backend(implementation: str) -> ModuleType:
    """The backend's module, imported on first use so that CPU runs never load Pallas."""
    name = "tpu" if implementation == "mosaic_tpu" else "taps"
    return importlib.import_module(f"kernels.short_conv.{name}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@jax.named_scope("short_conv")
def _taps(how, x, halo, weight, reach):
    """The sum over taps of x [B, T, D] after halo [B, W - 1, D], and its activation, [B, T, D].

    how: (activation, implementation, heads); with heads, which only the kernels support, the result
    is [B, heads, T, D / heads].
    """
    activation, implementation, heads = how
    return _backend(implementation).forward(activation, heads, x, halo, weight, reach)


@jax.named_scope("short_conv")
def _taps_forward(how, *arrays):
    return _taps(how, *arrays), arrays


@jax.named_scope("short_conv_backward")
def _taps_backward(how, saved, d_y):
    activation, implementation, heads = how
    gradients = _backend(implementation).backward(activation, heads, *saved, d_y)
    d_x, d_halo, d_weight = gradients
    return d_x, d_halo, d_weight.astype(saved[2].dtype), None


_taps.defvjp(_taps_forward, _taps_backward)
