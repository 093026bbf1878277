"""The forward megakernel: KDA of all local chunks in one Pallas call, states passed between ranks.

Plan. Heads (rows x heads, flattened) go in groups of `plan.group` pairs, side by side in lockstep;
a step is `plan.chunks` chunks of one group. The kernel has no grid: it walks groups, then steps,
and moves its own tiles, double buffered (streams.py).

    for each group:  take the entry state (from the rank behind, or the row's start)
        for each step:  gate, exponents, scores, inverse of all its chunks (no state needed)
                        then chunk by chunk vn, output, next state (pair_tiles.py)
        hand the exit state to the rank ahead

In VMEM for the whole call: the group's states [heads, V, K] float32, transposed, and two constant
tables. Written: the output, what the backward keeps (entry states of chunks, A diag(beta), scores
of q with k, and with StatePolicy.SAVE vn), and the states asked for.

Segments. A decay of -1e30 at a segment's first token resets the state inside the chunk, for free.
Where segments may start from other states than zero, or every segment's state is asked for
(`plan.pieces`), a chunk is cut into pieces at its starts, and the state-dependent part runs once a
piece, the other tokens masked: a loop of one round in chunks without a start.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.kda import pair_tiles as tiles
from kernels.kda.exchange import Relay, relay_scratch
from kernels.kda.pair_tiles import C
from kernels.kda.plan import Plan, Ref, Tile, out_struct
from kernels.kda.problem import FinalState, StatePolicy
from kernels.kda.streams import Loads, Stores, divided


class Operands(NamedTuple):
    """Inputs of the kernel, all in HBM but `gate` (VMEM), `pieces` and `coords` (SMEM).

    Columns: lanes (beta of the group's heads | low | high | valid | piece of the group's rows). The
    log decay is clipped to [low, high], `valid` is 1 at real tokens and `piece` (with plan.pieces
    only) numbers the tile's pieces, -1 at padding.
    """

    q: Any  # [heads, T, K]
    k: Any  # [heads, T, K]
    v: Any  # [heads, T, V]
    decay: Any  # [heads, T, K]
    rows: Any  # [N, pairs, 2C] float32: beta, lanes (head, token)
    columns: Any  # [groups, T, lanes] float32
    gate: Any  # [2, groups, group heads, K] float32: exp(a_log) and dt_bias, or None
    starts: Any  # [heads, slots, V, K] float32, or None
    pieces: Any  # [groups, N, 1 + 2 rows] int32 or None: most pieces of a row in the tile, then
    #              each row's number of pieces, then the segment that each row's piece 0 belongs to
    coords: Any  # [mesh axes] int32, or None


class Outputs(NamedTuple):
    out: Any  # [heads, T, V]
    states: Any  # V // C arrays [heads, T, K]: rows v = C j .. of chunk n's entry state at C n
    a: Any  # [pairs, T, 2C]
    aqk: Any  # [pairs, T, 2C]
    vn: Any  # [heads, T, V], or None
    exit: Any  # [heads, V, K] float32: the state at the rank's end, or None
    finals: Any  # [heads, max_segments, V, K] float32, or None


def run(plan: Plan, operands: Operands) -> Outputs:
    """Launch the kernel."""
    specs = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), operands)
    places = {"gate": pltpu.VMEM, "pieces": pltpu.SMEM, "coords": pltpu.SMEM}
    specs = specs._replace(
        **{
            name: pl.BlockSpec(memory_space=place)
            for name, place in places.items()
            if getattr(operands, name) is not None
        }
    )
    shapes = _output_shapes(plan, operands)
    return pl.pallas_call(
        lambda ops, *outs, **scratch: _kernel(plan, ops, Outputs(*outs), scratch),
        out_shape=shapes,
        in_specs=(specs,),
        out_specs=jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), shapes),
        scratch_shapes=_scratch(plan, operands),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=plan.vmem_limit,
            collective_id=None if plan.line is None else FORWARD_BARRIER,
            has_side_effects=plan.line is not None,
        ),
        name="kda_forward",
    )(operands)


FORWARD_BARRIER = 11  # the barrier semaphore of this kernel; the backward has its own


def _output_shapes(plan: Plan, operands: Operands) -> Outputs:
    h, t, k, v = plan.heads, plan.tokens, plan.keys, plan.values
    like = lambda shape, dtype=plan.dtype: out_struct(operands, shape, dtype)  # noqa: E731
    save = plan.problem.state_policy is StatePolicy.SAVE
    wanted = plan.problem.final_state
    return Outputs(
        out=like((h, t, v)),
        states=tuple(like((h, t, k)) for _ in range(v // C)),
        a=like((h // 2, t, 2 * C)),
        aqk=like((h // 2, t, 2 * C)),
        vn=like((h, t, v)) if save else None,
        exit=None if wanted is FinalState.NONE else like((h, v, k), jnp.float32),
        finals=like((h, plan.problem.max_segments, v, k), jnp.float32)
        if wanted is FinalState.ALL
        else None,
    )


def _scratch(plan: Plan, operands: Operands) -> dict[str, Any]:
    """VMEM of the kernel: double buffers of a step's tiles, the group's states, tables."""
    h, t, k, v = plan.group_heads, plan.chunks * C, plan.keys, plan.values
    two = lambda *shape, dtype=plan.dtype: pltpu.VMEM((2, *shape), dtype)  # noqa: E731
    parts = 1 if plan.one_part else 3
    scratch = {
        "q": two(h, t, k),
        "k": two(h, t, k),
        "v": two(h, t, v),
        "decay": two(h, t, k, dtype=plan.decay_dtype),
        "rows": two(plan.chunks, plan.group, 2 * C, dtype=jnp.float32),
        "columns": two(t, operands.columns.shape[-1], dtype=jnp.float32),
        "out": two(h, t, v),
        "states": two(v // C, h, t, k),
        "a": two(plan.group, t, 2 * C),
        "aqk": two(plan.group, t, 2 * C),
        "state": pltpu.VMEM((h, v, k), jnp.float32),
        "level": pltpu.VMEM((C, 2 * C), jnp.int32),
        "sums": pltpu.VMEM((3 * C, parts * C), jnp.bfloat16),
        "loaded": pltpu.SemaphoreType.DMA((2,)),
        "stored": pltpu.SemaphoreType.DMA((2,)),
        "moved": pltpu.SemaphoreType.DMA,
    }
    if plan.problem.state_policy is StatePolicy.SAVE:
        scratch["vn"] = two(h, t, v)
    if plan.line is not None:
        scratch["relay"] = relay_scratch(jax.ShapeDtypeStruct((h, v, k), jnp.float32))
    return scratch


def _kernel(plan: Plan, ops: Operands, outs: Outputs, s: dict[str, Any]) -> None:
    s["level"][...] = tiles.level_table()
    s["sums"][...] = tiles.sum_table(1 if plan.one_part else 3)
    loads, stores = _streams(plan, ops, outs, s)
    total = plan.groups * plan.steps
    relay = None
    if plan.line is not None:
        relay = Relay(plan.line, ops.coords, 1, plan.groups, s["relay"])
        relay.open()
    loads.start(0)

    def group(g, _):
        _enter(plan, ops, s, relay, g)

        def step(j, _):
            at = g * plan.steps + j
            loads.arrive(at, total)
            stores.make_room(at)
            _step(plan, ops, outs, s, g, j, jax.lax.rem(at, 2))
            stores.start(at)
            return 0

        jax.lax.fori_loop(0, plan.steps, step, 0)
        _leave(plan, outs, s, relay, g)
        return 0

    jax.lax.fori_loop(0, plan.groups, group, 0)
    stores.drain(total)
    if relay is not None:
        relay.close()


def _streams(plan: Plan, ops: Operands, outs: Outputs, s: dict[str, Any]) -> tuple[Loads, Stores]:
    def heads(ref, size):
        def view(at):
            g, j = divided(at, plan.steps)
            tokens = pl.ds(j * plan.chunks * C, plan.chunks * C)
            return ref.at[pl.ds(g * size, size), tokens]

        return view

    def rows(at):
        g, j = divided(at, plan.steps)
        return ops.rows.at[pl.ds(j * plan.chunks, plan.chunks), pl.ds(g * plan.group, plan.group)]

    def columns(at):
        g, j = divided(at, plan.steps)
        return ops.columns.at[g, pl.ds(j * plan.chunks * C, plan.chunks * C)]

    loads = [(heads(getattr(ops, x), plan.group_heads), s[x]) for x in ("q", "k", "v", "decay")]
    loads += [(rows, s["rows"]), (columns, s["columns"])]
    stores = [
        (heads(outs.out, plan.group_heads), s["out"]),
        (heads(outs.a, plan.group), s["a"]),
        (heads(outs.aqk, plan.group), s["aqk"]),
    ]
    for j, ref in enumerate(outs.states):
        stores.append((heads(ref, plan.group_heads), s["states"].at[:, j]))
    if outs.vn is not None:
        stores.append((heads(outs.vn, plan.group_heads), s["vn"]))
    return Loads(loads, s["loaded"]), Stores(stores, s["stored"])


def _enter(plan: Plan, ops: Operands, s: dict[str, Any], relay: Relay | None, g) -> None:
    """The group's entry states: the row's start on the first rank, else what the rank before
    sends."""
    state = s["state"]

    def start():
        if ops.starts is None:
            state[...] = jnp.zeros_like(state)
        else:
            pltpu.sync_copy(ops.starts.at[pl.ds(g * plan.group_heads, plan.group_heads), 0], state)

    if relay is None:
        start()
        return
    pl.when(~relay.has_source)(start)

    @pl.when(relay.has_source)
    def _take():
        relay.receive(g)
        state[...] = relay.message(g)[...]
        relay.release(g)


def _leave(plan: Plan, outs: Outputs, s: dict[str, Any], relay: Relay | None, g) -> None:
    if relay is not None:
        relay.reserve(g)
        relay.reply(g)[...] = s["state"][...]
        relay.send(g)
    if outs.exit is not None:
        heads = pl.ds(g * plan.group_heads, plan.group_heads)
        pltpu.sync_copy(s["state"], outs.exit.at[heads])


# --- one step ------------------------------------------------------------------------------------


def _step(plan: Plan, ops: Operands, outs: Outputs, s: dict[str, Any], g, j, slot) -> None:
    tile = Tile(plan, ops.gate, s, g, slot)
    pairs = range(plan.group)
    units = [(c, p) for c in range(plan.chunks) for p in pairs]
    locals_ = _local(plan, tile, s, units)
    for (c, p), unit in zip(units, locals_):
        s["a"][slot, p, pl.ds(c * C, C)] = unit.a
        s["aqk"][slot, p, pl.ds(c * C, C)] = unit.aqk
    for c in range(plan.chunks):
        here = locals_[c * plan.group : (c + 1) * plan.group]
        _save_states(plan, s, slot, c)
        if plan.pieces:
            _pieces(plan, ops, outs, s, tile, here, g, j * plan.chunks + c, slot, c)
        else:
            values = [tile.heads("v", c, p) for p in pairs]
            out, vn, states = tiles.state_step(_states(plan, s), here, values)
            _put_states(plan, s, states)
            for p in pairs:
                _put_heads(plan, s["out"], slot, c, p, plan.problem.scale * out[p])
                if "vn" in s:
                    _put_heads(plan, s["vn"], slot, c, p, vn[p])


def _local(plan: Plan, tile: Tile, s: dict[str, Any], units) -> list[tiles.Local]:
    """Everything of these units that needs no state. Scores go `LOCKSTEP` units at a time: more
    would only spill; the inverse is all latency and takes all of them."""
    table, sums = s["level"][...], s["sums"][...]
    found = []
    for first in range(0, len(units), LOCKSTEP):
        block = units[first : first + LOCKSTEP]
        ladders = tiles.decay_ladders([tile.decay(*u) for u in block], sums)
        queries, keys = [tile.query(*u) for u in block], [tile.key(*u) for u in block]
        found += tiles.local_scores(queries, keys, ladders, table, plan.dtype)
    lowers = [tile.beta_columns(*u) * kk for u, (_, kk) in zip(units, found)]
    inverses = tiles.inverses(lowers, table, plan.dtype)
    for u, (local, _), x in zip(units, found, inverses):
        local.a = (x * tile.beta_row(*u)).astype(plan.dtype)
    return [local for local, _ in found]


LOCKSTEP = 8


def _states(plan: Plan, s: dict[str, Any]) -> list[jax.Array]:
    state = s["state"]
    return [jnp.concatenate([state[2 * p], state[2 * p + 1]], axis=1) for p in range(plan.group)]


def _put_states(plan: Plan, s: dict[str, Any], states: list[jax.Array]) -> None:
    for p, x in enumerate(states):
        s["state"][2 * p] = x[:, : plan.keys]
        s["state"][2 * p + 1] = x[:, plan.keys :]


def _put_heads(plan: Plan, ref: Ref, slot, c: int, p: int, x: jax.Array) -> None:
    x = x.astype(ref.dtype)
    for i in (0, 1):
        ref[slot, 2 * p + i, pl.ds(c * C, C)] = x[:, i * plan.values : (i + 1) * plan.values]


def _save_states(plan: Plan, s: dict[str, Any], slot, c: int) -> None:
    for j in range(plan.values // C):
        rows = s["state"][:, j * C : (j + 1) * C]
        s["states"][slot, j, :, pl.ds(c * C, C)] = rows.astype(plan.dtype)


# --- chunks in which segments start --------------------------------------------------------------


def _pieces(plan, ops, outs, s, tile: Tile, locals_, g, n, slot, c: int) -> None:
    """The state-dependent part of a chunk, once a piece. Piece 0 enters with the carried state, a
    later one with its segment's start state; the state before that belongs to `finals`."""
    pairs = range(plan.group)

    def piece(i, _):
        @pl.when(i > 0)
        def _start_segments():
            _swap_states(plan, ops, outs, s, g, n, i)

        decays = [tile.decay_of_piece(c, p, i) for p in pairs]
        here, keep = [], []
        for p, ladder in zip(pairs, tiles.decay_ladders(decays, s["sums"][...])):
            local = tiles.entry_factors(tile.query(c, p), tile.key(c, p), ladder, plan.dtype)
            local.a = s["a"][slot, p, pl.ds(c * C, C)]
            local.aqk = s["aqk"][slot, p, pl.ds(c * C, C)]
            here.append(local)
            mine = tile.of_rows("piece", c, p, plan.values) == i
            keep.append(mine.astype(jnp.float32))
        values = [tile.heads("v", c, p) for p in pairs]
        out, vn, states = tiles.state_step(_states(plan, s), here, values, keep)
        _put_states(plan, s, states)
        for p in pairs:
            _add_heads(plan, s["out"], slot, c, p, plan.problem.scale * out[p], i)
            if "vn" in s:
                _add_heads(plan, s["vn"], slot, c, p, vn[p].astype(jnp.float32), i)
        return 0

    jax.lax.fori_loop(0, ops.pieces[g, n, 0], piece, 0)


def _add_heads(plan: Plan, ref: Ref, slot, c: int, p: int, x: jax.Array, i) -> None:
    """Pieces fill different rows: exact in any dtype."""
    old = jnp.concatenate(
        [ref[slot, h, pl.ds(c * C, C)] for h in (2 * p, 2 * p + 1)], axis=1
    ).astype(jnp.float32)
    _put_heads(plan, ref, slot, c, p, x + jnp.where(i == 0, 0.0, old))


def _swap_states(plan, ops, outs, s, g, n, i) -> None:
    """Give the finished segment's state away and put the new segment's start in its place, in rows
    of the batch that have a piece i in this chunk."""
    rows = plan.row_of_head
    for row in range(plan.group_rows):
        first, heads = rows.index(row), rows.count(row)

        @pl.when(i < ops.pieces[g, n, 1 + row])
        def _swap(row=row, first=first, heads=heads):
            segment = ops.pieces[g, n, 1 + plan.group_rows + row] + i
            state = s["state"].at[pl.ds(first, heads)]
            at = pl.ds(g * plan.group_heads + first, heads)
            if outs.finals is not None:

                @pl.when(segment <= plan.problem.max_segments)
                def _keep():
                    pltpu.sync_copy(state, outs.finals.at[at, segment - 1])

            slot = jnp.minimum(segment, plan.slots - 1)
            pltpu.sync_copy(ops.starts.at[at, slot], state)
