"""Causal depthwise convolution over a row's tokens that stops at segment boundaries."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from kernels import short_conv_tpu
from kernels.kda.vma import vary, varying_axes
from kernels.segments import Segments
from kernels.select import choose


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

    Taps are counted by position in the row; positions of padding or of another segment add nothing.
    Taps before the row's start come from `tail`, for its first segment only. With axis_name the
    call stands inside `jax.shard_map` and T is the rank's part (of any length): ranks pass W - 1
    inputs on.

    x may be any tree of arrays, of different D; weight, tail and both results are then such trees.
    They share one exchange between ranks.

    Args:
        x: [B, T, D]; weight: [W, D], weight[W - 1] for the token itself.
        heads: y is [B, heads, T, D / heads], as KDA takes it, and not [B, T, D].
        segments: of the same tokens, from `plan_segments` with the same axis_name.
        tail: [B, W - 1, D], the inputs before the row, zero in rows that do not continue; the same
            on all ranks of axis_name.
        activation: "silu" or None.
        implementation: "mosaic_tpu", our TPU kernels (W <= 8); "chunked" or "recurrent", jax.numpy;
            None chooses the first on TPU.

    Returns:
        y [B, T, D], or see `heads`, in x's dtype, 0 at padding; and the next row's tail
        [B, W - 1, D], in x's dtype and the same on all ranks: the W - 1 positions up to the last
        segment's last token, taken as far as they belong to that segment (and to `tail` where it
        continues it), zero elsewhere. A row without tokens hands its tail on.

    Raises:
        ValueError: for shapes that do not fit or an unknown activation.
    """
    y, next_tail, _ = _on_rank(
        x, weight, segments, heads, tail, None, axis_name, activation, implementation
    )
    if axis_name is not None:
        next_tail = jax.tree.map(lambda x: jax.lax.psum(x, axis_name), next_tail)
    return y, next_tail


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
    """`short_conv` whose ranks do not meet at its end, and which can be repeated without messages.

    Args:
        halo: None, or what a call with the same arguments returned, which then replaces what the
            rank would receive. Its gradient is that of the first call, passed to the rank before.

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
    width, rows = weights[0].shape[0], xs[0].shape[0]
    if tail is None:
        tails = [jnp.zeros((rows, width - 1, x.shape[2]), x.dtype) for x in xs]
    tail = _joined(tails)
    # Segment that upstream inputs belong to; the row's first one where nothing has started yet.
    upstream = jnp.maximum(segments.before - 1, 0)
    index = jnp.concatenate(
        [jnp.broadcast_to(upstream, tail.shape[:2]).astype(jnp.int32), segments.index], axis=1
    )
    xs, newest, ends = map(list, zip(*(_taken(x, segments, width - 1) for x in xs)))
    own, tail_in = _joined(newest), tail.astype(xs[0].dtype)
    own, tail_in = vary((own, tail_in), varying_axes((own, tail_in, segments)))
    if halo is None:
        halo = _receive_halo(axis_name, own, tail_in, segments, upstream)
    else:
        halo = _received_halo(axis_name, own, tail_in, segments, upstream, halo)
    next_tail = _next_tail(_joined(ends), halo, index, tail, segments, axis_name)
    reach = _reach(index, segments.valid, width)
    ys = [
        _by_head((activation, implementation), heads, *arrays, reach)
        for arrays in zip(xs, _cut(halo, xs), weights)
    ]
    return tree.unflatten(ys), tree.unflatten(_cut(next_tail, xs)), halo


def _joined(arrays) -> jax.Array:
    return jnp.concatenate(arrays, axis=-1)


def _cut(joined: jax.Array, like) -> list[jax.Array]:
    """The parts of `joined` that belong to each of `like`, by their channels."""
    ends = list(itertools.accumulate(x.shape[-1] for x in like))
    return [joined[..., end - x.shape[-1] : end] for x, end in zip(like, ends)]


def _by_head(how, heads: int | None, *arrays) -> jax.Array:
    """`_taps`, split into heads if they are given: by the kernel where it can."""
    arrays = vary(arrays, varying_axes(arrays))
    if heads is None:
        return _taps((*how, None), *arrays)
    size = arrays[0].shape[2] // heads
    direct = how[1] == "mosaic_tpu" and size % short_conv_tpu.LANE == 0
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
            f"short_conv: weights must have as many taps, got {width} and {weight.shape[0]}"
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
    most = short_conv_tpu.MOST_TAPS
    if implementation == "mosaic_tpu" and weight.shape[0] > most:
        raise ValueError(
            f"short_conv: weight must have at most {most} taps for the TPU kernels, "
            f'got {weight.shape[0]}; try implementation="chunked"'
        )


def _reach(index, valid, width: int) -> jax.Array:
    """How many tokens back, up to W - 1, a token's segment goes, [B, T] int32; -1 at padding.

    What lies between is of the segment too, or padding, whose inputs are 0. index [B, W - 1 + T].
    """
    here = index[:, width - 1 :]
    reach = jnp.zeros_like(here)
    for j in range(1, width):
        before = jax.lax.slice_in_dim(index, width - 1 - j, index.shape[1] - j, axis=1)
        reach = jnp.where(before == here, j, reach)
    return jnp.where(valid, reach, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _taps(how, x, halo, weight, reach):
    """The sum over taps of x [B, T, D] behind halo [B, W - 1, D], and its activation, [B, T, D].

    how: (activation, implementation, heads); with heads, which only the kernels know, the result is
    [B, heads, T, D / heads].
    """
    activation, implementation, heads = how
    if implementation == "mosaic_tpu":
        return short_conv_tpu.forward(activation, heads, x, halo, weight, reach)
    total = _sum_of_taps(_whole(x, halo, reach), weight, reach)
    return (jax.nn.silu(total) if activation == "silu" else total).astype(x.dtype)


def _whole(x, halo, reach):
    """[B, W - 1 + T, D], 0 at padding."""
    return jnp.concatenate([halo, jnp.where(reach[..., None] >= 0, x, 0)], axis=1)


def _sum_of_taps(whole, weight, reach):
    total = jnp.zeros((), jnp.float32)
    for tap, factor in enumerate(_factors(weight, reach)):
        shifted = jax.lax.slice_in_dim(whole, tap, tap + reach.shape[1], axis=1)
        total = total + shifted.astype(jnp.float32) * factor
    return total


def _factors(weight, reach) -> list[jax.Array]:
    """Each tap's weight, 0 where its position is of another segment: W times [B, T, D] when fused.
    weight[tap] meets position t - (W - 1 - tap)."""
    width = weight.shape[0]
    return [
        jnp.where((reach >= width - 1 - tap)[..., None], weight[tap].astype(jnp.float32), 0)
        for tap in range(width)
    ]


def _taps_forward(how, x, halo, weight, reach):
    return _taps(how, x, halo, weight, reach), (x, halo, weight, reach)


def _taps_backward(how, saved, d_y):
    """The sum is formed again: W multiply-adds cost less than keeping it in float32."""
    activation, implementation, heads = how
    x, halo, weight, reach = saved
    if implementation == "mosaic_tpu":
        gradients = short_conv_tpu.backward(activation, heads, x, halo, weight, reach, d_y)
        d_x, d_halo, d_weight = gradients
        return d_x, d_halo, d_weight.astype(weight.dtype), None
    length, width = reach.shape[1], weight.shape[0]
    whole = _whole(x, halo, reach)
    d_total = d_y.astype(jnp.float32)
    if activation == "silu":
        total = _sum_of_taps(whole, weight, reach)
        gate = jax.nn.sigmoid(total)
        d_total = d_total * gate * (1 + total * (1 - gate))
    # Without the barrier XLA forms the sum once a tap.
    d_total = jax.lax.optimization_barrier(d_total)
    d_whole = jnp.zeros((), jnp.float32)
    for tap, factor in enumerate(_factors(weight, reach)):
        around = ((0, 0), (tap, width - 1 - tap), (0, 0))
        d_whole = d_whole + jnp.pad(d_total * factor, around)
    d_whole = d_whole.astype(x.dtype)
    ones = _factors(jnp.ones_like(weight[:, :1]), reach)
    d_weight = _weight_gradient(whole, d_total, jnp.concatenate(ones, axis=-1), length)
    d_x = jnp.where(reach[..., None] >= 0, d_whole[:, width - 1 :], 0)
    return d_x, d_whole[:, : width - 1], d_weight.astype(weight.dtype), None


def _weight_gradient(whole, d_total, masks, length: int):
    """sum over rows and tokens of whole, tap by tap, times d_total: [W, D]. masks [B, T, W].

    A loop over blocks of tokens with elementwise sums: XLA's sum over leading axes takes over ten
    times as long on CPU.
    """
    rows, width, channels = whole.shape[0], masks.shape[-1], whole.shape[2]
    block = max(1, 64 // rows)
    blocks = -(-length // block)
    d_total, whole, masks = (
        jnp.pad(x, ((0, 0), (0, blocks * block - length), (0, 0))) for x in (d_total, whole, masks)
    )

    def step(i, total):
        taken = jax.lax.dynamic_slice_in_dim(whole, i * block, block + width - 1, axis=1)
        d = jax.lax.dynamic_slice_in_dim(d_total, i * block, block, axis=1)
        mask = jax.lax.dynamic_slice_in_dim(masks, i * block, block, axis=1)
        products = [
            taken[:, tap : tap + block].astype(jnp.float32) * mask[..., tap, None] * d
            for tap in range(width)
        ]
        return total + jnp.stack(products)

    total = vary(jnp.zeros((width, rows, block, channels)), varying_axes(d_total))
    return jnp.sum(jax.lax.fori_loop(0, blocks, step, total), (1, 2))


_taps.defvjp(_taps_forward, _taps_backward)


@jax.custom_vjp
def _with_rows(x, positions):
    """x [B, T, D] and its tokens at `positions` [B, n], whose gradient is added in its place: the
    usual one is an array as large as x, nearly all zeros."""
    return x, jnp.take_along_axis(x, positions[..., None], axis=1)


def _with_rows_backward(positions, cotangents):
    d_x, d_rows = cotangents
    return d_x.at[jnp.arange(d_x.shape[0])[:, None], positions].add(d_rows), None


_with_rows.defvjp(lambda x, positions: (_with_rows(x, positions), positions), _with_rows_backward)


def _taken(x, segments: Segments, width: int):
    """(x, the rank's newest inputs, up to `width`: of them the next rank's halo is made; and the
    `width` inputs up to its last real token, of them the next tail; the rank's first input stands
    for those before it)."""
    (rows, length), count = segments.valid.shape, min(width, x.shape[1])
    newest = jnp.broadcast_to(jnp.arange(length - count, length), (rows, count))
    ends = jnp.maximum(_tail_places(segments, width) - width, 0)
    places = jnp.concatenate([newest, ends], axis=1)
    x, taken = _with_rows(x, vary(places, varying_axes(x)))
    return x, taken[:, :count], taken[:, count:]


def _tail_places(segments: Segments, width: int) -> jax.Array:
    """The `width` positions up to each row's last real token [B, width], 0 being the halo's first;
    the halo's own where the rank has no real token."""
    position = jnp.arange(segments.valid.shape[1])
    last = jnp.max(jnp.where(segments.valid, position, -1), axis=1)
    return last[:, None] + 1 + jnp.arange(width)


def _receive_halo(axis_name, newest, tail, segments: Segments, upstream):
    """The W - 1 inputs before the rank's tokens [B, W - 1, D], zero where not of the segment that
    goes on here. A sender knows which segment that is, so no ids travel."""
    width, length = tail.shape[1], segments.valid.shape[1]
    if axis_name is None or width == 0 or jax.lax.axis_size(axis_name) == 1:
        return tail
    ranks, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    started = segments.before + jnp.sum(segments.first, axis=1, keepdims=True, dtype=jnp.int32)
    current = jnp.maximum(started - 1, 0)
    own = jnp.where((segments.index == current)[:, -width:, None], newest, 0)
    goes_through = (current == upstream)[..., None]
    halo = jnp.where(rank == 0, tail, 0)
    # Pieces shorter than the halo: what a rank received travels on, one rank a hop.
    for _ in range(min(ranks - 1, -(-width // length))):
        window = jnp.concatenate([jnp.where(goes_through, halo, 0), own], axis=1)[:, -width:]
        arrived = jax.lax.ppermute(window, axis_name, [(r, r + 1) for r in range(ranks - 1)])
        halo = jnp.where(rank == 0, tail, arrived)
    return halo


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _received_halo(axis_name, newest, tail, segments: Segments, upstream, halo):
    """What `_receive_halo` returned before, with its gradient."""
    return halo


def _received_forward(axis_name, *arguments):
    return arguments[-1], arguments[:-1]


def _received_backward(axis_name, saved, d_halo):
    newest, tail, *where = saved
    # Linear, so only the cotangent travels: the values computed again have no user.
    receive = lambda newest, tail: _receive_halo(axis_name, newest, tail, *where)  # noqa: E731
    return *jax.vjp(receive, newest, tail)[1](d_halo), None, None, None


_received_halo.defvjp(_received_forward, _received_backward)


def _next_tail(ends, halo, index, tail, segments: Segments, axis_name):
    width = tail.shape[1]
    if width == 0:
        return jnp.zeros(tail.shape, ends.dtype)
    places = _tail_places(segments, width)
    segment = jnp.take_along_axis(index, jnp.maximum(places[:, :1] - 1 + width, 0), axis=1)
    before = jnp.take_along_axis(halo, jnp.minimum(places, width - 1)[..., None], axis=1)
    taken = jnp.where((places < width)[..., None], before, ends)
    same = jnp.take_along_axis(index, places, axis=1) == segment
    owner = (places[:, :1] > 0) & (segments.after == segments.count)
    tail_out = jnp.where((same & owner)[..., None], taken, 0)
    rank = 0 if axis_name is None else jax.lax.axis_index(axis_name)
    empty = (segments.count == 0) & (rank == 0)
    tail_out = jnp.where(empty[..., None], tail.astype(ends.dtype), tail_out)
    return tail_out
