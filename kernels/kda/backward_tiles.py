"""The backward's work inside a chunk, as pure functions over units (see pair_tiles.py).

A chunk's backward has two stages. The chain carries the state's cotangent from chunk to chunk,

    dvn = Aqk^T do + kg dS'      dr = A'^T dvn      dS = exp(G) dS' + (q exp g)^T do - (k exp g)^T dr

with do already times `scale` and A' = A diag(beta), so that dr = beta dvb carries all factors of
beta. The local stage takes (dr, dS', S, vn) and yields the gradients. With F = Tril[do vn^T] and
M = -StrictTril[dr vn^T], restricted to a level n (pair_tiles.py), it is one product a level,

    [F 0; M 0; M^T F^T] @ [k E_n; q E_n]        rows: dq, dk as a query, dk as a key

whose masks lie on the left operand only, its rows times E_n. A pair's share of d decay goes to every
decay between the two: with the query rows' shares q dq + k dk this is a sum ahead to the start of the
query's block of n, with the key rows' k dk one back from its end (`straddle_table`). The usual reverse
sum of q dq + k (dk_row - dk_col) cancels all pairs behind t, and bfloat16 leaves their rounding.

Gradients of beta need no product of their own: vn = beta e
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
    rows_of,
    softplus_gate,
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


# --- the local stage ------------------------------------------------------------------------------


def local(unit: Unit, levels: Array, straddle: Array) -> Generator[None, None, Gradients]:
    """Gradients of one unit; yields between dependent steps, for `interleave`.

    levels: `signed_level_table()`; straddle: `straddle_table()` in the compute dtype.
    """
    u, dtype, lad = unit, unit.d_out.dtype, unit.ladder
    both = above(u.d_out, -u.dr)
    between = dot(both, stack_heads(u.vn), (1, 1))  # [(F | M) i, (head, j)]
    yield
    reads = dot(both, stack_heads(u.state))
    at_exit = dot(u.vn, stack_heads(u.d_state))
    yield
    scores = (between[:C], between[C:])
    turned = transpose_tokens(*scores)
    yield
    q, key = reads[:C] * lad.prefix, reads[C:] * lad.prefix
    at_exit = at_exit * lad.suffix
    terms = {"entry": u.q * q + u.k * key, "exit": u.k * at_exit}
    through = u.state.astype(F32) * u.d_state.astype(F32)
    through = lad.total * jnp.sum(through, axis=0, keepdims=True)
    q, key = tiles8(q), tiles8(key + at_exit)
    yield
    found = []
    for n in (*reversed(LEVELS), 0):
        left = _level_left(n, scores, turned, levels, dtype)
        found.append((n, dot(left, _level_right(n, u, dtype))))
        yield
    for n, x in found:
        terms[n] = _add_level(n, tiles8(x), u, q, key)
        yield
    terms = [terms[n].astype(dtype) for n in (*LEVELS, "entry", "exit")]
    decay = dot(straddle, above(*terms)) + through
    yield
    dr = u.dr.astype(F32)
    return Gradients(above(*q), above(*key), dr, decay, dr * u.vn.astype(F32))


def signed_level_table() -> Array:
    """[C, 2C] int32, lanes (head, j): the level of (i, j), negative where j > i, 0 where i == j."""
    i = jax.lax.broadcasted_iota(jnp.int32, (C, 2 * C), 0)
    j = jax.lax.broadcasted_iota(jnp.int32, (C, 2 * C), 1) & (C - 1)
    level = jnp.zeros_like(i)
    for n in LEVELS:
        level = jnp.where((i ^ j) >= n, n, level)
    return jnp.where(i > j, level, -level)


def straddle_table() -> Array:
    """[C, 8C] of 0 and 1, lanes (levels, entry, exit; i): whether decay t lies between the token i
    and the one it is paired with, or the chunk's edge.

    A level pairs i, in an odd block of n, with every token of the even block before it: t reaches
    from the block's start to i. Seen from the even block, t reaches from behind i to its end.
    """
    t = jax.lax.broadcasted_iota(jnp.int32, (C, C), 0)
    i = jax.lax.broadcasted_iota(jnp.int32, (C, C), 1)
    parts = []
    for n in LEVELS:
        odd, same = (i & n) != 0, (i & -n) == (t & -n)
        parts.append(same & ((odd & (t <= i)) | (~odd & (t > i))))
    parts += [t <= i, t > i]
    return aside(*[jnp.where(part, 1.0, 0.0) for part in parts])


def _blocks(n: int, odd: int) -> list[int]:
    """Which tiles of 8 rows lie in odd or even blocks of n rows."""
    return [t for t in range(C // 8) if (8 * t // n) % 2 == odd]


def _level_left(n: int, scores, turned, levels: Array, dtype) -> Array:
    """The left operand of level n, rows for (dq; dk); n = 0 is the diagonal of F.

    From 8 on it holds only the rows that take part: those of odd blocks of n for dq, then for dk,
    and those of even blocks for dk.
    """
    if n == 0:
        f = jnp.where(levels == 0, scores[0], 0.0).astype(dtype)
        zero = jnp.zeros_like(f)
        return above(aside(f, zero), aside(zero, f))
    if n < 8:
        down, up = levels == n, levels == -n
        f = jnp.where(down, scores[0], 0.0).astype(dtype)
        ft = jnp.where(up, turned[0], 0.0).astype(dtype)
        m = jnp.where(down, scores[1], jnp.where(up, turned[1], 0.0)).astype(dtype)
        return above(aside(f, jnp.zeros_like(f)), aside(m, ft))
    down, up = rows_of(levels, n, 1) == n, rows_of(levels, n, 0) == -n
    f, m = [jnp.where(down, rows_of(x, n, 1), 0.0).astype(dtype) for x in scores]
    ft, mt = [jnp.where(up, rows_of(x, n, 0), 0.0).astype(dtype) for x in turned]
    zero = jnp.zeros_like(f)
    return above(aside(f, zero), aside(m, zero), aside(mt, ft))


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


def _add_level(n: int, found: list[Array], u: Unit, q: list[Array], key: list[Array]):
    """Add a level's product to the gradients of q and k, in tiles of 8 rows. Returns its terms of
    d decay, one for each token [C, 2K]: all of one sign in `straddle_table`, nothing cancels."""
    if n == 0:
        for t in range(C // 8):
            q[t] += found[t]
            key[t] += found[C // 8 + t]
        return None
    e, q_in, k_in = _factors(u.ladder, n), tiles8(u.q), tiles8(u.k)
    odd = _blocks(n, 1) if n >= 8 else list(range(C // 8))
    order = odd + _blocks(n, 0) if n >= 8 else odd
    terms = [jnp.zeros_like(e[0])] * (C // 8)
    for at, t in enumerate(order):
        part = e[t] * found[len(odd) + at]
        key[t] += part
        terms[t] = k_in[t] * part
    for at, t in enumerate(odd):
        part = e[t] * found[at]
        q[t] += part
        terms[t] += q_in[t] * part
    return above(*terms)


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
