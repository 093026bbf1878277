"""The TPU backend's backward: converts residuals and cotangents to the kernel's layout, and its
gradients back. See layout.py for the layout."""

import dataclasses

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kernels.kda.final_states import is_last_rank
from kernels.kda.problem import Entry, FinalState, Inputs, Problem
from kernels.kda.tpu import backward_kernel
from kernels.kda.tpu.backward_kernel import Operands, Outputs
from kernels.kda.tpu.forward_call import plan_forward
from kernels.kda.tpu.layout import (
    flat_heads,
    flat_states,
    gate_rows,
    guarded_beta,
    rows_states,
    start_slots,
    tile_pieces,
    token_columns,
)
from kernels.kda.tpu.plan import Plan
from kernels.kda.tpu.relay import coordinates
from kernels.segments import Segments
from kernels.vma import vary, varying_axes

PAIRS = 16  # head pairs in lockstep: enough to hide a product's latency, see NOTES.md
PAIRS_BETWEEN_RANKS = 8
FEWEST_PAIRS = 4  # with fewer, latency costs more than keeping the pass's results in HBM


def backward(problem: Problem, inputs: Inputs, segments: Segments, residuals, d_out, d_final):
    """See problem.py; residuals are those of `forward`."""
    plan = plan_backward(problem, inputs)
    operands = backward_operands(plan, inputs, segments, residuals, d_out, d_final)
    outputs = backward_kernel.run(plan, operands)
    return _gradients(plan, inputs, segments, outputs, d_final)


def plan_backward(problem: Problem, inputs: Inputs) -> Plan:
    """The forward's plan with other groups. Between ranks there are at least two, so that a
    neighbour waits only for the first group's cotangent pass. If possible they are small enough to
    keep the results of the cotangent pass in VMEM."""
    plan = plan_forward(dataclasses.replace(problem, entry=Entry.UNUSED), inputs)
    pairs = plan.heads // 2
    most = PAIRS if plan.line is None else min(PAIRS_BETWEEN_RANKS, pairs // 2)
    if plan.dtype == jnp.float32:
        most = most // 2
    sizes = [n for n in range(1, max(most, 1) + 1) if pairs % n == 0]
    plans = [dataclasses.replace(plan, group=n, chunks=1) for n in reversed(sizes)]
    if plan.line is None:
        return plans[0]
    small = [p for p in plans if p.group >= FEWEST_PAIRS and backward_kernel.fits_vmem(p)]
    return small[0] if small else plans[0]


def backward_operands(
    plan: Plan, inputs: Inputs, segments: Segments, residuals, d_out, d_final
) -> Operands:
    states, matrices, v_new = residuals
    d_exit, d_finals = _exit_cotangents(plan, segments, d_final)
    operands = Operands(
        q=flat_heads(inputs.q, plan.keys),
        k=flat_heads(inputs.k, plan.keys),
        v=flat_heads(inputs.v, plan.values),
        decay=flat_heads(inputs.decay, plan.keys),
        d_out=flat_heads(d_out.astype(plan.dtype), plan.values),
        states=states,
        matrices=matrices,
        v_new=v_new,
        columns=token_columns(plan, guarded_beta(inputs, segments), segments),
        gate=gate_rows(plan, inputs),
        starts=start_slots(plan, inputs),
        d_exit=d_exit,
        d_finals=d_finals,
        pieces=tile_pieces(plan, segments) if plan.pieces else None,
        coords=None,
    )
    operands = vary(operands, varying_axes(operands))
    if plan.rank_io_in_vmem:
        d_out = pltpu.with_memory_space_constraint(operands.d_out, pltpu.VMEM)
        operands = operands._replace(d_out=d_out)
    # The coordinates vary over all mesh axes, the gradients only over those of the other operands.
    return operands._replace(coords=None if plan.line is None else coordinates(plan.line))


def _exit_cotangents(plan: Plan, segments: Segments, d_final):
    """Cotangents of (the states at the row's end [heads, V, K], the earlier segments' final states
    [heads, M, V, K])."""
    if d_final is None:
        return None, None
    if plan.problem.final_state is FinalState.LAST:
        return flat_states(plan, d_final[:, None])[:, 0], None
    last = jnp.clip(segments.count - 1, 0, d_final.shape[1] - 1)[..., None, None, None]
    d_last = jnp.take_along_axis(d_final, last, axis=1)
    d_last = jnp.where(segments.count[..., None, None, None] > 0, d_last, 0.0)
    return flat_states(plan, d_last)[:, 0], flat_states(plan, d_final)


def _gradients(plan: Plan, inputs: Inputs, segments: Segments, outputs: Outputs, d_final) -> Inputs:
    rows, heads, length, _ = inputs.q.shape

    def unflat(x, like):
        return x[: rows * heads].reshape(rows, heads, length, -1)[..., : like.shape[-1]]

    beta = jnp.swapaxes(outputs.beta, 1, 2).reshape(plan.heads, length)
    initial, start = _start_gradients(plan, inputs, segments, outputs.starts, d_final)
    a_log, dt_bias = _gate_gradients(inputs, outputs.gate)
    return Inputs(
        q=unflat(outputs.q, inputs.q),
        k=unflat(outputs.k, inputs.k),
        v=unflat(outputs.v, inputs.v),
        decay=unflat(outputs.decay, inputs.decay),
        beta=beta[: rows * heads].reshape(rows, heads, length).astype(inputs.beta.dtype),
        initial_state=initial,
        default_initial_state=start,
        a_log=a_log,
        dt_bias=dt_bias,
    )


def _start_gradients(plan: Plan, inputs: Inputs, segments: Segments, d_starts, d_final):
    """Gradients of initial_state and default_initial_state. A segment without tokens returns its
    start state unchanged, so its cotangent is added here, on one rank only."""
    if d_starts is None:
        return None, None
    slots = rows_states(plan, d_starts, inputs)
    if plan.problem.final_state is FinalState.ALL:
        m = jnp.arange(d_final.shape[1])
        empty = (m >= segments.count) & is_last_rank(plan.problem)
        direct = jnp.where(empty[..., None, None, None], d_final, 0.0)
        slots = slots.at[:, jnp.minimum(m, plan.slots - 1)].add(direct)
    given = 0 if inputs.initial_state is None else inputs.initial_state.shape[1]
    initial = None if inputs.initial_state is None else slots[:, :given]
    start = None if inputs.default_initial_state is None else jnp.sum(slots[:, -1], axis=0)
    return initial, start


def _gate_gradients(inputs: Inputs, parts):
    """Gradients of a_log [H] and dt_bias [H, K] from the kernel's partial sums."""
    if parts is None:
        return None, None
    rows, heads, _, keys = inputs.q.shape
    sums = jnp.sum(parts[:, : rows * heads, :, :keys], axis=2)
    sums = jnp.sum(sums.reshape(2, rows, heads, keys), axis=1)
    return jnp.sum(sums[0], axis=-1), sums[1]
