"""The computation inside a chunk, as pure functions that both TPU kernels call.

A *unit* is one chunk (C tokens) of one pair of heads. The two heads are side by side on the lanes:
tokens are rows, so q is [C, 2K] and a matrix between tokens (L, A, Aqk) is [C, 2C], lanes (head,
j). A product for both heads at once uses the block-diagonal form of its right operand
(`stack_heads`), which fills the lanes and the MXU's depth.

Every function takes lists with one entry per unit and emits each dependent step for all units
before the next step (breadth first): a product's latency is about 125 bundles, and the compiler's
schedule stays close to program order. This order matters more than anything else, see NOTES.md.

No exponent is a difference of sums. With n = 1, 2, 4, ... C / 2, a token pair (i, j), i > j,
belongs to level n = the highest set bit of i ^ j: i is in the second, j in the first half of one
block of 2n tokens. Then exp(g_i - g_j) = P_n[i] Q_n[j] with

    P_n[i] = exp(sum of a from the start of i's n-block to i)
    Q_n[j] = exp(sum of a after j to the end of j's n-block)

All exponents are sums of numbers <= 0. So nothing overflows, a decay of `RESET` (-1e30) makes every
factor across that token exactly 0, and a prefix never depends on later tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kernels.kda.gates import reciprocal_norm
from kernels.kda.problem import CHUNK
from kernels.kda.products import dot

C = CHUNK
LANES = 128
SUBLANES = 8  # rows of a tile of float32 in registers
RESET = -1e30  # log decay that forgets everything before a token, exactly
LEVELS = tuple(2**n for n in range(C.bit_length() - 1))
EARLY = tuple(n for n in LEVELS if n < SUBLANES)  # levels whose blocks are smaller than a tile
LATER = LEVELS[len(EARLY) :]  # levels whose blocks are whole tiles
assert 2 * C == LANES, "a matrix between the tokens of two heads must fill the lanes"
assert EARLY == (1, 2, 4), "sum_table and _factors_of are written for three levels inside a tile"

Array = jax.Array


# --- constants ----------------------------------------------------------------------------------


def level_table() -> Array:
    """[C, 2C] int32, lanes (head, j): the level of (i, j), negative if j > i, 0 if i = j."""
    i = jax.lax.broadcasted_iota(jnp.int32, (C, 2 * C), 0)
    j = jax.lax.broadcasted_iota(jnp.int32, (C, 2 * C), 1) & (C - 1)
    level = jnp.zeros_like(i)
    for n in LEVELS:
        level = jnp.where((i ^ j) >= n, n, level)
    return jnp.where(i > j, level, -level)


def sum_table(parts: int) -> Array:
    """[3C, parts * C] bfloat16 of 0 and 1: which tokens' decays sum to the exponents of E_2, P_4
    and Q_4, where E_n is P_n in odd n-blocks and Q_n in even ones. Repeated for `parts` parts.
    """
    r = jax.lax.broadcasted_iota(jnp.int32, (3 * C, parts * C), 0)
    j = jax.lax.broadcasted_iota(jnp.int32, (3 * C, parts * C), 1) & (C - 1)
    i = r & (C - 1)
    upto2, after2 = (j >= (i & ~1)) & (j <= i), (j > i) & (j <= (i | 1))
    upto4, after4 = (j >= (i & ~3)) & (j <= i), (j > i) & (j <= (i | 3))
    odd = (i & 2) != 0
    pair = (odd & upto2) | (~odd & after2)
    table = ((r < C) & pair) | ((r >= C) & (r < 2 * C) & upto4) | ((r >= 2 * C) & after4)
    return jnp.where(table, 1.0, 0.0).astype(jnp.bfloat16)


# --- layout -------------------------------------------------------------------------------------


def stack_heads(x: Array) -> Array:
    """[R, 2D] -> block diagonal [2R, 2D], D a multiple of 128 lanes."""
    d = x.shape[1] // 2
    zero = jnp.zeros_like(x[:, :d])
    top = jnp.concatenate([x[:, :d], zero], axis=1)
    return jnp.concatenate([top, jnp.concatenate([zero, x[:, d:]], axis=1)], axis=0)


def stack_narrow(x: Array) -> Array:
    """[C, 2C] -> block diagonal [2C, 2C]; both heads share one tile of 128 lanes."""
    first = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < C
    zero = jnp.zeros_like(x)
    return jnp.concatenate([jnp.where(first, x, zero), jnp.where(first, zero, x)], axis=0)


def rows_of(x: Array, n: int, odd: int) -> Array:
    """The rows of x in odd (1) or even (0) blocks of n rows, n a multiple of 8."""
    starts = range(odd * n, x.shape[0], 2 * n)
    return jnp.concatenate([x[s : s + n] for s in starts], axis=0)


def narrow_mxu() -> bool:
    """Whether a matrix unit has 128 columns, so that half of a block-diagonal product is wasted.
    True for v5e and v5p; the interpreter computes as v6e and v7x do."""
    return pltpu.is_tpu_device() and pltpu.get_tpu_info().mxu_column_size == LANES


def heads_dot(x: Array, y: Array, contract: str = "ab", apart: bool | None = None) -> Array:
    """The products of two heads, [R, 2D] each, side by side; `contract` as in `dot`.

    apart: one product per head, else one for both with a block-diagonal right operand. None: apart
    on a narrow MXU.
    """
    if apart is None:
        apart = narrow_mxu()
    if not apart:
        left = stack_rows(x) if contract == "aa" else x
        return dot(left, stack_heads(y), contract)
    d, e = x.shape[1] // 2, y.shape[1] // 2
    found = [dot(x[:, i * d : (i + 1) * d], y[:, i * e : (i + 1) * e], contract) for i in (0, 1)]
    return jnp.concatenate(found, axis=1)


def per_head_lanes(first: Array, second: Array, width: int) -> Array:
    """Columns [R, 1] of two heads -> [R, 2 * width], each over its head's lanes."""
    shape = (first.shape[0], 2 * width)
    if width % 128 == 0:
        one = (first.shape[0], width)
        return jnp.concatenate(
            [jnp.broadcast_to(first, one), jnp.broadcast_to(second, one)], axis=1
        )
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.where(lane < width, jnp.broadcast_to(first, shape), jnp.broadcast_to(second, shape))


def split(x: Array, parts: int) -> list[Array]:
    """float32 -> bfloat16 arrays that sum to it (3 parts: exactly).

    Truncates bits instead of rounding to bfloat16 and back, which a compiler may optimise away.
    """
    found = []
    for _ in range(parts - 1):
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
        head = jax.lax.bitcast_convert_type(bits, jnp.float32)
        found.append(head.astype(jnp.bfloat16))
        x = x - head
    return [*found, x.astype(jnp.bfloat16)]


# --- inputs -------------------------------------------------------------------------------------


def l2norm(x: Array) -> tuple[Array, Array]:
    """[C, 2K] float32 -> (unit rows of each head, their reciprocal norms over their lanes)."""
    d = x.shape[1] // 2
    sums = [jnp.sum(h * h, axis=1, keepdims=True) for h in (x[:, :d], x[:, d:])]
    rstd = reciprocal_norm(per_head_lanes(sums[0], sums[1], d))
    return x * rstd, rstd


# --- exponents ----------------------------------------------------------------------------------


@dataclass
class DecayFactors:
    """Decay factors of one unit, float32.

    early: EARLY levels n -> E_n [C, 2K] (P in odd blocks, Q in even ones). later: LATER levels n ->
    (P_n in odd blocks [C/2, 2K], Q_n [C, 2K]). prefix: exp(g), suffix: exp(G - g) [C, 2K]. total:
    exp(G) [1, 2K].
    """

    early: dict[int, Array]
    later: dict[int, tuple[Array, Array]]
    prefix: Array
    suffix: Array
    total: Array


def decay_factors(decays: Sequence[Array], table: Array) -> list[DecayFactors]:
    """Factors of all levels from log decays [C, 2K].

    `table` is `sum_table(1)` for bfloat16 decays (one exact product), else `sum_table(3)`.
    """

    def parts(a: Array) -> Array:
        return a if a.dtype == jnp.bfloat16 else jnp.concatenate(split(a, 3), axis=0)

    sums = [dot(table, parts(a)) for a in decays]
    singles = [jnp.exp(a.astype(jnp.float32)) for a in decays]
    exps = [jnp.exp(s) for s in sums]
    return [_factors_of(single, e) for single, e in zip(singles, exps)]


def _factors_of(single: Array, exps: Array) -> DecayFactors:
    row = jax.lax.broadcasted_iota(jnp.int32, single.shape, 0)
    p, q = exps[C : 2 * C], exps[2 * C :]
    early = {
        1: jnp.where((row & 1) == 1, single, 1.0),
        2: exps[:C],
        4: jnp.where((row & 4) == 4, p, q),
    }
    p, q = _double_in_tile(p, q)
    later = {}
    for n in LATER:
        later[n] = (rows_of(p, n, 1), q)
        p, q = _double(p, q, n)
    return DecayFactors(early, later, p, q, p[C - 1 :])


def _double_in_tile(p: Array, q: Array) -> tuple[Array, Array]:
    """P_4, Q_4 -> P_8, Q_8: both halves of a block lie in one tile of 8 rows."""
    second = jax.lax.broadcasted_iota(jnp.int32, (8, p.shape[1]), 0) >= 4
    ps, qs = [], []
    for s in range(0, C, 8):
        head, tail = p[s : s + 8], q[s : s + 8]
        ps.append(jnp.where(second, head * head[3:4], head))
        qs.append(jnp.where(second, tail, tail * head[7:8]))
    return jnp.concatenate(ps, axis=0), jnp.concatenate(qs, axis=0)


def _double(p: Array, q: Array, n: int) -> tuple[Array, Array]:
    """P_n, Q_n -> P_2n, Q_2n, n a multiple of 8."""
    ps, qs = [], []
    for s in range(0, C, 2 * n):
        m, e = s + n, s + 2 * n
        ps += [p[s:m], p[m:e] * p[m - 1 : m]]
        qs += [q[s:m] * p[e - 1 : e], q[m:e]]
    return jnp.concatenate(ps, axis=0), jnp.concatenate(qs, axis=0)


# --- scores -------------------------------------------------------------------------------------


def level_operands(q: Array, k: Array, factors: DecayFactors, n: int, dtype) -> tuple[Array, Array]:
    """Left operand [qP; kP] and right operand (kQ, heads stacked) [2C, 2K] of level n.

    The left one has 2C rows for n = 1, 2, 4; from 8 on only the C rows that are needed.
    """
    if n in EARLY:
        right = (k * factors.early[n]).astype(dtype)
        left = jnp.concatenate([(q * factors.early[n]).astype(dtype), right], axis=0)
    else:
        p, suffix = factors.later[n]
        left = jnp.concatenate([rows_of(q, n, 1) * p, rows_of(k, n, 1) * p], axis=0).astype(dtype)
        right = _even_rows_product(k, suffix, n).astype(dtype)
    return left, stack_heads(right)


def _even_rows_product(x: Array, y: Array, n: int) -> Array:
    """x * y in even blocks of n rows, 0 in odd ones."""
    zero = jnp.zeros_like(x[:n])
    halves = [(x[s : s + n] * y[s : s + n], zero) for s in range(0, C, 2 * n)]
    return jnp.concatenate([half for pair in halves for half in pair], axis=0)


def scores(
    queries: Sequence[Array],
    keys: Sequence[Array],
    factors: Sequence[DecayFactors],
    table: Array,
    dtype,
) -> tuple[list[Array], list[Array]]:
    """Decayed scores of float32 q, k [C, 2K]: (q k^T with its diagonal, k k^T without), [C, 2C].

    Unscaled, 0 above the diagonal. `table` is `level_table()`.
    """
    tiles = range(0, C, 8)
    qk = [_diagonal(q * k, table) for q, k in zip(queries, keys)]
    qk_tiles = [[x[s : s + 8] for s in tiles] for x in qk]
    kk_tiles = [[jnp.zeros((8, 2 * C), jnp.float32) for _ in tiles] for _ in qk]
    for n in LEVELS:
        operands = [level_operands(*unit, n, dtype) for unit in zip(queries, keys, factors)]
        found = [dot(left, right, "bb") for left, right in operands]
        for x, a, b in zip(found, qk_tiles, kk_tiles):
            _place(x, n, table, a, b)
    join = lambda units: [jnp.concatenate(x, axis=0) for x in units]  # noqa: E731
    return join(qk_tiles), join(kk_tiles)


def _diagonal(product: Array, table: Array) -> Array:
    """Lane sums of each head of q * k [C, 2K] on the diagonal of [C, 2C]."""
    d = product.shape[1] // 2
    sums = [jnp.sum(h, axis=1, keepdims=True) for h in (product[:, :d], product[:, d:])]
    return jnp.where(table == 0, per_head_lanes(sums[0], sums[1], C), 0.0)


def _place(found: Array, n: int, table: Array, qk: list[Array], kk: list[Array]) -> None:
    """Writes one level's entries into the 8-row tiles of both score matrices."""
    tiles = range(C // 8) if n in EARLY else [t for t in range(C // 8) if (8 * t) & n]
    half = found.shape[0] // 2
    for at, t in enumerate(tiles):
        here = table[8 * t : 8 * t + 8] == n
        qk[t] = jnp.where(here, found[8 * at : 8 * at + 8], qk[t])
        kk[t] = jnp.where(here, found[half + 8 * at : half + 8 * at + 8], kk[t])


# --- inverse ------------------------------------------------------------------------------------
#
# Blocks of n tokens on the diagonal of [C, 2C] are kept packed, [n, 2C]: row i of lane (head, j) is
# row i of the block of token j. A product of block-diagonal matrices then takes n rows of the left
# operand instead of C. The remaining cost is loading right operands into the MXU, which two units
# share (`_products`).


def inverses(
    lowers: Sequence[Array], reads: Sequence[Array], table: Array, dtype
) -> tuple[list[Array], list[Array]]:
    """(I + L)^-1 and Q (I + L)^-1 for strictly lower L and scores Q [C, 2C] float32 (two heads on
    lanes); float32 results.

    Blocks of 8 are inverted by the Neumann series (exact because L^8 = 0), then doubled: the
    inverse of [[P, 0], [L, R]] has the block -R^-1 L P^-1. In bfloat16 one refinement step
    X <- X + X (I - (I + L) X) follows, with L in two parts in the residual.
    """
    xs = _small_inverses([-_diagonal_blocks(low, 8) for low in lowers], dtype)
    for n in LATER:
        off = [_off_blocks(low, n) for low in lowers]
        lx = _products(off, [_spread(x, n, dtype) for x in xs], dtype)
        odd = _block_of_lane(n) & 1 == 1
        seconds = [jnp.where(odd, x, 0.0) for x in xs]
        found = _products(seconds, [_spread(y, n, dtype, ahead=1) for y in lx], dtype)
        xs = [
            jnp.concatenate([jnp.where(odd, 0.0, x), jnp.where(odd, x, -y)], axis=0)
            for x, y in zip(xs, found)
        ]
    if dtype == jnp.float32:
        return xs, [dot(q, stack_narrow(x)) for q, x in zip(reads, xs)]
    return _refine(lowers, reads, xs, jnp.where(table == 0, 1.0, 0.0))


def _small_inverses(minus: Sequence[Array], dtype) -> list[Array]:
    """(I - N)^-1 = (I + N + N^2 + N^3)(I + N^4) of packed blocks N [8, 2C]."""
    n2 = _products(minus, [_spread(x, 8, dtype) for x in minus], dtype)
    right = [_spread(x, 8, dtype) for x in n2]
    both = _products([jnp.concatenate(x, axis=0) for x in zip(minus, n2)], right, dtype)
    row = jax.lax.broadcasted_iota(jnp.int32, (8, 2 * C), 0)
    eye = jnp.where(row == (jax.lax.broadcasted_iota(jnp.int32, (8, 2 * C), 1) & 7), 1.0, 0.0)
    first = [eye + a + b + c[:8] for a, b, c in zip(minus, n2, both)]
    rest = _products(first, [_spread(c[8:], 8, dtype) for c in both], dtype)
    return [a + b for a, b in zip(first, rest)]


def _block_of_lane(n: int) -> Array:
    """[1, 2C] int32: the block of n tokens, counted over both heads, of each lane's token."""
    return jax.lax.broadcasted_iota(jnp.int32, (1, 2 * C), 1) // n


def _diagonal_blocks(x: Array, n: int) -> Array:
    """[C, 2C] -> packed blocks on the diagonal [n, 2C]."""
    block = _block_of_lane(n) & (C // n - 1)
    packed = x[:n]
    for b in range(1, C // n):
        packed = jnp.where(block == b, x[b * n : (b + 1) * n], packed)
    return packed


def _off_blocks(x: Array, n: int) -> Array:
    """[C, 2C] -> packed [n, 2C]: for tokens of even blocks the block below the diagonal one, else
    0."""
    block = _block_of_lane(n) & (C // n - 1)
    packed = jnp.zeros_like(x[:n])
    for b in range(0, C // n, 2):
        packed = jnp.where(block == b, x[(b + 1) * n : (b + 2) * n], packed)
    return packed


def _spread(packed: Array, n: int, dtype, ahead: int = 0) -> Array:
    """Packed [n, 2C] -> right operand [2C, 2C]: the blocks at block (b + ahead, b), 0 elsewhere."""
    block = _block_of_lane(n)
    zero = jnp.zeros_like(packed)
    rows = [
        jnp.where(block == b - ahead, packed, zero) if b >= ahead else zero
        for b in range(2 * C // n)
    ]
    return jnp.concatenate(rows, axis=0).astype(dtype)


def _products(lefts: Sequence[Array], rights: Sequence[Array], dtype) -> list[Array]:
    """lefts[u] [R, D] @ rights[u] [D, 2C], two units per product: their right operands are side by
    side on the lanes, the left ones stacked; two of the four results are used."""
    out = []
    for u in range(0, len(lefts) - 1, 2):
        left = jnp.concatenate(lefts[u : u + 2], axis=0).astype(dtype)
        both = dot(left, jnp.concatenate(rights[u : u + 2], axis=1))
        rows = lefts[u].shape[0]
        out += [both[:rows, : 2 * C], both[rows:, 2 * C :]]
    return out + [dot(x.astype(dtype), y) for x, y in zip(lefts[len(out) :], rights[len(out) :])]


def _refine(
    lowers: Sequence[Array], reads: Sequence[Array], xs: Sequence[Array], eye: Array
) -> tuple[list[Array], list[Array]]:
    """With X rounded and E = I - (I + L) X: (X + X E, Q X + Q X E), L and Q in two parts.

    Q uses the right operands loaded for L and X, so it only adds left rows. With so many left rows,
    units do not share products: half of the results would be discarded.
    """
    rounded = [x.astype(jnp.bfloat16) for x in xs]
    stacked = [stack_narrow(x) for x in rounded]
    both = [jnp.concatenate(pair, axis=0) for pair in zip(lowers, reads)]
    lefts = [jnp.concatenate(split(x, 2), axis=1) for x in both]
    found = [dot(x, jnp.concatenate([y, y], axis=0)) for x, y in zip(lefts, stacked)]
    whole = [x.astype(jnp.float32) for x in rounded]
    errors = [(eye - x - y[:C]).astype(jnp.bfloat16) for x, y in zip(whole, found)]
    firsts = [jnp.concatenate([x, y[C:]], axis=0) for x, y in zip(whole, found)]
    fixes = [dot(x.astype(jnp.bfloat16), stack_narrow(e)) for x, e in zip(firsts, errors)]
    fixed = [x + f for x, f in zip(firsts, fixes)]
    return [x[:C] for x in fixed], [x[C:] for x in fixed]


# --- local work and state -----------------------------------------------------------------------


@dataclass
class Local:
    """The values of one unit that the state pass needs; matrices in the compute dtype.

    a: A diag(beta), w: Aqk A diag(beta) with unscaled Aqk, [C, 2C], both set last; p: k exp(g), qg:
    q exp(g), kg: k exp(G - g) [C, 2K]; total: exp(G) [1, 2K] float32.
    """

    a: Any
    w: Any
    p: Array
    qg: Array
    kg: Array
    total: Array


def local_scores(
    queries: Sequence[Array],
    keys: Sequence[Array],
    factors: Sequence[DecayFactors],
    table: Array,
    dtype,
) -> list[tuple[Local, Array, Array]]:
    """`Local` without its matrices, and the decayed scores q k^T and k k^T, of each unit."""
    qk, kk = scores(queries, keys, factors, table, dtype)
    units = zip(queries, keys, factors)
    return [(entry_factors(*unit, dtype), s, l) for unit, s, l in zip(units, qk, kk)]


def entry_factors(q: Array, k: Array, factors: DecayFactors, dtype) -> Local:
    """`Local` with all but its two matrices between tokens."""
    p, qg, kg = k * factors.prefix, q * factors.prefix, k * factors.suffix
    return Local(None, None, p.astype(dtype), qg.astype(dtype), kg.astype(dtype), factors.total)


def state_step(
    states: Sequence[Array],
    units: Sequence[Local],
    values: Sequence[Array],
    keep: Sequence[Array] | None = None,
    apart: bool | None = None,
) -> tuple[list[Array], list[Array], list[Array]]:
    """One chunk from its entry state: (outputs before `scale` [C, 2V] float32, v_new [C, 2V],
    exits).

    States are transposed and two heads wide: [V, 2K] float32. keep [C, 2V] float32 of 0 and 1
    selects tokens. apart: see `heads_dot`.

    Outputs are not computed from v_new. If keys are similar, Aqk v_new is a difference of large
    sums, in which the rounding errors of Aqk, A and v_new would remain. W = Aqk A diag(beta) forms
    this difference before anything is rounded.
    """
    dtype = units[0].p.dtype
    reads = [jnp.concatenate([u.p, u.qg], axis=0) for u in units]
    read = [heads_dot(x, s.astype(dtype), "bb", apart) for x, s in zip(reads, states)]
    rhs = [(v.astype(jnp.float32) - r[:C]).astype(dtype) for v, r in zip(values, read)]
    lefts = [jnp.concatenate([u.a, u.w], axis=0) for u in units]
    new = [dot(x, stack_heads(r)) for x, r in zip(lefts, rhs)]
    v_new = [x[:C] for x in new]
    v_new = v_new if keep is None else _masked(v_new, keep)
    outs = [r[C:] + x[C:] for r, x in zip(read, new)]
    grown = [_grown(n, u.kg, apart) for u, n in zip(units, v_new)]
    exits = [u.total * s + g for u, s, g in zip(units, states, grown)]
    return outs if keep is None else _masked(outs, keep), [x.astype(dtype) for x in v_new], exits


def _grown(v_new: Array, kg: Array, apart: bool | None) -> Array:
    """What a chunk adds to the state [V, 2K], from float32 v_new. In bfloat16 v_new is split into
    two parts, because with slow decay its rounding errors would accumulate; the MXU has unused
    depth for them."""
    if kg.dtype == jnp.float32:
        return heads_dot(v_new, kg, "aa", apart)
    parts, twice = jnp.concatenate(split(v_new, 2), axis=0), jnp.concatenate([kg, kg], axis=0)
    return heads_dot(parts, twice, "aa", apart)


def _masked(xs: Sequence[Array], keep: Sequence[Array]) -> list[Array]:
    return [x * m for x, m in zip(xs, keep)]


def stack_rows(x: Array) -> Array:
    """[R, 2D] -> [2R, D]: stacks the heads."""
    d = x.shape[1] // 2
    return jnp.concatenate([x[:, :d], x[:, d:]], axis=0)
