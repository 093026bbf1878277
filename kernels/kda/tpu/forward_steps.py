"""One step of the forward kernel on tiles in VMEM: local work, passing the state through a chunk,
and chunks that are cut into pieces. `s` holds the kernel's VMEM by name, see forward_kernel.py."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.kda.tpu import pair_tiles as tiles
from kernels.kda.tpu.pair_tiles import C
from kernels.kda.tpu.plan import Plan, Ref, Tile

LOCKSTEP = 4  # units whose scores are computed side by side; more would only spill


def whole_step(plan: Plan, ops, outs, s: dict[str, Any], g, j, slot) -> None:
    """Runs step j of group g: local work of its chunks, then the state through each of them."""
    tile = Tile(plan, ops.gate, s, g, slot)
    units = [(c, p) for c in range(plan.chunks) for p in range(plan.group)]
    locals_ = local_work(plan, tile, s, units)
    put_matrices(s, slot, units, locals_)
    for c in range(plan.chunks):
        here = locals_[c * plan.group : (c + 1) * plan.group]
        save_states(plan, s, slot, c)
        if plan.pieces:
            n = j * plan.chunks + c
            unit_of = lambda i, c=c: piece_units(plan, s, tile, slot, c, i)  # noqa: E731
            pass_pieces(plan, ops, outs, s, tile, unit_of, g, n, slot, c)
        else:
            pass_chunk(plan, s, here, slot, c)


def pass_chunk(plan: Plan, s: dict[str, Any], units: list[tiles.Local], slot, c: int) -> None:
    """Passes the states through chunk c of a step: reads them, writes the chunk's outputs, v_new
    (if kept) and the next states."""
    pairs = range(len(units))
    values = [pair_of_heads(s["v"], slot, c, p) for p in pairs]
    out, v_new, states = tiles.state_step(
        get_states(s, len(units)), units, values, apart=plan.heads_apart
    )
    put_states(plan, s, states)
    for p in pairs:
        put_heads(s["out"], slot, c, p, plan.problem.scale * out[p])
        if "v_new" in s:
            put_heads(s["v_new"], slot, c, p, v_new[p])


def parked_unit(s: dict[str, Any], slot, c: int, p: int, piece=0) -> tiles.Local:
    """A unit's results of the local phase; the total decay is that of one piece."""
    p_, qg, kg = (pair_of_heads(s[x], slot, c, p) for x in ("p", "qg", "kg"))
    total = [s["total"][slot, c, piece, h : h + 1] for h in (2 * p, 2 * p + 1)]
    a, w = get_matrices(s, slot, c, p)
    return tiles.Local(a, w, p_, qg, kg, jnp.concatenate(total, axis=1))


def put_matrices(s: dict[str, Any], slot, units, locals_: list[tiles.Local]) -> None:
    for (c, p), unit in zip(units, locals_):
        s["matrices"][slot, 2 * p, pl.ds(c * C, C)] = unit.a
        s["matrices"][slot, 2 * p + 1, pl.ds(c * C, C)] = unit.w


def get_matrices(s: dict[str, Any], slot, c: int, p: int) -> tuple[jax.Array, jax.Array]:
    """(A diag(beta), Aqk A diag(beta)) [C, 2C] of a unit."""
    tokens = pl.ds(c * C, C)
    return s["matrices"][slot, 2 * p, tokens], s["matrices"][slot, 2 * p + 1, tokens]


def local_work(plan: Plan, tile: Tile, s: dict[str, Any], units) -> list[tiles.Local]:
    """All work of these units that needs no state. Scores are computed `LOCKSTEP` units at a time,
    since more would only spill; the inverse is bound by latency and takes all units at once."""
    table, sums = s["level"][...], s["sums"][...]
    found = []
    for first in range(0, len(units), LOCKSTEP):
        block = units[first : first + LOCKSTEP]
        factors = tiles.decay_factors([tile.decay(*u) for u in block], sums)
        queries, keys = [tile.query(*u) for u in block], [tile.key(*u) for u in block]
        found += tiles.local_scores(queries, keys, factors, table, plan.dtype)
    lowers = [tile.beta_columns(*u) * kk for u, (_, _, kk) in zip(units, found)]
    inverses, reads = tiles.inverses(lowers, [qk for _, qk, _ in found], table, plan.dtype)
    for u, (local, _, _), x, y in zip(units, found, inverses, reads):
        local.a = (x * tile.beta_row(*u)).astype(plan.dtype)
        local.w = (y * tile.beta_row(*u)).astype(plan.dtype)
    return [local for local, _, _ in found]


def get_states(s: dict[str, Any], pairs: int) -> list[jax.Array]:
    """[V, 2K] of each pair from the states [heads, V, K]."""
    state = s["state"]
    return [jnp.concatenate([state[2 * p], state[2 * p + 1]], axis=1) for p in range(pairs)]


def put_states(plan: Plan, s: dict[str, Any], states: list[jax.Array]) -> None:
    for p, x in enumerate(states):
        s["state"][2 * p] = x[:, : plan.keys]
        s["state"][2 * p + 1] = x[:, plan.keys :]


def pair_of_heads(ref: Ref, slot, c: int, p: int) -> jax.Array:
    """[C, 2D] of a pair from [2, heads, T, D]."""
    return jnp.concatenate([ref[slot, h, pl.ds(c * C, C)] for h in (2 * p, 2 * p + 1)], axis=1)


def put_heads(ref: Ref, slot, c: int, p: int, x: jax.Array) -> None:
    """The inverse of `pair_of_heads`, in the buffer's dtype."""
    x, width = x.astype(ref.dtype), x.shape[1] // 2
    for i in (0, 1):
        ref[slot, 2 * p + i, pl.ds(c * C, C)] = x[:, i * width : (i + 1) * width]


def save_states(plan: Plan, s: dict[str, Any], slot, c: int) -> None:
    """Keeps the entry states of chunk c for the backward, in its layout (`Outputs.states`)."""
    for j in range(plan.values // C):
        rows = s["state"][:, j * C : (j + 1) * C]
        s["states"][slot, j, :, pl.ds(c * C, C)] = rows.astype(plan.dtype)


# --- chunks in which segments start --------------------------------------------------------------


def park_pieces(plan: Plan, ops, s: dict[str, Any], tile: Tile, g, n, slot, c: int) -> None:
    """Parks a chunk's decayed queries and keys, each token's relative to its own piece, and the
    total decay of each piece."""

    def piece(i, _):
        for p, unit in enumerate(piece_units(plan, s, tile, slot, c, i)):
            mine = tile.of_rows("piece", c, p, plan.keys) == i
            for name, x in (("p", unit.p), ("qg", unit.qg), ("kg", unit.kg)):
                x = jnp.where(mine, x.astype(jnp.float32), 0.0)
                _add_heads(s[name], slot, c, p, x, i)
            put_total(plan, s, slot, c, p, unit, i)
        return 0

    jax.lax.fori_loop(0, ops.pieces[g, 0, n], piece, 0)


def piece_units(plan: Plan, s: dict[str, Any], tile: Tile, slot, c: int, i) -> list[tiles.Local]:
    """The chunk's units as piece i sees them; rows of other pieces are meaningless."""
    pairs = range(plan.group)
    decays = [tile.decay_of_piece(c, p, i) for p in pairs]
    units = []
    for p, factors in zip(pairs, tiles.decay_factors(decays, s["sums"][...])):
        unit = tiles.entry_factors(tile.query(c, p), tile.key(c, p), factors, plan.dtype)
        unit.a, unit.w = get_matrices(s, slot, c, p)
        units.append(unit)
    return units


def put_total(
    plan: Plan, s: dict[str, Any], slot, c: int, p: int, unit: tiles.Local, piece
) -> None:
    """Parks the total decay of a unit, or of one of its pieces."""
    for i in (0, 1):
        row = 2 * (p % plan.pass_pairs) + i
        lanes = slice(i * plan.keys, (i + 1) * plan.keys)
        s["total"][slot, p // plan.pass_pairs, c, piece, row : row + 1] = unit.total[:, lanes]


def pass_pieces(
    plan: Plan, ops, outs, s: dict[str, Any], tile: Tile, units_of, g, n, slot, c: int
) -> None:
    """Passes the states through chunk n, once per piece. Piece 0 starts from the carried state, a
    later piece from its segment's start state; the state before it is written to `finals`.

    units_of(i): the chunk's units as piece i sees them."""
    pairs = range(plan.group)

    def piece(i, _):
        @pl.when(i > 0)
        def _start_segments():
            _swap_states(plan, ops, outs, s, g, n, i)

        keep = [(tile.of_rows("piece", c, p, plan.values) == i).astype(jnp.float32) for p in pairs]
        values = [tile.heads("v", c, p) for p in pairs]
        states = get_states(s, plan.group)
        out, v_new, states = tiles.state_step(states, units_of(i), values, keep, plan.heads_apart)
        put_states(plan, s, states)
        for p in pairs:
            _add_heads(s["out"], slot, c, p, plan.problem.scale * out[p], i)
            if "v_new" in s:
                _add_heads(s["v_new"], slot, c, p, v_new[p].astype(jnp.float32), i)
        return 0

    jax.lax.fori_loop(0, ops.pieces[g, 0, n], piece, 0)


def _add_heads(ref: Ref, slot, c: int, p: int, x: jax.Array, i) -> None:
    """Adds piece i's rows to those of earlier pieces; the rows differ, so the sum is exact."""
    old = pair_of_heads(ref, slot, c, p).astype(jnp.float32)
    put_heads(ref, slot, c, p, x + jnp.where(i == 0, 0.0, old))


def _swap_states(plan, ops, outs, s, g, n, i) -> None:
    """Writes the finished segment's state to `finals` and replaces it by the new segment's start
    state, for batch rows that have a piece i in this chunk."""
    rows = plan.row_of_head
    for row in range(plan.group_rows):
        first, heads = rows.index(row), rows.count(row)

        @pl.when(i < ops.pieces[g, 1 + row, n])
        def _swap(row=row, first=first, heads=heads):
            segment = ops.pieces[g, 1 + plan.group_rows + row, n] + i
            state = s["state"].at[pl.ds(first, heads)]
            at = pl.ds(g * plan.group_heads + first, heads)
            if outs.finals is not None:

                @pl.when(segment <= plan.problem.max_segments)
                def _keep():
                    pltpu.sync_copy(state, outs.finals.at[at, segment - 1])

            slot = jnp.minimum(segment, plan.slots - 1)
            pltpu.sync_copy(ops.starts.at[at, slot], state)
