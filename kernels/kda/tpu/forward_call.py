"""The TPU backend's forward: the kernel's sizes, its operands from `Inputs`, and the results. See
layout.py for the layout."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kernels.kda.final_states import is_last_rank, start_states, with_empty_segments
from kernels.kda.problem import Entry, FinalState, Inputs, Problem
from kernels.kda.tpu import forward_kernel
from kernels.kda.tpu.forward_kernel import Operands
from kernels.kda.tpu.layout import (
    beta_rows,
    flat_heads,
    flat_states,
    gate_rows,
    guarded_beta,
    largest_divisor,
    round_up,
    rows_states,
    start_slots,
    tile_pieces,
    token_columns,
    vmem_bytes,
)
from kernels.kda.tpu.pair_tiles import LANES, C
from kernels.kda.tpu.plan import Plan
from kernels.kda.tpu.relay import coordinates, rank_line
from kernels.segments import Segments
from kernels.vma import vary, varying_axes

UNITS = 16  # head pairs x chunks in lockstep: enough to hide a product's latency, see NOTES.md
PASS_PAIRS = 4  # head pairs in lockstep, and per message, when states pass between ranks
RANK_IO_SHARE = 4  # out is placed in VMEM if it takes 1 / RANK_IO_SHARE of it or less; v7x: 16 MiB


def forward(problem: Problem, inputs: Inputs, segments: Segments, entry: jax.Array | None):
    """See problem.py. Residuals: the arrays of `forward_kernel.Outputs` that the backward reads."""
    plan = plan_forward(problem, inputs)
    operands = forward_operands(plan, inputs, segments, entry)
    outputs = forward_kernel.run(plan, operands)
    rows, heads, length, _ = inputs.q.shape
    values = inputs.v.shape[-1]
    out = outputs.out[: rows * heads].reshape(rows, heads, length, -1)[..., :values]
    final = _final(plan, inputs, segments, outputs)
    residuals = (outputs.states, outputs.matrices, outputs.v_new)
    if outputs.entry is not None:
        entry = rows_states(plan, outputs.entry[:, None], inputs)[:, 0]
    return out, final, entry, residuals


def plan_forward(problem: Problem, inputs: Inputs) -> Plan:
    rows, heads, length, keys = inputs.q.shape
    total = round_up(rows * heads, 2)
    slots = 0 if inputs.initial_state is None else inputs.initial_state.shape[1]
    pieces = slots > 1 or inputs.default_initial_state is not None
    pieces |= problem.final_state is FinalState.ALL
    axis_name = None if problem.entry is Entry.GIVEN else problem.axis_name
    line = None if axis_name is None else rank_line(axis_name)
    pipelined = line is not None
    # Pieces: the columns of a group's rows serve both phases, so their groups are the same.
    group = largest_divisor(total // 2, PASS_PAIRS if pieces and pipelined else UNITS)
    chunks = largest_divisor(length // C, max(UNITS // group, 1))
    vmem, values = vmem_bytes(), round_up(inputs.v.shape[-1], LANES)
    out_bytes = total * length * values * inputs.q.dtype.itemsize
    in_vmem = line is not None and _rank_io_in_vmem(problem, out_bytes)
    return Plan(
        problem=problem,
        heads=total,
        heads_a_row=heads,
        tokens=length,
        keys=round_up(keys, LANES),
        values=values,
        dtype=inputs.q.dtype,
        decay_dtype=inputs.decay.dtype,
        group=group,
        chunks=chunks,
        slots=slots + 1 if pieces else slots,
        pieces=pieces,
        line=line,
        rank_io_in_vmem=in_vmem,
        vmem_limit=vmem * 7 // 8 - (out_bytes if in_vmem else 0),
        pass_pairs=largest_divisor(group, PASS_PAIRS) if pipelined else 0,
        pass_chunks=largest_divisor(length // C, 4) if pipelined else 1,
    )


def _rank_io_in_vmem(problem: Problem, out_bytes: int) -> bool:
    """Whether XLA may hold out (and d_out with d decay) in VMEM outside the kernels.

    Only between ranks, because XLA would otherwise copy them within HBM. Never on devices with two
    TensorCores (v4, v5p): the kernel writes one core's VMEM, and XLA's next operation would read
    stale data from the other's. The interpreter has no VMEM outside kernels.
    """
    if not problem.rank_io_in_vmem or not pltpu.is_tpu_device():
        return False
    one_core = pltpu.get_tpu_info().num_cores == 1
    return one_core and out_bytes * RANK_IO_SHARE <= vmem_bytes()


def forward_operands(
    plan: Plan, inputs: Inputs, segments: Segments, entry: jax.Array | None
) -> Operands:
    beta = guarded_beta(inputs, segments)
    operands = Operands(
        q=flat_heads(inputs.q, plan.keys),
        k=flat_heads(inputs.k, plan.keys),
        v=flat_heads(inputs.v, plan.values),
        decay=flat_heads(inputs.decay, plan.keys),
        rows=beta_rows(plan, beta),
        columns=token_columns(plan, beta, segments),
        gate=gate_rows(plan, inputs),
        starts=start_slots(plan, inputs),
        entry=None if entry is None else flat_states(plan, entry[:, None])[:, 0],
        pieces=tile_pieces(plan, segments) if plan.pieces else None,
        coords=None,
    )
    operands = vary(operands, varying_axes(operands))
    return operands if plan.line is None else operands._replace(coords=coordinates(plan.line))


def _final(plan: Plan, inputs: Inputs, segments: Segments, outputs):
    """This rank's part of the returned states: those of segments that end here, 0 elsewhere. The
    row's last segment ends at the row's end, on the last rank, which also returns the states of
    segments without tokens; any other segment ends where the next one starts."""
    if outputs.exit is None:
        return None
    last = jnp.where(
        is_last_rank(plan.problem), rows_states(plan, outputs.exit[:, None], inputs), 0.0
    )
    if outputs.finals is None:
        return last[:, 0]
    finals = rows_states(plan, outputs.finals, inputs)
    m = jnp.arange(plan.problem.max_segments)
    started = jnp.sum(segments.first, axis=1, keepdims=True)
    inner = (m + 1 >= segments.before) & (m + 1 < segments.before + started)
    wide = lambda mask: mask[..., None, None, None]  # noqa: E731
    initial = inputs.initial_state, inputs.default_initial_state
    starts = start_states(*initial, m.size, last[:, 0])
    out = jnp.where(wide(inner), finals, 0.0)
    out = jnp.where(wide(m == segments.count - 1), last, out)
    return with_empty_segments(plan.problem, segments, out, starts)
