"""The backward's work inside a chunk, as pure functions over units (see pair_tiles.py).

A chunk's backward has two stages. The chain carries the state's cotangent from chunk to chunk,

    dvn = Aqk^T do + kg dS'      dr = A'^T dvn      dS = exp(G) dS' + (q exp g)^T do - (k exp g)^T dr

with do already times `scale` and A' = A diag(beta), so that dr = beta dvb carries all factors of
beta. The local stage takes (dr, dS', S, vn) and yields the gradients. With F = Tril[do vn^T] and
M = -StrictTril[dr vn^T], restricted to a level n (pair_tiles.py), it is one product a level,

    [F 0; M^T F^T; M 0] @ [k E_n; q E_n]        rows: dq, dk as a column, dk as a row

whose masks lie on the left operand only. Gradients of beta need no product of their own: vn = beta e
with e the delta rule's error, and d beta = dvb . e, so d beta = (dr . vn) / beta^2 (tiles.py keeps
beta away from 0).
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kernels.kda.pair_tiles import (
    LEVELS,
    C,
    Ladder,
    dot,
    per_head_lanes,
    softplus_gate,
    split,
    stack_heads,
)

Array = jax.Array
F32 = jnp.float32


@dataclass
class Unit:
    """One chunk of one pair of heads. Compute dtype unless said.

    q, k: [C, 2K] float32, after l2norm where asked. d_out: [C, 2V], times scale, 0 at padding.
    a: A diag(beta), aqk: unscaled scores [C, 2C]. d_state: cotangent of the exit state, transposed
    [V, 2K].
    """

    q: Array
    k: Array
    d_out: Array
    ladder: Ladder
    a: Array | None = None
    aqk: Array | None = None
    d_state: Array | None = None
    v: Array | None = None  # [C, 2V]
    state: Array | None = None  # entry state [V, 2K]
    vn: Array | None = None  # [C, 2V]
    dr: Array | None = None  # [C, 2V]


@dataclass
class Gradients:
    """Of one unit, float32: q, k, decay [C, 2K]; v [C, 2V]; beta: dr * vn [C, 2V]."""

    q: Array
    k: Array
    v: Array
    decay: Array
    beta: Array


def above(*blocks: Array) -> Array:
    return jnp.concatenate(blocks, axis=0)


def aside(*blocks: Array) -> Array:
    return jnp.concatenate(blocks, axis=1)


def tiles8(x: Array) -> list[Array]:
    """Rows in tiles of 8."""
    return [x[s : s + 8] for s in range(0, x.shape[0], 8)]


def transpose_tokens(upper: Array, lower: Array) -> tuple[Array, Array]:
    """Two matrices between tokens [C, 2C] (lanes (head, j)) -> each head's transpose, lanes (head, i).

    Both go through one full [2C, 2C] transpose.
    """
    turned = above(upper, lower).T
    first, second = turned[:C], turned[C:]
    return aside(first[:, :C], second[:, :C]), aside(first[:, C:], second[:, C:])


def turn_tokens(upper: Array, lower: Array) -> Array:
    """Two [C, 2D] -> [D, 4C], lanes (head, upper's tokens, lower's tokens)."""
    d = upper.shape[1] // 2
    heads = [slice(0, d), slice(d, 2 * d)]
    return aside(*[above(upper[:, h], lower[:, h]).T for h in heads])


# --- the chain ------------------------------------------------------------------------------------


def chain(units: Sequence[Unit]) -> tuple[list[Array], list[Array]]:
    """(dr [C, 2V], cotangent of the entry state [V, 2K]), float32, of each unit, whose d_state is
    float32 here."""
    dtype = units[0].d_out.dtype
    turned = [transpose_tokens(u.a.astype(F32), u.aqk.astype(F32)) for u in units]
    rights = [stack_heads(u.d_state.astype(dtype)) for u in units]
    kg = [(u.k * u.ladder.suffix).astype(dtype) for u in units]
    reads = [
        above((u.q * u.ladder.prefix).astype(dtype), (u.k * u.ladder.prefix).astype(dtype))
        for u in units
    ]
    dvn = [dot(t[1].astype(dtype), stack_heads(u.d_out)) for t, u in zip(turned, units)]
    dvn = [x + dot(g, r, (1, 1)) for x, g, r in zip(dvn, kg, rights)]
    dr = [dot(t[0].astype(dtype), stack_heads(x.astype(dtype))) for t, x in zip(turned, dvn)]
    grown = [
        dot(turn_tokens(u.d_out.astype(F32), -x).astype(dtype), stack_heads(r))
        for u, x, r in zip(units, dr, reads)
    ]
    return dr, [u.ladder.total * u.d_state + x for u, x in zip(units, grown)]


def rebuild_vn(units: Sequence[Unit]) -> list[Array]:
    """vn = A' (v - (k exp g) S) of each unit, in the compute dtype."""
    dtype = units[0].d_out.dtype
    reads = [
        dot((u.k * u.ladder.prefix).astype(dtype), stack_heads(u.state), (1, 1)) for u in units
    ]
    rests = [(u.v.astype(F32) - r).astype(dtype) for u, r in zip(units, reads)]
    return [dot(u.a, stack_heads(r)).astype(dtype) for u, r in zip(units, rests)]


# --- the local stage --------------------------------------------------------------------------------


def local(
    unit: Unit, levels: Array, sums: tuple[Array, Array]
) -> Generator[None, None, Gradients]:
    """Gradients of one unit; yields between dependent steps, for `interleave`.

    levels: `signed_level_table()`. sums: for each head the [C, C] 0/1 matrix whose row t marks the
    tokens i >= t of t's piece, in the compute dtype; one object if the heads share it.
    """
    u, dtype = unit, unit.d_out.dtype
    lad = u.ladder
    both = above(u.d_out, -u.dr)
    between = dot(both, stack_heads(u.vn), (1, 1))  # [(F | M) i, (head, j)]
    yield
    reads = dot(both, stack_heads(u.state))
    column = dot(u.vn, stack_heads(u.d_state))
    yield
    scores = (between[:C], between[C:])
    turned = transpose_tokens(*scores)
    yield
    column = column * lad.suffix
    last = jnp.sum(u.k * column, axis=0, keepdims=True)
    last += lad.total * jnp.sum(u.state.astype(F32) * u.d_state.astype(F32), axis=0, keepdims=True)
    q, row = tiles8(reads[:C] * lad.prefix), tiles8(reads[C:] * lad.prefix)
    column = tiles8(column)
    yield
    found = []
    for n in (*reversed(LEVELS), 0):
        left = _level_left(n, scores, turned, levels, dtype)
        found.append((n, dot(left, _level_right(n, u, dtype))))
        yield
    for n, x in found:
        _add_level(n, tiles8(x), lad, q, column, row)
        yield
    q, column, row = above(*q), above(*column), above(*row)
    decay = u.q * q + u.k * (row - column)
    at_end = jax.lax.broadcasted_iota(jnp.int32, (8, decay.shape[1]), 0) == 7
    decay = above(decay[:-8], decay[-8:] + jnp.where(at_end, last, 0.0))
    yield
    decay = _sum_ahead(decay, sums)
    yield
    dr = u.dr.astype(F32)
    return Gradients(q, row + column, dr, decay, dr * u.vn.astype(F32))


def signed_level_table() -> Array:
    """[C, 2C] int32, lanes (head, j): the level of (i, j), negative where j > i, 0 where i == j."""
    i = jax.lax.broadcasted_iota(jnp.int32, (C, 2 * C), 0)
    j = jax.lax.broadcasted_iota(jnp.int32, (C, 2 * C), 1) & (C - 1)
    level = jnp.zeros_like(i)
    for n in LEVELS:
        level = jnp.where((i ^ j) >= n, n, level)
    return jnp.where(i > j, level, -level)


def _blocks(n: int, odd: int) -> list[int]:
    """Which tiles of 8 rows lie in odd or even blocks of n rows."""
    return [t for t in range(C // 8) if (8 * t // n) % 2 == odd]


def _take(x: Array, n: int, odd: int) -> Array:
    return above(*[x[s : s + n] for s in range(odd * n, C, 2 * n)])


def _level_left(n: int, scores, turned, levels: Array, dtype) -> Array:
    """The left operand of level n; n = 0 is the diagonal of F, without a column of M.

    From 8 on it holds only the rows that take part: those of odd blocks of n for dq and the row
    side, those of even blocks for the column side.
    """
    if n == 0:
        f = jnp.where(levels == 0, scores[0], 0.0).astype(dtype)
        return stack_diagonal(f)
    if n >= 8:
        scores, turned = [_take(x, n, 1) for x in scores], [_take(x, n, 0) for x in turned]
        down, up = _take(levels, n, 1) == n, _take(levels, n, 0) == -n
    else:
        down, up = levels == n, levels == -n
    f, m = [jnp.where(down, x, 0.0).astype(dtype) for x in scores]
    ft, mt = [jnp.where(up, x, 0.0).astype(dtype) for x in turned]
    zero = jnp.zeros_like(f)
    return above(aside(f, zero), aside(mt, ft), aside(m, zero))


def stack_diagonal(x: Array) -> Array:
    zero = jnp.zeros_like(x)
    return above(aside(x, zero), aside(zero, x))


def _factors(lad: Ladder, n: int) -> list[Array]:
    """E_n in tiles of 8 rows: P_n in odd blocks of n rows, Q_n in even ones."""
    if n < 8:
        return tiles8(lad.early[n])
    prefix, suffix = tiles8(lad.later[n][0]), tiles8(lad.later[n][1])
    odd = _blocks(n, 1)
    return [prefix[odd.index(t)] if t in odd else suffix[t] for t in range(C // 8)]


def _level_right(n: int, u: Unit, dtype) -> Array:
    """[k E_n; q E_n], heads stacked [4C, 2K]."""
    if n == 0:
        return above(stack_heads(u.k.astype(dtype)), stack_heads(u.q.astype(dtype)))
    e = above(*_factors(u.ladder, n))
    return above(stack_heads((u.k * e).astype(dtype)), stack_heads((u.q * e).astype(dtype)))


def _add_level(n: int, found: list[Array], lad: Ladder, q, column, row) -> None:
    """Add a level's product, in tiles of 8 rows, to the three accumulators."""
    if n == 0:
        for t in range(C // 8):
            q[t] += found[t]
            column[t] += found[C // 8 + t]
        return
    e = _factors(lad, n)
    odd, even = (_blocks(n, 1), _blocks(n, 0)) if n >= 8 else (range(C // 8), range(C // 8))
    for at, t in enumerate(odd):
        q[t] += e[t] * found[at]
        row[t] += e[t] * found[len(odd) + len(even) + at]
    for at, t in enumerate(even):
        column[t] += e[t] * found[len(odd) + at]


def _sum_ahead(x: Array, sums: tuple[Array, Array]) -> Array:
    """sums @ x [C, 2K] for each head of float32 x: in bfloat16 by x in two parts."""
    shared = sums[0] is sums[1]
    parts = [x] if sums[0].dtype == F32 else split(x, 2)
    left = aside(*[sums[0]] * len(parts)) if shared else aside(*sums * len(parts))
    return dot(left, above(*[part if shared else stack_heads(part) for part in parts]))


# --- inputs ---------------------------------------------------------------------------------------


def l2norm_backward(y: Array, rstd: Array, d_y: Array) -> Array:
    """Gradient of x from that of y = x rstd, rstd = rsqrt(sum of squares + eps); [C, 2K]."""
    d = y.shape[1] // 2
    product = y * d_y
    sums = [jnp.sum(h, axis=1, keepdims=True) for h in (product[:, :d], product[:, d:])]
    return rstd * (d_y - y * per_head_lanes(sums[0], sums[1], d))


def softplus_backward(x: Array, rate: Array, bias: Array, d_a: Array) -> tuple[Array, Array]:
    """(gradient of x, terms of that of log rate) of a = -rate softplus(x + bias)."""
    return -rate * jax.nn.sigmoid(x + bias) * d_a, d_a * softplus_gate(x, rate, bias)


def bounded_backward(
    x: Array, rate: Array, bias: Array, bound: float, d_a: Array
) -> tuple[Array, Array]:
    """The same of a = bound sigmoid(rate (x + bias))."""
    y = x + bias
    slope = jax.nn.sigmoid(rate * y) * jax.nn.sigmoid(-rate * y)
    d_x = d_a * (bound * rate) * slope
    return d_x, d_x * y


# --- order of emission ------------------------------------------------------------------------------


def interleave(walks: Sequence[Generator], lag: int) -> None:
    """Step generators breadth first, each `lag` steps behind the one before it."""
    live = dict(enumerate(walks))
    step = 0
    while live:
        for at in [at for at in live if step >= at * lag]:
            try:
                next(live[at])
            except StopIteration:
                del live[at]
        step += 1
