"""The short convolution on TPU: two kernels that read and write each array once.

Grid: (channels, rows, tiles of tokens). A step processes its tile in strips of STRIP tokens, from
first to last in the forward and from last to first in the backward, so that the values that a strip
needs from its neighbour stay in registers. A shift along tokens is a load with an offset, from a
small float32 window that holds the strip and the tokens before it (backward: after it). The inputs
before a tile come from a second, small block of the same array; before a rank's first token they
come from `halo`. The backward recomputes the sum over taps, and accumulates the weight's gradient
over rows and tiles in its output block. With `heads` the result is written, and its cotangent read,
head by head, as the KDA kernels take q, k and v. In VMEM a head is a whole number of lane tiles, so
this costs nothing.

A tap is used if `reach`, the number of tokens that a token's own segment reaches back, is at least
its distance. reach is -1 at padding, whose inputs may be anything.

Axes: B row, T token, D channel, W tap, H head.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.vma import varying_axes

F32 = jnp.float32
MOST_TAPS = 8  # tokens of its neighbours that a strip sees: a float32 tile
STRIP = 64  # tokens processed at a time: enough that units do not wait for each other
TILE = 512  # tokens per step
LANE = 128
LANES = 512  # channels per step; the largest of 512, 256, 128 that divides D and fits the heads
# Blocks of channels are independent: where a device has two cores (v4, v5p), each takes half.
PARAMS = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"))


def forward(activation: str | None, heads: int | None, x, halo, weight, reach) -> jax.Array:
    """y of x [B, T, D], halo [B, W - 1, D], weight [W, D] and reach [B, T] int32: [B, T, D]; with
    heads, D / H being a multiple of LANE, [B, H, T, D / H]."""
    call = _Call(heads, x, halo, weight, reach)
    y = pl.pallas_call(
        functools.partial(_forward_kernel, activation),
        grid=call.grid,
        in_specs=call.in_specs(lambda t: t),
        out_specs=call.head_tokens(lambda t: t),
        out_shape=call.like(call.head_shape, x.dtype),
        scratch_shapes=[call.window()],
        compiler_params=PARAMS,
        name="short_conv_forward",
    )(*call.operands)
    return y if heads else y[:, 0, :, : x.shape[2]]


def backward(activation: str | None, heads: int | None, x, halo, weight, reach, d_y):
    """Gradients of x and halo, in x's dtype, and of weight, in float32."""
    call = _Call(heads, x, halo, weight, reach)
    d_y = d_y if heads else _wide(d_y)[:, None]
    rows, taps, channels = x.shape[0], weight.shape[0], call.x.shape[2]
    reverse = lambda t: call.grid[2] - 1 - t  # noqa: E731
    d_x, d_halo, d_weight = pl.pallas_call(
        functools.partial(_backward_kernel, activation),
        grid=call.grid,
        in_specs=[*call.in_specs(reverse), call.head_tokens(reverse)],
        out_specs=[
            call.tokens(reverse),
            pl.BlockSpec((1, MOST_TAPS, call.lanes), lambda d, b, t: (b, 0, d)),
            pl.BlockSpec((taps, call.lanes), lambda d, b, t: (0, d)),
        ],
        out_shape=[
            call.like(call.x.shape, x.dtype),
            call.like((rows, MOST_TAPS, channels), F32),
            call.like((taps, channels), F32),
        ],
        scratch_shapes=[
            pltpu.VMEM((taps, MOST_TAPS, call.lanes), F32),
            call.window(),
            call.window(max(taps - 1, 1)),
        ],
        compiler_params=PARAMS,
        name="short_conv_backward",
    )(*call.operands, d_y)
    cut = slice(x.shape[2])
    d_halo = d_halo[:, MOST_TAPS - taps + 1 :, cut].astype(x.dtype)
    return d_x[..., cut], d_halo, d_weight[:, cut]


class _Call:
    """Operands and blocks of a call. Channels are padded to whole lanes. Tokens need not fill the
    last tile: the positions after them have reach -1."""

    def __init__(self, heads, x, halo, weight, reach):
        self.x, weight = _wide(x), _wide(weight.astype(F32))
        rows, length, channels = self.x.shape
        self.head_shape = rows, heads or 1, length, channels // (heads or 1)
        size = self.head_shape[3]
        self.lanes = next(
            n
            for n in (LANES, LANES // 2, LANE)
            if channels % n == 0 and (size % n == 0 or n % size == 0)
        )
        self.tile = min(TILE, -(-length // STRIP) * STRIP)
        self.grid = (channels // self.lanes, rows, -(-length // self.tile))
        halo = jnp.pad(_wide(halo), ((0, 0), (STRIP - halo.shape[1], 0), (0, 0)))
        extra = self.grid[2] * self.tile - length
        reach = jnp.pad(reach, ((0, 0), (0, extra)), constant_values=-1)
        reach = reach.astype(jnp.int8)[..., None]  # a token takes 128 bytes; 512 as int32
        self.operands = (self.x, self.x, halo, weight, reach, reach)

    def in_specs(self, place):
        """place: maps the grid's step t to its tile of tokens."""

        def before(t):
            return jnp.maximum(place(t) * (self.tile // STRIP) - 1, 0)

        return [
            self.tokens(place),
            pl.BlockSpec((1, STRIP, self.lanes), lambda d, b, t: (b, before(t), d)),
            pl.BlockSpec((1, STRIP, self.lanes), lambda d, b, t: (b, 0, d)),
            pl.BlockSpec((self.operands[3].shape[0], self.lanes), lambda d, b, t: (0, d)),
            pl.BlockSpec((1, self.tile, 1), lambda d, b, t: (b, place(t), 0)),
            pl.BlockSpec((1, STRIP, 1), lambda d, b, t: (b, before(t), 0)),
        ]

    def tokens(self, place) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.tile, self.lanes), lambda d, b, t: (b, place(t), d))

    def head_tokens(self, place) -> pl.BlockSpec:
        """The same channels' block of an array of head_shape: whole heads, or a part of one."""
        size, lanes = self.head_shape[3], self.lanes
        if size <= lanes:
            block = 1, lanes // size, self.tile, size
            return pl.BlockSpec(block, lambda d, b, t: (b, d, place(t), 0))
        parts = size // lanes
        return pl.BlockSpec(
            (1, 1, self.tile, lanes),
            lambda d, b, t: (b, jax.lax.div(d, parts), place(t), jax.lax.rem(d, parts)),
        )

    def window(self, *lead: int):
        """A strip and what precedes or follows it, for each lane of channels."""
        return pltpu.VMEM((self.lanes // LANE, *lead, MOST_TAPS + STRIP, LANE), F32)

    def like(self, shape, dtype) -> jax.ShapeDtypeStruct:
        kind = jax.sharding.ManualAxisType(varying=varying_axes(self.operands))
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


def _wide(x):
    """x with its channels padded to whole lanes."""
    extra = -x.shape[-1] % LANE
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, extra)]) if extra else x


class _Masks:
    """Masks of taps for the tokens of `reach` [n, 1], computed once for all channels."""

    def __init__(self, reach, taps: int):
        wide = jnp.broadcast_to(reach.astype(jnp.int32), (reach.shape[0], LANE))
        self._from = [wide >= j for j in range(taps)]

    def keep(self, distance: int, x):
        """x [n, LANE] where the tap of this distance is used, else 0; distance 0: not padding."""
        return jnp.where(self._from[distance], x, 0.0)


def _columns(lanes: int) -> list[slice]:
    return [slice(n, n + LANE) for n in range(0, lanes, LANE)]


def _head_columns(block) -> list[tuple[int, slice]]:
    """The same columns in a block of heads [1, H, T, size], as (head, lanes)."""
    _, heads, _, size = block.shape
    return [(head, column) for head in range(heads) for column in _columns(size)]


def _at(i):
    return pl.ds(pl.multiple_of(i * STRIP, STRIP), STRIP)


def _preceding(first, before, halo, reach_before, columns):
    """The MOST_TAPS inputs before a tile; first: whether it is the rank's first tile."""
    masks = _Masks(reach_before[0], 1)
    return tuple(
        jnp.where(first, halo[0, :, c].astype(F32), masks.keep(0, before[0, :, c].astype(F32)))[
            -MOST_TAPS:
        ]
        for c in columns
    )


def _shifts(window, preceding, own, taps: int) -> list[jax.Array]:
    """The inputs 0, 1, .. taps - 1 tokens back, loaded from `window` [MOST_TAPS + STRIP, LANE]. A
    load may begin at any token; a rotation would occupy the vector unit, the bottleneck."""
    window[:MOST_TAPS] = preceding
    window[MOST_TAPS:] = own
    back = [window[pl.ds(MOST_TAPS - j, own.shape[0])] for j in range(1, taps)]
    return [own, *back]


def _sum_of_taps(weight, masks: _Masks, shifts):
    """weight: the taps' rows [1, LANE] by distance."""
    total = weight[0] * shifts[0]
    for j in range(1, len(shifts)):
        total += weight[j] * masks.keep(j, shifts[j])
    return total


def _by_distance(weight, column) -> list[jax.Array]:
    taps = weight[:, column]
    return [taps[tap : tap + 1] for tap in reversed(range(taps.shape[0]))]


def _forward_kernel(activation, x, before, halo, weight, reach, reach_before, y, window):
    columns, number = _columns(x.shape[2]), weight.shape[0]
    weights, places = [_by_distance(weight, c) for c in columns], _head_columns(y)

    def step(i, preceding):
        at = _at(i)
        masks = _Masks(reach[0, at, :], number)
        last = []
        for n, (c, w, p) in enumerate(zip(columns, weights, preceding)):
            own = masks.keep(0, x[0, at, c].astype(F32))
            total = _sum_of_taps(w, masks, _shifts(window.at[n], p, own, number))
            total = jax.nn.silu(total) if activation == "silu" else total
            head, lanes = places[n]
            y[0, head, at, lanes] = total.astype(y.dtype)
            last.append(own[-MOST_TAPS:])
        return tuple(last)

    preceding = _preceding(pl.program_id(2) == 0, before, halo, reach_before, columns)
    jax.lax.fori_loop(0, x.shape[1] // STRIP, step, preceding)


def _backward_kernel(
    activation, x, before, halo, weight, reach, reach_before, d_y,
    d_x, d_halo, d_weight, behind, window, ahead,
):  # fmt: skip
    strips, number, columns = x.shape[1] // STRIP, weight.shape[0], _columns(x.shape[2])
    weights, places = [_by_distance(weight, c) for c in columns], _head_columns(d_y)
    newest, oldest = pl.program_id(2) == 0, pl.program_id(2) == pl.num_programs(2) - 1

    @pl.when(newest)
    def _():
        behind[...] = jnp.zeros_like(behind)

    @pl.when(newest & (pl.program_id(1) == 0))
    def _():
        d_weight[...] = jnp.zeros_like(d_weight)

    preceding = _preceding(oldest, before, halo, reach_before, columns)

    def step(k, carry):
        following, sums = carry
        i = strips - 1 - k
        at, previous = _at(i), _at(jnp.maximum(i - 1, 0))
        masks = _Masks(reach[0, at, :], number)
        masks_previous = _Masks(reach[0, previous, :], 1)
        first, new_sums = [], []
        for n, (c, w) in enumerate(zip(columns, weights)):
            own = masks.keep(0, x[0, at, c].astype(F32))
            inside = masks_previous.keep(0, x[0, previous, c].astype(F32))[-MOST_TAPS:]
            shifts = _shifts(window.at[n], jnp.where(i == 0, preceding[n], inside), own, number)
            head, lanes = places[n]
            d_total = d_y[0, head, at, lanes].astype(F32)
            if activation == "silu":
                total = _sum_of_taps(w, masks, shifts)
                gate = jax.nn.sigmoid(total)
                d_total = d_total * (gate * (1.0 + total * (1.0 - gate)))
            shares = [masks.keep(j, d_total) for j in range(number)]
            new_sums.append(
                tuple(_fold(*args) for args in zip(sums[n], shifts, shares, strict=True))
            )
            d_own = _sum_of_shares(ahead.at[n], w, shares, following[n])
            d_x[0, at, c] = masks.keep(0, d_own).astype(d_x.dtype)
            first.append(tuple(share[:MOST_TAPS] for share in shares))
        return tuple(first), tuple(new_sums)

    zeros = jnp.zeros((MOST_TAPS, LANE), F32)
    following = tuple(tuple(behind[j, :, c] for j in range(number)) for c in columns)
    begin = following, tuple((zeros,) * number for _ in columns)
    first, sums = jax.lax.fori_loop(0, strips, step, begin)
    for c, shares, parts in zip(columns, first, sums):
        for j, (share, part) in enumerate(zip(shares, parts)):
            behind[j, :, c] = share
            tap = number - 1 - j
            d_weight[tap : tap + 1, c] += jnp.sum(part, axis=0, keepdims=True)

    @pl.when(oldest)
    def _():
        for c, w, shares in zip(columns, weights, first):
            parts = ((zeros,) * number, shares)
            d_halo[0, :, c] = _sum_of_shares(ahead.at[0, :, : 2 * MOST_TAPS], w, *parts)


def _fold(total, shifted, share):
    """Adds a strip's products [STRIP, LANE] to a sum kept in MOST_TAPS sublanes."""
    x = shifted * share
    for n in range(0, x.shape[0], MOST_TAPS):
        total += x[n : n + MOST_TAPS]
    return total


def _sum_of_shares(window, weight, shares, following):
    """Gradients of tokens from the sums in which they occur, their own and those of later tokens.
    shares and following hold by distance the sums' gradients, masked by the use of that tap, of
    these tokens and of the next MOST_TAPS."""
    result = weight[0] * shares[0]
    for j in range(1, len(weight)):
        length = shares[j].shape[0]
        window[j - 1, :length] = shares[j]
        window[j - 1, length:] = following[j]
        result += weight[j] * window[j - 1, pl.ds(j, length)]
    return result
