"""Causal depthwise convolution over a row's tokens that stops at segment boundaries."""

import functools

import jax
import jax.numpy as jnp

from kernels.kda.vma import vary, varying_axes
from kernels.segments import Segments


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    segments: Segments,
    *,
    tail: jax.Array | None = None,
    axis_name: str | None = None,
    activation: str | None = "silu",
) -> tuple[jax.Array, jax.Array]:
    """y[t] = activation(sum_j weight[W - 1 - j] x[t - j]) over the taps j < W of t's own segment.

    Taps are counted by position in the row; positions of padding or of another segment add nothing.
    Taps before the row's start come from `tail`, for its first segment only. With axis_name the
    call stands inside `jax.shard_map` and T is the rank's part (of any length): ranks pass W - 1
    inputs on.

    Args:
        x: [B, T, D]; weight: [W, D], weight[W - 1] for the token itself.
        segments: of the same tokens, from `plan_segments` with the same axis_name.
        tail: [B, W - 1, D], the inputs before the row, zero in rows that do not continue; the same
            on all ranks of axis_name.
        activation: "silu" or None.

    Returns:
        y [B, T, D] in x's dtype, 0 at padding; and the next row's tail [B, W - 1, D], in x's dtype
        and the same on all ranks: the W - 1 positions up to the last segment's last token, taken as
        far as they belong to that segment (and to `tail` where it continues it), zero elsewhere. A
        row without tokens hands its tail on.

    Raises:
        ValueError: for shapes that do not fit or an unknown activation.
    """
    _check(x, weight, segments, tail, activation)
    width = weight.shape[0]
    if tail is None:
        tail = jnp.zeros((x.shape[0], width - 1, x.shape[2]), x.dtype)
    x = jnp.where(segments.valid[..., None], x, 0)
    # Segment that upstream inputs belong to; the row's first one where nothing has started yet.
    upstream = jnp.maximum(segments.before - 1, 0)
    halo = _receive_halo(x, tail.astype(x.dtype), segments, upstream, axis_name)
    whole = jnp.concatenate([halo, x], axis=1)
    index = jnp.concatenate(
        [jnp.broadcast_to(upstream, halo.shape[:2]).astype(jnp.int32), segments.index], axis=1
    )
    arrays = whole, weight, index, segments.valid
    y = _taps(activation, *vary(arrays, varying_axes(arrays)))
    return y, _next_tail(whole, index, tail, segments, axis_name)


def _check(x, weight, segments, tail, activation) -> None:
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[1] != x.shape[2] or weight.shape[0] < 1:
        raise ValueError(
            f"short_conv: x must be [B, T, D] and weight [W, D], got {x.shape} and {weight.shape}"
        )
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _taps(activation, whole, weight, index, valid):
    """The sum over taps of `whole` [B, W - 1 + T, D] and its activation, [B, T, D]."""
    total = _sum_of_taps(whole, weight, index, valid)
    return (jax.nn.silu(total) if activation == "silu" else total).astype(whole.dtype)


def _sum_of_taps(whole, weight, index, valid):
    total = jnp.zeros((), jnp.float32)
    for tap, factor in enumerate(_factors(weight, index, valid)):
        shifted = jax.lax.slice_in_dim(whole, tap, tap + valid.shape[1], axis=1)
        total = total + shifted.astype(jnp.float32) * factor
    return total


def _factors(weight, index, valid) -> list[jax.Array]:
    """Each tap's weight, 0 where its position is of another segment: W times [B, T, D] when fused.
    weight[tap] meets position t - (W - 1 - tap)."""
    length, width = valid.shape[1], weight.shape[0]
    here = index[:, width - 1 :]
    same = [jax.lax.slice_in_dim(index, tap, tap + length, axis=1) == here for tap in range(width)]
    return [
        jnp.where((mask & valid)[..., None], weight[tap].astype(jnp.float32), 0)
        for tap, mask in enumerate(same)
    ]


def _taps_forward(activation, whole, weight, index, valid):
    return _taps(activation, whole, weight, index, valid), (whole, weight, index, valid)


def _taps_backward(activation, saved, d_y):
    """The sum is formed again: W multiply-adds cost less than keeping it in float32."""
    whole, weight, index, valid = saved
    length, width = valid.shape[1], weight.shape[0]
    d_total = d_y.astype(jnp.float32)
    if activation == "silu":
        total = _sum_of_taps(whole, weight, index, valid)
        gate = jax.nn.sigmoid(total)
        d_total = d_total * gate * (1 + total * (1 - gate))
    # Without the barrier XLA forms the sum once a tap.
    d_total = jax.lax.optimization_barrier(d_total)
    d_whole = jnp.zeros((), jnp.float32)
    for tap, factor in enumerate(_factors(weight, index, valid)):
        around = ((0, 0), (tap, width - 1 - tap), (0, 0))
        d_whole = d_whole + jnp.pad(d_total * factor, around)
    ones = _factors(jnp.ones_like(weight[:, :1]), index, valid)
    d_weight = _weight_gradient(whole, d_total, jnp.concatenate(ones, axis=-1), length)
    return d_whole.astype(whole.dtype), d_weight.astype(weight.dtype), None, None


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


def _receive_halo(x, tail, segments: Segments, upstream, axis_name):
    """The W - 1 inputs before the rank's tokens [B, W - 1, D], zero where not of the segment that
    goes on here. A sender knows which segment that is, so no ids travel."""
    width = tail.shape[1]
    if axis_name is None or width == 0 or jax.lax.axis_size(axis_name) == 1:
        return tail
    ranks, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    started = segments.before + jnp.sum(segments.first, axis=1, keepdims=True, dtype=jnp.int32)
    current = jnp.maximum(started - 1, 0)
    own = jnp.where((segments.index == current)[..., None], x, 0)
    goes_through = (current == upstream)[..., None]
    halo = jnp.where(rank == 0, tail, 0)
    # Pieces shorter than the halo: what a rank received travels on, one rank a hop.
    for _ in range(min(ranks - 1, -(-width // x.shape[1]))):
        window = jnp.concatenate([jnp.where(goes_through, halo, 0), own], axis=1)[:, -width:]
        arrived = jax.lax.ppermute(window, axis_name, [(r, r + 1) for r in range(ranks - 1)])
        halo = jnp.where(rank == 0, tail, arrived)
    return halo


def _next_tail(whole, index, tail, segments: Segments, axis_name):
    width, length = tail.shape[1], segments.valid.shape[1]
    if width == 0:
        return jnp.zeros(tail.shape, whole.dtype)
    position = jnp.arange(length)
    last = jnp.max(jnp.where(segments.valid, position, -1), axis=1)  # [B], -1: no token here
    steps = last[:, None] + 1 + jnp.arange(width)  # in `whole`, up to the last token
    segment = jnp.take_along_axis(index, jnp.maximum(steps[:, :1] - 1 + width, 0), axis=1)
    taken = jnp.take_along_axis(whole, steps[..., None], axis=1)
    same = jnp.take_along_axis(index, steps, axis=1) == segment
    owner = (last >= 0)[:, None] & (segments.after == segments.count)
    tail_out = jnp.where((same & owner)[..., None], taken, 0)
    rank = 0 if axis_name is None else jax.lax.axis_index(axis_name)
    empty = (segments.count == 0) & (rank == 0)
    tail_out = jnp.where(empty[..., None], tail.astype(whole.dtype), tail_out)
    return tail_out if axis_name is None else jax.lax.psum(tail_out, axis_name)
