"""The forward megakernel: KDA of all local chunks in one Pallas call, states passed between ranks.

Plan. Heads (rows x heads, flattened) are processed in groups of `plan.group` pairs, side by side in
lockstep; a step is `plan.chunks` chunks of one group. The kernel has no grid: it loops over groups,
then steps, and copies its own tiles, double buffered (streams.py).

    for each group:  take the entry state (from the previous rank, or the row's start)
        for each step:  gate, exponents, scores, inverse of all its chunks (no state needed)
                        then chunk by chunk v_new, output, next state (pair_tiles.py)
        send the exit state to the next rank

This is the fused walk, for one rank. With several ranks all but one would wait. There the local
work of all chunks comes first (`_local_phase`), and a pipelined pass of the states follows group by
group (`_state_phase`, groups of `plan.pass_pairs` pairs): a rank works on one group while the
previous rank works on the next group.

VMEM holds for the whole call: the group's states [heads, V, K] float32, transposed, and two
constant tables. The kernel writes the output, the residuals (entry states of chunks, two matrices
between tokens, and with StatePolicy.SAVE v_new), and the requested states.

Segments. A decay of -1e30 at a segment's first token resets the state inside the chunk, at no cost.
If segments may start from states other than zero, or if every segment's state is requested
(`plan.pieces`), a chunk is cut into pieces at its starts. The state-dependent part then runs once
per piece, with the other tokens masked; a chunk without a start is a single piece. What the local
phase keeps of a token is then relative to the token's piece.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.kda.problem import Entry, FinalState, StatePolicy
from kernels.kda.tpu import pair_tiles as tiles
from kernels.kda.tpu.forward_steps import (
    local_work,
    park_pieces,
    parked_unit,
    pass_chunk,
    pass_pieces,
    put_heads,
    put_matrices,
    put_total,
    save_states,
    whole_step,
)
from kernels.kda.tpu.pair_tiles import C
from kernels.kda.tpu.plan import Plan, Ref, Tile, out_struct
from kernels.kda.tpu.relay import Relay, hand_on, relay_scratch, take_or
from kernels.kda.tpu.streams import Loads, Stores, divided, walk


class Operands(NamedTuple):
    """Inputs of the kernel, in HBM except `gate` (VMEM), `pieces` and `coords` (SMEM).

    Columns: lanes (beta of the group's heads | low | high | valid | piece of the group's rows). The
    log decay is clipped to [low, high], `valid` is 1 at real tokens, and `piece` (only with
    plan.pieces) is the number of the token's piece in the chunk, -1 at padding.
    """

    q: Any  # [heads, T, K]
    k: Any  # [heads, T, K]
    v: Any  # [heads, T, V]
    decay: Any  # [heads, T, K]
    rows: Any  # [N, pairs, 2C] float32: beta, lanes (head, token)
    columns: Any  # [groups, T, lanes] float32
    gate: Any  # [2, groups, group heads, K] float32: exp(a_log) and dt_bias, or None
    starts: Any  # [heads, slots, V, K] float32, or None
    entry: Any  # [heads, V, K] float32: the states that enter this rank, or None
    pieces: Any  # [groups, 1 + 2 rows, N] int32 or None: the largest number of pieces of any row in
    #              the chunk, then each row's number of pieces, then the segment of its piece 0
    coords: Any  # [mesh axes] int32, or None


class Outputs(NamedTuple):
    out: Any  # [heads, T, V], in VMEM with plan.rank_io_in_vmem
    states: Any  # V // C arrays [heads, T, K]: rows v = C j .. of chunk n's entry state at C n
    matrices: Any  # [heads, T, 2C]: of pair p, A' = A diag(beta) at 2p and Aqk A' at 2p + 1
    v_new: Any  # [heads, T, V], or None
    exit: Any  # [heads, V, K] float32: the state at the rank's end, or None
    entry: Any  # [heads, V, K] float32: the state at the rank's beginning, or None
    finals: Any  # [heads, max_segments, V, K] float32, or None
    totals: (
        Any  # [state groups, N, *plan.totals, K] float32, scratch of the pipelined pass, or None
    )
    spare: Any  # [heads, T, K], scratch of the pipelined pass if K and V differ, or None


def run(plan: Plan, operands: Operands) -> Outputs:
    """Launches the kernel."""
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
            collective_id=None if plan.line is None else plan.line.collective_id(STEP),
            has_side_effects=plan.line is not None,
        ),
        name="kda_forward",
    )(operands)


STEP = 1  # the direction in which states pass along the ranks


def _output_shapes(plan: Plan, operands: Operands) -> Outputs:
    h, t, k, v = plan.heads, plan.tokens, plan.keys, plan.values
    like = lambda shape, dtype=plan.dtype: out_struct(operands, shape, dtype)  # noqa: E731
    save = plan.problem.state_policy is StatePolicy.SAVE
    wanted = plan.problem.final_state
    out = jax.typeof(operands.v)  # v has out's shape and dtype
    return Outputs(
        out=out.update(memory_space=pltpu.VMEM) if plan.rank_io_in_vmem else like((h, t, v)),
        states=tuple(like((h, t, k)) for _ in range(v // C)),
        matrices=like((h, t, 2 * C)),
        v_new=like((h, t, v)) if save else None,
        exit=None if wanted is FinalState.NONE else like((h, v, k), jnp.float32),
        entry=like((h, v, k), jnp.float32) if plan.problem.entry is Entry.KEPT else None,
        finals=like((h, plan.problem.max_segments, v, k), jnp.float32)
        if wanted is FinalState.ALL
        else None,
        totals=like((plan.state_groups, t // C, *plan.totals, k), jnp.float32)
        if plan.pass_pairs
        else None,
        spare=like((h, t, k)) if plan.pass_pairs and k != v else None,
    )


def _scratch(plan: Plan, operands: Operands) -> dict[str, Any]:
    """The kernel's VMEM: one set of buffers for a fused walk, or one per phase of a pipelined
    pass."""
    parts = 1 if plan.one_part else 3
    shared = {
        "level": pltpu.VMEM((C, 2 * C), jnp.int32),
        "sums": pltpu.VMEM((3 * C, parts * C), jnp.bfloat16),
    }
    lanes = operands.columns.shape[-1]
    local, state = _local_buffers(plan, lanes), _state_buffers(plan)
    if plan.pass_pairs:
        if plan.pieces:
            state["columns"] = _two(plan, plan.pass_chunks * C, lanes, dtype=jnp.float32)
        return {"local": shared | local, "state": state}
    return {"both": shared | local | state}


def _two(plan: Plan, *shape: int, dtype=None):
    return pltpu.VMEM((2, *shape), plan.dtype if dtype is None else dtype)


def _local_buffers(plan: Plan, lanes: int) -> dict[str, Any]:
    h, t, k = plan.group_heads, plan.chunks * C, plan.keys
    buffers = {
        "q": _two(plan, h, t, k),
        "k": _two(plan, h, t, k),
        "decay": _two(plan, h, t, k, dtype=plan.decay_dtype),
        "rows": _two(plan, plan.chunks, plan.group, 2 * C, dtype=jnp.float32),
        "columns": _two(plan, t, lanes, dtype=jnp.float32),
        "matrices": _two(plan, h, t, 2 * C),
        "loaded": pltpu.SemaphoreType.DMA((2,)),
        "stored": pltpu.SemaphoreType.DMA((2,)),
    }
    if plan.pass_pairs:
        share = plan.group // plan.pass_pairs
        buffers |= {x: _two(plan, h, t, k) for x in ("p", "qg", "kg")}
        buffers["total"] = _two(plan, share, plan.chunks, *plan.totals, k, dtype=jnp.float32)
    return buffers


def _state_buffers(plan: Plan) -> dict[str, Any]:
    pairs, chunks = (
        (plan.pass_pairs, plan.pass_chunks) if plan.pass_pairs else (plan.group, plan.chunks)
    )
    h, t, k, v = 2 * pairs, chunks * C, plan.keys, plan.values
    buffers = {
        "v": _two(plan, h, t, v),
        "out": _two(plan, h, t, v),
        "states": _two(plan, v // C, h, t, k),
        "state": pltpu.VMEM((h, v, k), jnp.float32),
    }
    if plan.problem.state_policy is StatePolicy.SAVE:
        buffers["v_new"] = _two(plan, h, t, v)
    if plan.line is not None:
        buffers["relay"] = relay_scratch(jax.ShapeDtypeStruct((h, v, k), jnp.float32))
    if plan.pass_pairs:
        buffers |= {x: _two(plan, h, t, k) for x in ("p", "qg", "kg")}
        buffers["matrices"] = _two(plan, h, t, 2 * C)
        buffers["total"] = _two(plan, chunks, *plan.totals, k, dtype=jnp.float32)
        buffers["loaded"] = pltpu.SemaphoreType.DMA((2,))
        buffers["stored"] = pltpu.SemaphoreType.DMA((2,))
    return buffers


def _kernel(plan: Plan, ops: Operands, outs: Outputs, s: dict[str, Any]) -> None:
    first, last = (s["local"], s["state"]) if plan.pass_pairs else (s["both"], s["both"])
    first["level"][...] = tiles.level_table()
    first["sums"][...] = tiles.sum_table(1 if plan.one_part else 3)
    relay = None
    if plan.line is not None:
        rounds = plan.state_groups
        relay = Relay(plan.line, ops.coords, STEP, rounds, last["relay"])
        relay.open()
    if plan.pass_pairs:
        _local_phase(plan, ops, outs, first)
        _state_phase(plan, ops, outs, last, relay)
    else:
        _fused(plan, ops, outs, first, relay)
    if relay is not None:
        relay.close()


def _fused(plan: Plan, ops: Operands, outs: Outputs, s: dict[str, Any], relay) -> None:
    view = Views(plan.group, plan.chunks, plan.steps)
    loads = [*_local_loads(plan, ops, s, view), (view.heads(ops.v), s["v"])]
    stores = [(view.heads(outs.matrices), s["matrices"])]
    stores += _state_stores(outs, s, view)
    walk(
        plan.groups,
        plan.steps,
        Loads(loads, s["loaded"]),
        Stores(stores, s["stored"]),
        lambda g, j, slot: whole_step(plan, ops, outs, s, g, j, slot),
        lambda g: _enter(ops, outs, s, relay, g),
        lambda g: _leave(outs, s, relay, g),
    )


def _local_phase(plan: Plan, ops: Operands, outs: Outputs, s: dict[str, Any]) -> None:
    """All work that needs no state, for all chunks. The matrices are written to their outputs, the
    decayed queries and keys to outputs that the state pass fills later (`_parked`)."""
    view = Views(plan.group, plan.chunks, plan.steps)
    parked = _parked(outs)
    share = plan.group // plan.pass_pairs

    def totals(at):
        g, j = divided(at, plan.steps)
        return outs.totals.at[pl.ds(g * share, share), pl.ds(j * plan.chunks, plan.chunks)]

    stores = [(view.heads(outs.matrices), s["matrices"])]
    stores += [(view.heads(ref), s[name]) for name, ref in parked.items()]
    stores.append((totals, s["total"]))

    def step(g, j, slot):
        units = [(c, p) for c in range(plan.chunks) for p in range(plan.group)]
        tile = Tile(plan, ops.gate, s, g, slot)
        locals_ = local_work(plan, tile, s, units)
        put_matrices(s, slot, units, locals_)
        if plan.pieces:
            for c in range(plan.chunks):
                park_pieces(plan, ops, s, tile, g, j * plan.chunks + c, slot, c)
            return
        for (c, p), unit in zip(units, locals_):
            put_heads(s["p"], slot, c, p, unit.p)
            put_heads(s["qg"], slot, c, p, unit.qg)
            put_heads(s["kg"], slot, c, p, unit.kg)
            put_total(plan, s, slot, c, p, unit, 0)

    loads = Loads(_local_loads(plan, ops, s, view), s["loaded"])
    walk(plan.groups, plan.steps, loads, Stores(stores, s["stored"]), step)


def _state_phase(plan: Plan, ops: Operands, outs: Outputs, s: dict[str, Any], relay) -> None:
    """Passes the states through all chunks, group by group: this rank works on one group while the
    previous rank works on the next group."""
    steps = plan.tokens // (C * plan.pass_chunks)
    view = Views(plan.pass_pairs, plan.pass_chunks, steps)

    def totals(at):
        g, j = divided(at, steps)
        return outs.totals.at[g, pl.ds(j * plan.pass_chunks, plan.pass_chunks)]

    loads = [(view.heads(outs.matrices), s["matrices"])]
    loads += [(view.heads(ref), s[name]) for name, ref in _parked(outs).items()]
    loads += [(totals, s["total"]), (view.heads(ops.v), s["v"])]
    if plan.pieces:
        loads.append((view.columns(ops.columns), s["columns"]))

    def step(g, j, slot):
        for c in range(plan.pass_chunks):
            save_states(plan, s, slot, c)

            def units(piece=0, c=c):
                return [parked_unit(s, slot, c, p, piece) for p in range(plan.pass_pairs)]

            if plan.pieces:
                tile, n = Tile(plan, ops.gate, s, g, slot), j * plan.pass_chunks + c
                pass_pieces(plan, ops, outs, s, tile, units, g, n, slot, c)
            else:
                pass_chunk(plan, s, units(), slot, c)

    walk(
        plan.state_groups,
        steps,
        Loads(loads, s["loaded"]),
        Stores(_state_stores(outs, s, view), s["stored"]),
        step,
        lambda g: _enter(ops, outs, s, relay, g),
        lambda g: _leave(outs, s, relay, g),
    )


def _parked(outs: Outputs) -> dict[str, Ref]:
    """Where the local phase puts decayed queries and keys [heads, T, K]: into outputs of the state
    pass. It reads a chunk's values before it overwrites them, so they need no extra memory."""
    spare = outs.out if outs.spare is None else outs.spare
    return {"p": spare, "qg": outs.states[0], "kg": outs.states[1]}


class Views:
    """HBM slices of a step: `group` pairs of heads, `chunks` chunks; `steps` steps per group."""

    def __init__(self, group: int, chunks: int, steps: int):
        self._group, self._chunks, self._steps = group, chunks, steps

    def _place(self, at):
        g, j = divided(at, self._steps)
        return g, pl.ds(j * self._chunks * C, self._chunks * C)

    def heads(self, ref: Ref):
        """Slices of [heads, T, D]."""

        def view(at):
            g, tokens = self._place(at)
            return ref.at[pl.ds(g * 2 * self._group, 2 * self._group), tokens]

        return view

    def columns(self, ref: Ref):
        """Slices of [groups, T, lanes]."""

        def view(at):
            g, tokens = self._place(at)
            return ref.at[g, tokens]

        return view

    def rows(self, ref: Ref):
        """Slices of [N, pairs, 2C]."""

        def view(at):
            g, j = divided(at, self._steps)
            chunks = pl.ds(j * self._chunks, self._chunks)
            return ref.at[chunks, pl.ds(g * self._group, self._group)]

        return view


def _local_loads(plan: Plan, ops: Operands, s: dict[str, Any], view: Views) -> list:
    loads = [(view.heads(getattr(ops, x)), s[x]) for x in ("q", "k", "decay")]
    return [*loads, (view.rows(ops.rows), s["rows"]), (view.columns(ops.columns), s["columns"])]


def _state_stores(outs: Outputs, s: dict[str, Any], view: Views) -> list:
    stores = [(view.heads(outs.out), s["out"])]
    stores += [(view.heads(ref), s["states"].at[:, j]) for j, ref in enumerate(outs.states)]
    if outs.v_new is not None:
        stores.append((view.heads(outs.v_new), s["v_new"]))
    return stores


def _enter(ops: Operands, outs: Outputs, s: dict[str, Any], relay: Relay | None, g) -> None:
    """Sets the group's entry states: as given; else the row's start states on the first rank, and
    the previous rank's message on the others."""
    state = s["state"]
    group = pl.ds(g * state.shape[0], state.shape[0])
    if ops.entry is not None:
        pltpu.sync_copy(ops.entry.at[group], state)
        return

    def start():
        if ops.starts is None:
            state[...] = jnp.zeros_like(state)
        else:
            pltpu.sync_copy(ops.starts.at[group, 0], state)

    take_or(relay, g, state, start)
    if outs.entry is not None:
        pltpu.sync_copy(state, outs.entry.at[group])


def _leave(outs: Outputs, s: dict[str, Any], relay: Relay | None, g) -> None:
    state = s["state"]
    hand_on(relay, g, state)
    if outs.exit is not None:
        pltpu.sync_copy(state, outs.exit.at[pl.ds(g * state.shape[0], state.shape[0])])
