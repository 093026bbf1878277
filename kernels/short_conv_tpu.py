"""The short convolution on TPU: two kernels that read and write each array once.

Grid: (channels, rows, tiles of tokens). A step walks its tile in pieces of PIECE tokens, forward
from first to last, backward from last to first, so that what a piece needs of the next or the last
one stays in registers. Shifts along tokens are slices of a piece behind the tokens before it (or,
backward, before those behind it), in float32. What precedes a tile comes from a second, small block
of the same array, before a rank's first token from `halo`. The backward forms the sum over taps
again, and adds up the weight's gradient over rows and tiles in its output block.

A tap counts where `reach`, how many tokens back a token's own segment goes, is at least its
distance; reach is -1 at padding, whose inputs may be anything.

Axes: B row, T token, D channel, W tap.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.kda.vma import varying_axes

F32 = jnp.float32
MOST_TAPS = 8  # what a piece sees of its neighbours: a tile of float32
PIECE = 16  # tokens worked on at a time: a tile of bfloat16
TILE = 512  # tokens a step
LANES = 512  # channels a step; the widest of 512, 256, 128 that divides D


def forward(activation: str | None, x, halo, weight, reach) -> jax.Array:
    """y [B, T, D] of x [B, T, D], halo [B, W - 1, D], weight [W, D] and reach [B, T] int32."""
    call = _Call(x, halo, weight, reach)
    y = pl.pallas_call(
        functools.partial(_forward_kernel, activation),
        grid=call.grid,
        in_specs=call.in_specs(lambda t: t),
        out_specs=call.tokens(lambda t: t),
        out_shape=call.like(call.x.shape, x.dtype),
        name="short_conv_forward",
    )(*call.operands)
    return y[..., : x.shape[2]]


def backward(activation: str | None, x, halo, weight, reach, d_y):
    """Gradients of x and halo, in x's dtype, and of weight, in float32."""
    call = _Call(x, halo, weight, reach)
    rows, taps, channels = x.shape[0], weight.shape[0], call.x.shape[2]
    reverse = lambda t: call.grid[2] - 1 - t  # noqa: E731
    d_x, d_halo, d_weight = pl.pallas_call(
        functools.partial(_backward_kernel, activation),
        grid=call.grid,
        in_specs=[*call.in_specs(reverse), call.tokens(reverse)],
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
            pltpu.VMEM((MOST_TAPS, call.lanes), F32),
            pltpu.VMEM((MOST_TAPS, 1), jnp.int32),
        ],
        name="short_conv_backward",
    )(*call.operands, _wide(d_y))
    cut = slice(x.shape[2])
    d_halo = d_halo[:, MOST_TAPS - taps + 1 :, cut].astype(x.dtype)
    return d_x[..., cut], d_halo, d_weight[:, cut]


class _Call:
    """Operands and blocks of a call. Channels become whole lanes, tokens need not be whole tiles:
    what lies behind the last one has reach -1."""

    def __init__(self, x, halo, weight, reach):
        self.x, weight = _wide(x), _wide(weight.astype(F32))
        rows, length, channels = self.x.shape
        self.lanes = next(n for n in (LANES, LANES // 2, LANES // 4) if channels % n == 0)
        self.tile = min(TILE, -(-length // PIECE) * PIECE)
        self.grid = (channels // self.lanes, rows, -(-length // self.tile))
        halo = jnp.pad(_wide(halo), ((0, 0), (PIECE - halo.shape[1], 0), (0, 0)))
        extra = self.grid[2] * self.tile - length
        reach = jnp.pad(reach, ((0, 0), (0, extra)), constant_values=-1)[..., None]
        self.operands = (self.x, self.x, halo, weight, reach, reach)

    def in_specs(self, place):
        """place: the tile of tokens that the grid's step t works on."""

        def before(t):
            return jnp.maximum(place(t) * (self.tile // PIECE) - 1, 0)

        return [
            self.tokens(place),
            pl.BlockSpec((1, PIECE, self.lanes), lambda d, b, t: (b, before(t), d)),
            pl.BlockSpec((1, PIECE, self.lanes), lambda d, b, t: (b, 0, d)),
            pl.BlockSpec((self.operands[3].shape[0], self.lanes), lambda d, b, t: (0, d)),
            pl.BlockSpec((1, self.tile, 1), lambda d, b, t: (b, place(t), 0)),
            pl.BlockSpec((1, PIECE, 1), lambda d, b, t: (b, before(t), 0)),
        ]

    def tokens(self, place) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.tile, self.lanes), lambda d, b, t: (b, place(t), d))

    def like(self, shape, dtype) -> jax.ShapeDtypeStruct:
        kind = jax.sharding.ManualAxisType(varying=varying_axes(self.operands))
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


def _wide(x):
    """The same with whole lanes of channels."""
    extra = -x.shape[-1] % (LANES // 4)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, extra)]) if extra else x


def _piece(x, reach, at):
    """(inputs in float32, 0 at padding; reach [PIECE, 1]) of a piece."""
    own = reach[0, at, :]
    return jnp.where(own >= 0, x[0, at, :].astype(F32), 0.0), own


def _preceding(first, before, halo, reach_before):
    """The inputs before a tile [MOST_TAPS, lanes]; first: it is the rank's first tile."""
    inside, _ = _piece(before, reach_before, slice(None))
    return jnp.where(first, halo[0].astype(F32), inside)[PIECE - MOST_TAPS :]


def _shifts(preceding, own, taps: int) -> list[jax.Array]:
    """The inputs 0, 1, .. taps - 1 tokens back."""
    both = jnp.concatenate([preceding, own], axis=0)
    return [both[MOST_TAPS - j : MOST_TAPS - j + PIECE] for j in range(taps)]


def _sum_of_taps(weight, shifts, reach):
    total = jnp.zeros((), F32)
    for j, shifted in enumerate(shifts):
        tap = len(shifts) - 1 - j
        total += weight[tap : tap + 1] * jnp.where(reach >= j, shifted, 0.0)
    return total


def _forward_kernel(activation, x, before, halo, weight, reach, reach_before, y):
    taps = weight[...]

    def step(i, preceding):
        at = pl.ds(pl.multiple_of(i * PIECE, PIECE), PIECE)
        own, far = _piece(x, reach, at)
        total = _sum_of_taps(taps, _shifts(preceding, own, taps.shape[0]), far)
        total = jax.nn.silu(total) if activation == "silu" else total
        y[0, at, :] = total.astype(y.dtype)
        return own[PIECE - MOST_TAPS :]

    first = pl.program_id(2) == 0
    preceding = _preceding(first, before, halo, reach_before)
    jax.lax.fori_loop(0, x.shape[1] // PIECE, step, preceding)


def _backward_kernel(
    activation, x, before, halo, weight, reach, reach_before, d_y,
    d_x, d_halo, d_weight, next_d, next_reach,
):  # fmt: skip
    taps, pieces = weight[...], x.shape[1] // PIECE
    number, lanes = taps.shape
    newest, oldest = pl.program_id(2) == 0, pl.program_id(2) == pl.num_programs(2) - 1

    @pl.when(newest)
    def _():
        next_d[...] = jnp.zeros_like(next_d)
        next_reach[...] = jnp.full_like(next_reach, -1)

    @pl.when(newest & (pl.program_id(1) == 0))
    def _():
        d_weight[...] = jnp.zeros_like(d_weight)

    preceding = _preceding(oldest, before, halo, reach_before)

    def step(k, carry):
        following, far_following, sums = carry
        i = pieces - 1 - k
        at = pl.ds(pl.multiple_of(i * PIECE, PIECE), PIECE)
        own, far = _piece(x, reach, at)
        inside, _ = _piece(
            x, reach, pl.ds(pl.multiple_of(jnp.maximum(i - 1, 0) * PIECE, PIECE), PIECE)
        )
        shifts = _shifts(jnp.where(i == 0, preceding, inside[PIECE - MOST_TAPS :]), own, number)
        d_total = d_y[0, at, :].astype(F32)
        if activation == "silu":
            total = _sum_of_taps(taps, shifts, far)
            gate = jax.nn.sigmoid(total)
            d_total = d_total * (gate * (1.0 + total * (1.0 - gate)))
        d_total = jnp.where(far >= 0, d_total, 0.0)
        sums = tuple(
            _fold(total, shifted * jnp.where(far >= j, d_total, 0.0))
            for j, (total, shifted) in enumerate(zip(sums, shifts))
        )
        both = jnp.concatenate([d_total, following], axis=0)
        far_both = jnp.concatenate([far, far_following], axis=0)
        d_own = _sum_of_shares(taps, both, far_both, PIECE)
        d_x[0, at, :] = jnp.where(far >= 0, d_own, 0.0).astype(d_x.dtype)
        return d_total[:MOST_TAPS], far[:MOST_TAPS], sums

    zeros = jnp.zeros((MOST_TAPS, lanes), F32)
    begin = (next_d[...], next_reach[...], (zeros,) * number)
    first_d, first_reach, sums = jax.lax.fori_loop(0, pieces, step, begin)
    next_d[...] = first_d
    next_reach[...] = first_reach
    for j, total in enumerate(sums):
        tap = number - 1 - j
        d_weight[tap : tap + 1, :] += jnp.sum(total, axis=0, keepdims=True)

    @pl.when(oldest)
    def _():
        both = jnp.concatenate([zeros, first_d], axis=0)
        far = jnp.concatenate([jnp.full_like(first_reach, -1), first_reach], axis=0)
        d_halo[0] = _sum_of_shares(taps, both, far, MOST_TAPS)


def _fold(total, x):
    """Adds a piece [PIECE, lanes] to a sum that is spread over MOST_TAPS sublanes."""
    return total + x[:MOST_TAPS] + x[MOST_TAPS:]


def _sum_of_shares(weight, d_total, reach, length: int):
    """What the first `length` tokens get from the sums of those that see them, [length, lanes]."""
    result = jnp.zeros((), F32)
    for j in range(weight.shape[0]):
        tap = weight.shape[0] - 1 - j
        share = jnp.where(reach >= j, d_total, 0.0)[j : j + length]
        result += weight[tap : tap + 1] * share
    return result
