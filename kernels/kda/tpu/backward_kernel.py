"""The backward megakernel: KDA's gradients of all local chunks in one Pallas call.

Plan. As in the forward, heads are processed in groups of `plan.group` pairs side by side, a step is
one chunk of one group, and the kernel itself loops over groups and steps and copies its tiles,
double buffered. Steps run from a group's last chunk to its first. A chunk has two stages
(backward_tiles.py): the cotangent pass, which carries the state's cotangent, and the local stage,
which computes the gradients.

    One device, each group:                 Ranks, each group:
    take the exit state's cotangent         receive the exit state's cotangent from the next rank
    each chunk: pass, then local stage      each chunk: pass; keep dr and dS'
    write the entry state's cotangent       send the entry state's cotangent to the previous rank
                                            each chunk: local stage

So a rank waits only for its neighbour's cotangent pass, and after its first message not at all.
VMEM holds for the whole call: the group's cotangents [heads, V, K] float32, transposed, sums for
the gate's parameters, constant tables, and between ranks the results of the cotangent pass, if they
fit. The gradients of q, k, v and decay reuse the buffers of residuals and d_out if the shapes
agree: a tile is read before its gradient is written.

Segments. As in the forward, a decay of -1e30 at a segment's start resets the state, at no cost.
With `plan.pieces` a chunk runs once per piece, last piece first, on that piece's tokens. Between
two pieces the cotangent is added to that of the segment's start state, and is replaced by the
cotangent of the earlier segment's final state.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.kda.tpu import backward_tiles, pair_tiles
from kernels.kda.tpu.backward_steps import Stages, Steps
from kernels.kda.tpu.pair_tiles import LANES, SUBLANES, C
from kernels.kda.tpu.plan import Plan, Ref, out_struct
from kernels.kda.tpu.relay import Relay, hand_on, relay_scratch, take_or
from kernels.kda.tpu.streams import Loads, Stores, divided, walk

F32 = jnp.float32
STEP = -1  # the direction in which cotangents pass along the ranks


class Operands(NamedTuple):
    """Inputs of the kernel, in HBM unless noted; layouts as in forward_kernel.py."""

    q: Any  # [heads, T, K]
    k: Any  # [heads, T, K]
    v: Any  # [heads, T, V]
    decay: Any  # [heads, T, K]
    d_out: Any  # [heads, T, V]
    states: Any  # V // C arrays [heads, T, K]
    matrices: Any  # [heads, T, 2C]
    v_new: Any  # [heads, T, V], or None: recomputed
    columns: Any  # [groups, T, lanes] float32
    gate: Any  # VMEM [2, groups, group heads, K] float32, or None
    starts: Any  # [heads, slots, V, K] float32, or None
    d_exit: Any  # [heads, V, K] float32: cotangent of the row's last state, or None
    d_finals: Any  # [heads, max_segments, V, K] float32: of the earlier segments' states, or None
    pieces: Any  # SMEM [groups, 1 + 2 rows, N] int32, or None
    coords: Any  # SMEM [mesh axes] int32, or None


class Outputs(NamedTuple):
    q: Any  # [heads, T, K]
    k: Any  # [heads, T, K]
    v: Any  # [heads, T, V]
    decay: Any  # [heads, T, K]
    beta: Any  # [groups, N, group heads, C] float32
    starts: Any  # [heads, slots, V, K] float32, or None
    gate: Any  # [2, heads, 8, K] float32: partial sums for a_log and dt_bias, or None
    kept: Any  # scratch, see `_kept_shapes`, or None: in VMEM or not needed


def run(plan: Plan, operands: Operands) -> Outputs:
    """Launches the kernel."""
    specs = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), operands)
    places = {"gate": pltpu.VMEM, "pieces": pltpu.SMEM, "coords": pltpu.SMEM}
    for name, place in places.items():
        if getattr(operands, name) is not None:
            specs = specs._replace(**{name: pl.BlockSpec(memory_space=place)})
    shapes = _output_shapes(plan, operands)
    return pl.pallas_call(
        lambda ops, *outs, **scratch: _Kernel(plan, ops, Outputs(*outs), scratch).run(),
        out_shape=shapes,
        in_specs=(specs,),
        out_specs=jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), shapes),
        scratch_shapes=_scratch(plan, operands),
        input_output_aliases=_aliases(plan, operands, shapes),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=plan.vmem_limit,
            collective_id=None if plan.line is None else plan.line.collective_id(STEP),
            has_side_effects=plan.line is not None,
        ),
        name="kda_backward",
    )(operands)


def _output_shapes(plan: Plan, operands: Operands) -> Outputs:
    h, t, k, v = plan.heads, plan.tokens, plan.keys, plan.values
    like = lambda shape, dtype=plan.dtype: out_struct(operands, shape, dtype)  # noqa: E731
    return Outputs(
        q=like((h, t, k)),
        k=like((h, t, k)),
        v=like((h, t, v)),
        decay=like((h, t, k), operands.decay.dtype),
        beta=like((plan.groups, t // C, plan.group_heads, C), F32),
        starts=None if operands.starts is None else like(operands.starts.shape, F32),
        gate=None if operands.gate is None else like((2, h, SUBLANES, k), F32),
        kept=None if plan.line is None or fits_vmem(plan) else _kept_shapes(plan, like),
    )


def _kept_shapes(plan: Plan, make) -> tuple[Any, Any]:
    """Shapes of the cotangent pass's results for the local stage, see `_Kernel._left_by_pass`."""
    h, t = plan.group_heads, plan.tokens
    return make((h, t, plan.values)), make((plan.values // C, h, t, plan.keys))


def fits_vmem(plan: Plan) -> bool:
    """Whether they fit in VMEM with the double buffers and the compiler's spills."""
    shapes = _kept_shapes(plan, lambda shape: shape)
    words = sum(math.prod(shape) for shape in shapes)
    return words * plan.dtype.itemsize <= plan.vmem_limit // 3


def _aliases(plan: Plan, operands: Operands, shapes: Outputs) -> dict[int, int]:
    """Operands whose buffers outputs reuse, by flat position: each tile is read before the output's
    tile is written, and the residuals have no other reader."""
    wanted = [
        (operands.states[0], shapes.q),
        (operands.states[1], shapes.k),
        (operands.d_out, shapes.decay),
    ]
    wanted.append((operands.matrices if operands.v_new is None else operands.v_new, shapes.v))
    sources, targets = jax.tree.leaves(operands), jax.tree.leaves(shapes)

    def position(leaves, x):
        return next(i for i, leaf in enumerate(leaves) if leaf is x)

    return {
        position(sources, x): position(targets, y)
        for x, y in wanted
        if (x.shape, x.dtype) == (y.shape, y.dtype)
    }


def _scratch(plan: Plan, operands: Operands) -> dict[str, Any]:
    """VMEM of the kernel: double buffers of a step's tiles, the group's cotangents, tables."""
    h, k, v, dtype = plan.group_heads, plan.keys, plan.values, plan.dtype
    two = lambda *shape, dtype=dtype: pltpu.VMEM((2, *shape), dtype)  # noqa: E731
    parts = 1 if plan.one_part else 3
    scratch = {
        "q": two(h, C, k),
        "k": two(h, C, k),
        "v": two(h, C, v),
        "decay": two(h, C, k, dtype=operands.decay.dtype),
        "d_out": two(h, C, v),
        "states": two(v // C, h, C, k),
        "matrices": two(h, C, 2 * C),
        "columns": two(C, operands.columns.shape[-1], dtype=F32),
        "d_q": two(h, C, k),
        "d_k": two(h, C, k),
        "d_decay": two(h, C, k, dtype=operands.decay.dtype),
        "d_beta": two(h, C, dtype=F32),
        "dr": two(h, C, v),
        "carry": pltpu.VMEM((h, v, k), F32),
        "beta_sums": pltpu.VMEM((C, max(LANES, h)), F32),
        "level": pltpu.VMEM((C, 2 * C), dtype),
        "straddle": pltpu.VMEM((C, backward_tiles.TERMS * C), dtype),
        "sums": pltpu.VMEM((3 * C, parts * C), jnp.bfloat16),
        "loaded": pltpu.SemaphoreType.DMA((2,)),
        "stored": pltpu.SemaphoreType.DMA((2,)),
    }
    if operands.v_new is not None:
        scratch["v_new"] = two(h, C, v)
    if operands.gate is not None:
        scratch["gate"] = pltpu.VMEM((2, h, SUBLANES, k), F32)
    if operands.starts is not None:
        scratch["entry"] = pltpu.VMEM((h, v, k), F32)
    if plan.line is not None:
        scratch["d_states"] = two(v // C, h, C, k)
        scratch["moved"] = pltpu.SemaphoreType.DMA
        if fits_vmem(plan):
            kept = _kept_shapes(plan, lambda shape: pltpu.VMEM(shape, dtype))
            scratch |= dict(zip(("kept_dr", "kept_d_states"), kept))
        scratch["relay"] = relay_scratch(jax.ShapeDtypeStruct((h, v, k), F32))
    return scratch


class _Kernel:
    """The kernel's walks; `s` holds the scratch references by name."""

    def __init__(self, plan: Plan, ops: Operands, outs: Outputs, s: dict[str, Any]):
        self.plan, self.ops, self.outs, self.s = plan, ops, outs, s
        self.steps = plan.tokens // C
        self._work = Steps(plan, ops, outs, s)
        self.relay = None
        if plan.line is not None:
            self.relay = Relay(plan.line, ops.coords, STEP, plan.groups, s["relay"])

    def run(self) -> None:
        self.s["level"][...] = pair_tiles.level_table().astype(self.plan.dtype)
        self.s["straddle"][...] = backward_tiles.straddle_table().astype(self.plan.dtype)
        self.s["sums"][...] = pair_tiles.sum_table(1 if self.plan.one_part else 3)
        ops, outs = self.ops, self.outs
        if ops.starts is not None:
            self._clear_starts()
        both = {"q": ops.q, "k": ops.k, "decay": ops.decay, "d_out": ops.d_out}
        both |= {"columns": ops.columns}
        passing = {"matrices": ops.matrices}
        local = {"v": ops.v, "states": ops.states}
        local |= {"matrices": ops.matrices} if ops.v_new is None else {"v_new": ops.v_new}
        grads = {"d_q": outs.q, "d_k": outs.k, "d_decay": outs.decay, "d_beta": outs.beta}
        if self.relay is None:
            stores = grads | {"dr": outs.v}
            self._walk(both | passing | local, stores, 0, self.plan.groups, Stages.BOTH)
            return
        kept = dict(zip(("dr", "d_states"), self._left_by_pass()))
        self.relay.open()

        def group(g, _):
            self._walk(both | passing, kept, g, 1, Stages.PASS)
            self._walk(both | local | kept, grads, g, 1, Stages.LOCAL)
            return 0

        jax.lax.fori_loop(0, self.plan.groups, group, 0)
        self.relay.close()

    def _walk(self, loads: dict, stores: dict, first, groups: int, stages: Stages) -> None:
        """Runs the steps of `groups` groups from `first` on; `loads` and `stores` are the arrays
        copied at each step, by name."""
        gate = stages.local and self.ops.gate is not None

        def enter(i):
            if stages.passes:
                self._enter(first + i)
            if gate:
                self.s["gate"][...] = jnp.zeros_like(self.s["gate"])

        def step(i, j, slot):
            if not stages.passes:
                self._move_values(first + i, j)
            self._work.run(first + i, self.steps - 1 - j, slot, stages)

        def leave(i):
            if stages.passes:
                self._leave(first + i)
            else:
                self._move_values(first + i, self.steps)
            if gate:
                pltpu.sync_copy(self.s["gate"], self.outs.gate.at[:, self._heads(first + i)])

        arriving = Loads(self._tiles(loads, first), self.s["loaded"])
        leaving = Stores(self._tiles(stores, first), self.s["stored"])
        walk(groups, self.steps, arriving, leaving, step, enter, leave)

    def _heads(self, g):
        return pl.ds(g * self.plan.group_heads, self.plan.group_heads)

    def _tiles(self, arrays: dict, first) -> list:
        """(view of a step's tile, its double buffer) of each array, steps counted from group
        `first` on."""

        def place(at):
            g, j = divided(at, self.steps)
            return first + g, pl.ds((self.steps - 1 - j) * C, C)

        def view(ref):
            def of(at):
                g, tokens = place(at)
                return ref.at[self._heads(g), tokens]

            return of

        def all_heads(ref, axis):
            return lambda at: ref.at[(slice(None),) * axis + (place(at)[1],)]

        def columns(at):
            g, tokens = place(at)
            return self.ops.columns.at[g, tokens]

        def beta(at):
            g, j = divided(at, self.steps)
            return self.outs.beta.at[first + g, self.steps - 1 - j]

        tiles = []
        for name, ref in arrays.items():
            buffer = self.s[name]
            if name == "columns":
                tiles.append((columns, buffer))
            elif name == "d_beta":
                tiles.append((beta, buffer))
            elif name == "states":
                parts = enumerate(ref)
                tiles += [(view(r), buffer.at[:, j]) for j, r in parts]
            elif name == "d_states":
                tiles.append((all_heads(ref, 2), buffer))
            elif name == "dr" and self.relay is not None:
                tiles.append((all_heads(ref, 1), buffer))
            else:
                tiles.append((view(ref), buffer))
        return tiles

    def _left_by_pass(self) -> tuple[Ref, Ref]:
        """The cotangent pass's results for a group's local stage: dr [heads, T, V] and the
        cotangents of the chunks' exit states [V // C, heads, T, K]."""
        if self.outs.kept is not None:
            return self.outs.kept
        return self.s["kept_dr"], self.s["kept_d_states"]

    def _move_values(self, g, j) -> None:
        """dr is the gradient of v: waits for the previous tile's copy to HBM, then starts that of
        step j; after the last step (a static j) it only waits."""
        dr = self._left_by_pass()[0]

        def copy(j):
            tokens = pl.ds((self.steps - 1 - j) * C, C)
            target = self.outs.v.at[self._heads(g), tokens]
            return pltpu.make_async_copy(dr.at[:, tokens], target, self.s["moved"])

        if not isinstance(j, int):
            pl.when(j > 0)(lambda: copy(j - 1).wait())
            copy(j).start()
        else:
            copy(j - 1).wait()

    # --- the group's cotangents -------------------------------------------------------------------

    def _enter(self, g) -> None:
        """Sets the exit states' cotangents: at the row's end given, else from the next rank."""
        carry = self.s["carry"]

        def end():
            if self.ops.d_exit is None:
                carry[...] = jnp.zeros_like(carry)
            else:
                pltpu.sync_copy(self.ops.d_exit.at[self._heads(g)], carry)

        take_or(self.relay, g, carry, end)

    def _leave(self, g) -> None:
        """Passes the entry states' cotangents to the previous rank or the row's start state."""
        relay, carry = self.relay, self.s["carry"]
        hand_on(relay, g, carry)
        if self.ops.starts is None:
            return

        def give():
            self._work.add_start(carry, self.s["entry"], self.outs.starts.at[self._heads(g), 0])

        if relay is None:
            give()
        else:
            pl.when(~relay.has_target)(give)

    def _clear_starts(self) -> None:
        entry, plan = self.s["entry"], self.plan
        entry[...] = jnp.zeros_like(entry)

        def clear(at, _):
            g, slot = divided(at, plan.slots)
            pltpu.sync_copy(entry, self.outs.starts.at[self._heads(g), slot])
            return 0

        jax.lax.fori_loop(0, plan.groups * plan.slots, clear, 0)
