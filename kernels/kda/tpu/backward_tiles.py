"""The backward's work inside a chunk, as pure functions over units (see pair_tiles.py).

A chunk's backward has two stages. The cotangent pass carries the state's cotangent from chunk to
chunk,

    dr = W^T do + A'^T (kg dS')     dS = exp(G) dS' + (q exp g)^T do - (k exp g)^T dr

where do already includes the factor `scale`, A' = A diag(beta) and W = Aqk A', so that dr = beta
dvb contains all factors of beta. The local stage computes the gradients from (dr, dS', S, v_new).
With F = Tril[do v_new^T] and M = -StrictTril[dr v_new^T], restricted to a level n (pair_tiles.py),
it is one product per level,

    [F 0; M 0; M^T F^T] @ [k E_n; q E_n]        rows: dq, dk as a query, dk as a key

whose rows are then multiplied by E_n; only the left operand is masked. A pair of tokens contributes
to d decay at every token between the two. The query rows' contributions q dq + k dk are therefore
summed up to the start of the query's block of n, and the key rows' k dk back from the end of the
key's block (`straddle_table`). The usual reverse sum of q dq + k (dk_row - dk_col) cancels all
pairs after t, and in bfloat16 their rounding errors remain.

The gradient of beta needs no separate product: v_new = beta e with e the delta rule's error, and d
beta = dvb . e, so d beta = (dr . v_new) / beta^2 (layout.py keeps beta away from 0).
"""

import functools
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from kernels.kda.gates import softplus_gate
from kernels.kda.products import dot
from kernels.kda.tpu.pair_tiles import (
    LEVELS,
    SUBLANES,
    C,
    DecayFactors,
    heads_dot,
    per_head_lanes,
    rows_of,
    stack_heads,
)

Array = jax.Array
F32 = jnp.float32


@dataclass
class Unit:
    """One chunk of one pair of heads, in the compute dtype unless noted.

    Decay factors: levels n -> E_n (P_n in odd blocks of n tokens, Q_n in even ones), prefix:
    exp(g), suffix: exp(G - g), all [C, 2K]; total: exp(G) [1, 2K] float32.
    """

    q: Array  # [C, 2K], after l2norm if requested
    k: Array  # [C, 2K]
    d_out: Array  # [C, 2V], times scale, 0 at padding
    levels: dict[int, Array]
    prefix: Array
    suffix: Array
    total: Array
    read: Array  # k exp(g) [C, 2K], rounded once: equal to the forward's, bit for bit
    # Set before the stages that need them:
    a: Array = field(init=False)  # A diag(beta) [C, 2C]
    w: Array = field(init=False)  # Aqk A diag(beta), unscaled [C, 2C]
    d_state: Array = field(init=False)  # cotangent of the exit state, transposed [V, 2K]
    v: Array = field(init=False)  # [C, 2V]
    state: Array = field(init=False)  # entry state, transposed [V, 2K]
    v_new: Array = field(init=False)  # [C, 2V]
    dr: Array = field(init=False)  # [C, 2V]


@dataclass
class Gradients:
    """Gradients of one unit, float32: q, k, decay [C, 2K]; beta: dr * v_new [C, 2V], to be summed
    over V."""

    q: Array
    k: Array
    decay: Array
    beta: Array


def make_unit(q: Array, k: Array, d_out: Array, factors: DecayFactors) -> Unit:
    """A unit from q, k [C, 2K] and its factors."""
    dtype = d_out.dtype
    levels = {n: x.astype(dtype) for n, x in factors.early.items()}
    for n, (odd, even) in factors.later.items():
        blocks = []
        for s in range(0, C // 2, n):
            blocks += [even[2 * s : 2 * s + n], odd[s : s + n]]
        levels[n] = above(*blocks).astype(dtype)
    prefix, suffix = factors.prefix.astype(dtype), factors.suffix.astype(dtype)
    read = (k * factors.prefix).astype(dtype)
    return Unit(
        q.astype(dtype), k.astype(dtype), d_out, levels, prefix, suffix, factors.total, read
    )


def above(*blocks: Array) -> Array:
    return jnp.concatenate(blocks, axis=0)


def aside(*blocks: Array) -> Array:
    return jnp.concatenate(blocks, axis=1)


def tiles8(x: Array) -> list[Array]:
    """x in tiles of 8 rows."""
    return [x[s : s + 8] for s in range(0, x.shape[0], 8)]


def add_tiles(x: Array) -> Array:
    """The sum of x's tiles of 8 rows."""
    return functools.reduce(jnp.add, tiles8(x))


def transpose_tokens(upper: Array, lower: Array) -> tuple[Array, Array]:
    """Two matrices between tokens [C, 2C], lanes (head, j) -> their transposes, lanes (head, i).

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


# --- the cotangent pass ---------------------------------------------------------------------------


def pass_cotangents(units: Sequence[Unit]) -> tuple[list[Array], list[Array]]:
    """(dr [C, 2V], cotangent of the entry state [V, 2K]) of each unit, float32. The units' d_state
    is float32 here."""
    dtype = units[0].d_out.dtype
    turned = [transpose_tokens(u.w, u.a) for u in units]
    kg = [u.k * u.suffix for u in units]
    reads = [above(u.q * u.prefix, u.read) for u in units]
    stored = [heads_dot(g, u.d_state.astype(dtype), "bb").astype(dtype) for g, u in zip(kg, units)]
    both = [above(stack_heads(u.d_out), stack_heads(x)) for u, x in zip(units, stored)]
    dr = [dot(aside(*t), x) for t, x in zip(turned, both)]
    grown = [
        heads_dot(turn_tokens(u.d_out, -x.astype(dtype)), r) for u, x, r in zip(units, dr, reads)
    ]
    return dr, [u.total * u.d_state + x for u, x in zip(units, grown)]


def rebuild_v_new(units: Sequence[Unit]) -> list[Array]:
    """v_new = A' (v - (k exp g) S) of each unit, in the compute dtype."""
    dtype = units[0].d_out.dtype
    reads = [heads_dot(u.read, u.state, "bb") for u in units]
    rests = [(u.v.astype(F32) - r).astype(dtype) for u, r in zip(units, reads)]
    return [dot(u.a, stack_heads(r)).astype(dtype) for u, r in zip(units, rests)]


# --- the local stage ------------------------------------------------------------------------------

# Levels whose product has all rows, because blocks of n rows are smaller than a bfloat16 tile.
FULL = tuple(n for n in LEVELS if n < 2 * SUBLANES)


def local(unit: Unit, table: Array, straddle: Array) -> Generator[None, None, Gradients]:
    """Gradients of one unit; yields between dependent steps, for `interleave`.

    table: `pair_tiles.level_table()`, straddle: `straddle_table()`, both in the compute dtype.
    """
    u, dtype = unit, unit.d_out.dtype
    both = above(u.d_out, -u.dr)
    between = dot(both, stack_heads(u.v_new), "bb")  # [(F | M) i, (head, j)]
    yield
    reads = heads_dot(both, u.state)
    exits = heads_dot(u.v_new, u.d_state)
    yield
    between = between.astype(dtype)
    turned = transpose_tokens(between[:C], between[C:])
    yield
    through = u.total * _sum_rows(u.state * u.d_state)
    found, rights = {}, {}
    for n in (*reversed(LEVELS), 0):
        left = _level_left(n, between[:C], between[C:], *turned, table)
        k, q = rights[n] = (u.k * u.levels[n], u.q * u.levels[n]) if n else (u.k, u.q)
        found[n] = dot(left, above(stack_heads(k), stack_heads(q)))
        yield
    parts = []
    for rows in range(0, C, 16):
        parts.append(_add_up(u, slice(rows, rows + 16), reads, exits, found, rights))
        yield
    q, k = (above(*[part[i] for part in parts]) for i in (0, 1))
    terms = above(*[above(*[part[2][at] for part in parts]) for at in range(TERMS)])
    decay = dot(straddle, terms) + through
    yield
    return Gradients(q, k, decay, (u.dr * u.v_new).astype(F32))


TERMS = len(LEVELS) + 2  # terms of a token's d decay


def straddle_table() -> Array:
    """[C, TERMS * C] of 0 and 1, lanes (levels, entry, exit; i): whether token t's decay is between
    token i and the token it is paired with, or the chunk's edge.

    A level pairs a token i in an odd block of n with every token of the preceding even block: t
    runs from the odd block's start to i. For i in the even block, t runs from after i to the
    block's end.
    """
    t = jax.lax.broadcasted_iota(jnp.int32, (C, C), 0)
    i = jax.lax.broadcasted_iota(jnp.int32, (C, C), 1)
    parts = []
    for n in LEVELS:
        odd, same = (i & n) != 0, (i & -n) == (t & -n)
        parts.append(same & ((odd & (t <= i)) | (~odd & (t > i))))
    parts += [t <= i, t > i]
    return aside(*[jnp.where(part, 1.0, 0.0) for part in parts])


def _level_left(n: int, f: Array, m: Array, ft: Array, mt: Array, table: Array) -> Array:
    """The left operand of level n, rows for (dq; dk); n = 0 is the diagonal of F.

    Above `FULL` it holds only the rows that are needed: those of odd blocks of n for dq, then for
    dk, and those of even blocks for dk.
    """
    zero = jnp.zeros((), f.dtype)
    if n == 0:
        f = jnp.where(table == 0, f, zero)
        return above(aside(f, jnp.zeros_like(f)), aside(jnp.zeros_like(f), f))
    if n in FULL:
        down, up = table == n, table == -n
        m = jnp.where(down, m, jnp.where(up, mt, zero))
        f, ft = jnp.where(down, f, zero), jnp.where(up, ft, zero)
        return above(aside(f, jnp.zeros_like(f)), aside(m, ft))
    down, up = rows_of(table, n, 1) == n, rows_of(table, n, 0) == -n
    f, m = [jnp.where(down, rows_of(x, n, 1), zero) for x in (f, m)]
    ft, mt = [jnp.where(up, rows_of(x, n, 0), zero) for x in (ft, mt)]
    none = jnp.zeros_like(f)
    return above(aside(f, none), aside(m, none), aside(mt, ft))


def _level_rows(n: int, x: Array, rows: slice) -> tuple[Array | None, Array]:
    """The rows for dq (None if there are none) and dk of 16 tokens in a level's product."""
    s = rows.start
    if n in FULL:
        return x[s : s + 16], x[C + s : C + s + 16]
    odd, at = (s // n) % 2, s // (2 * n) * n + s % n
    if not odd:
        return None, x[C + at : C + at + 16]
    return x[at : at + 16], x[C // 2 + at : C // 2 + at + 16]


def _add_up(u: Unit, rows: slice, reads: Array, exits: Array, found: dict, rights: dict):
    """Gradients of q and k of 16 tokens, and the terms of d decay (see `straddle_table`): one per
    level, then the entry state's, then the exit state's. They are only added, so none cancels."""
    dtype = u.d_out.dtype
    prefix, suffix = u.prefix[rows], u.suffix[rows]
    read_q, read_k = reads[rows].astype(dtype), reads[C + rows.start : C + rows.stop].astype(dtype)
    left = exits[rows].astype(dtype)
    q_in, k_in = u.q[rows], u.k[rows]
    q, k = prefix * read_q, prefix * read_k + suffix * left
    terms = []
    for n in LEVELS:
        part_q, part_k = _level_rows(n, found[n], rows)
        e, (right_k, right_q) = u.levels[n][rows], rights[n]
        part_k = part_k.astype(dtype)
        k += e * part_k
        term = right_k[rows] * part_k
        if part_q is not None:
            part_q = part_q.astype(dtype)
            q += e * part_q
            term += right_q[rows] * part_q
        terms.append(term)
    own_q, own_k = (found[0][s + rows.start : s + rows.stop].astype(dtype) for s in (0, C))
    terms.append((q_in * prefix) * read_q + (k_in * prefix) * read_k)
    terms.append((k_in * suffix) * left)
    return q + own_q, k + own_k, terms


def _sum_rows(x: Array) -> Array:
    """[R, D] -> [1, D] float32, R a power of two; adds halves first, in x's dtype."""
    while x.shape[0] > 16:
        half = x.shape[0] // 2
        x = x[:half] + x[half:]
    return jnp.sum(x.astype(F32), axis=0, keepdims=True)


# --- inputs ---------------------------------------------------------------------------------------


def l2norm_backward(y: Array, rstd: Array, d_y: Array) -> Array:
    """Gradient of x from that of y = x rstd, rstd = rsqrt(sum of squares + eps); [C, 2K]."""
    d = y.shape[1] // 2
    product = y * d_y
    sums = [jnp.sum(h, axis=1, keepdims=True) for h in (product[:, :d], product[:, d:])]
    return rstd * (d_y - y * per_head_lanes(sums[0], sums[1], d))


def softplus_backward(x: Array, rate: Array, bias: Array, d_a: Array) -> tuple[Array, Array]:
    """(gradient of x, terms of the gradient of log rate) of a = -rate softplus(x + bias)."""
    return -rate * jax.nn.sigmoid(x + bias) * d_a, d_a * softplus_gate(x, rate, bias)


def bounded_backward(
    x: Array, rate: Array, bias: Array, bound: float, d_a: Array
) -> tuple[Array, Array]:
    """The same for a = bound sigmoid(rate (x + bias))."""
    y = x + bias
    slope = jax.nn.sigmoid(rate * y) * jax.nn.sigmoid(-rate * y)
    d_x = d_a * (bound * rate) * slope
    return d_x, d_x * y


# --- order of emission ----------------------------------------------------------------------------


def interleave(walks: Sequence[Generator], lag: int) -> None:
    """Advances generators breadth first, each `lag` steps after the previous one."""
    live = dict(enumerate(walks))
    step = 0
    while live:
        for at in [at for at in live if step >= at * lag]:
            try:
                next(live[at])
            except StopIteration:
                del live[at]
        step += 1
