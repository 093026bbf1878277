"""The TPU backend: from `Inputs` to the kernels' layout and back.

Heads are flattened over rows of the batch (h = b * H + head), made even by a head of zeros, and K
and V are padded with zeros to multiples of 128: neither changes a result. What segments mean to a
token reaches the kernels as a clip of its log decay (`token_limits`), so packed documents need no
masks between tokens.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kernels.kda import forward as forward_kernel
from kernels.kda.exchange import coordinates, line_of
from kernels.kda.forward import Operands
from kernels.kda.pair_tiles import RESET, C
from kernels.kda.plan import Plan
from kernels.kda.problem import FinalState, Gate, Inputs, Problem
from kernels.kda.vma import vary, varying_axes
from kernels.segments import Segments

LANES = 128
UNITS = 16  # head pairs x chunks in lockstep: enough to hide a product's latency, see NOTES.md
WAVE = 4  # head pairs in lockstep where states pass between ranks: a message is theirs
BETA_FLOOR = 2.0**-48  # |beta| below it is raised to it: the backward divides by beta
FREE = 3e38  # no upper limit on a log decay


def forward(problem: Problem, inputs: Inputs, segments: Segments):
    """See problem.py. Residuals: (operands, outputs) of the kernel that the backward reads."""
    plan = plan_forward(problem, inputs)
    operands = forward_operands(plan, inputs, segments)
    outputs = forward_kernel.run(plan, operands)
    rows, heads, length, _ = inputs.q.shape
    values = inputs.v.shape[-1]
    out = outputs.out[: rows * heads].reshape(rows, heads, length, -1)[..., :values]
    final = _final(plan, inputs, segments, operands, outputs)
    residuals = (outputs.states, outputs.a, outputs.aqk, outputs.vn)
    return out, final, residuals


# --- sizes ----------------------------------------------------------------------------------------


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def largest_divisor(n: int, most: int) -> int:
    return max(d for d in range(1, min(n, most) + 1) if n % d == 0)


def vmem_bytes() -> int:
    """VMEM of one core of the TPU compiled for; a v7x core's when interpreting on a CPU."""
    if pltpu.is_tpu_device():
        return pltpu.get_tpu_info().vmem_capacity_bytes
    return 64 * 2**20


def plan_forward(problem: Problem, inputs: Inputs) -> Plan:
    rows, heads, length, keys = inputs.q.shape
    total = round_up(rows * heads, 2)
    slots = 0 if inputs.initial_state is None else inputs.initial_state.shape[1]
    pieces = slots > 1 or inputs.start_state is not None
    pieces |= problem.final_state is FinalState.ALL
    line = None if problem.axis_name is None else line_of(problem.axis_name)
    most = WAVE if pieces and line is not None else UNITS
    group = largest_divisor(total // 2, most)
    chunks = largest_divisor(length // C, max(most // group, 1))
    waves = line is not None and not pieces
    return Plan(
        problem=problem,
        heads=total,
        heads_a_row=heads,
        tokens=length,
        keys=round_up(keys, LANES),
        values=round_up(inputs.v.shape[-1], LANES),
        dtype=inputs.q.dtype,
        decay_dtype=inputs.decay.dtype,
        group=group,
        chunks=chunks,
        slots=slots + 1 if pieces else slots,
        pieces=pieces,
        line=line,
        vmem_limit=vmem_bytes() * 7 // 8,
        wave=largest_divisor(group, WAVE) if waves else 0,
        wave_chunks=largest_divisor(length // C, 4) if waves else 1,
    )


# --- layout ---------------------------------------------------------------------------------------


def flat_heads(x: jax.Array, width: int) -> jax.Array:
    """[B, H, T, D] -> [heads, T, width], zeros in a last odd head and in padded channels."""
    rows, heads, length, depth = x.shape
    x = x.reshape(rows * heads, length, depth)
    return jnp.pad(x, ((0, rows * heads % 2), (0, 0), (0, width - depth)))


def flat_states(plan: Plan, x: jax.Array) -> jax.Array:
    """[B, N, H, K, V] -> transposed [heads, N, V, K]."""
    rows, slots, heads, keys, values = x.shape
    x = jnp.transpose(x, (0, 2, 1, 4, 3)).reshape(rows * heads, slots, values, keys)
    odd = plan.heads - rows * heads
    return jnp.pad(x, ((0, odd), (0, 0), (0, plan.values - values), (0, plan.keys - keys)))


def start_states(plan: Plan, inputs: Inputs) -> jax.Array | None:
    """[heads, slots, V, K]; with pieces, the last slot is what all later segments start from."""
    initial, start = inputs.initial_state, inputs.start_state
    if plan.slots == 0:
        return None
    parts = [] if initial is None else [initial]
    if plan.pieces:
        rows, heads, _, keys = inputs.q.shape
        shape = (rows, 1, heads, keys, inputs.v.shape[-1])
        parts.append(jnp.zeros(shape) if start is None else jnp.broadcast_to(start, shape))
    return flat_states(plan, jnp.concatenate(parts, axis=1).astype(jnp.float32))


def guarded_beta(inputs: Inputs, segments: Segments) -> jax.Array:
    """[B, H, T] float32: beta kept away from 0 at real tokens, 0 at padding."""
    beta = inputs.beta.astype(jnp.float32)
    beta = jnp.where(jnp.abs(beta) < BETA_FLOOR, BETA_FLOOR, beta)
    return jnp.where(segments.valid[:, None], beta, 0.0)


def beta_rows(plan: Plan, beta: jax.Array) -> jax.Array:
    """[B, H, T] -> [N, pairs, 2C], lanes (head, token)."""
    flat = flat_heads(beta[..., None], 1)[..., 0]
    tiled = flat.reshape(plan.heads // 2, 2, plan.tokens // C, C)
    return jnp.transpose(tiled, (2, 0, 1, 3)).reshape(-1, plan.heads // 2, 2 * C)


def token_limits(segments: Segments) -> tuple[jax.Array, jax.Array]:
    """[B, T] float32 each: the log decay is clipped to [low, high], which leaves it alone, makes it
    0 (padding) or RESET (a segment starts behind another)."""
    valid, start = segments.valid, later_starts(segments)
    low = jnp.where(valid, RESET, 0.0)
    high = jnp.where(start, RESET, jnp.where(valid, FREE, 0.0))
    return low, high


def later_starts(segments: Segments) -> jax.Array:
    """[B, T] bool: first tokens of all segments but the row's first."""
    return segments.first & (segments.index > 0)


def token_pieces(segments: Segments) -> jax.Array:
    """[B, N, C] int32: how many later segments start in the tile up to and with the token."""
    rows, length = segments.index.shape
    starts = later_starts(segments).reshape(rows, length // C, C)
    return jnp.cumsum(starts, axis=-1, dtype=jnp.int32)


def token_columns(plan: Plan, beta: jax.Array, segments: Segments) -> jax.Array:
    """[groups, T, lanes] float32 columns of `forward.Operands`."""
    flat = flat_heads(beta[..., None], 1)[..., 0]
    parts = [jnp.swapaxes(flat.reshape(plan.groups, plan.group_heads, plan.tokens), 1, 2)]
    low, high = token_limits(segments)
    facts = [low, high, segments.valid.astype(jnp.float32)]
    if plan.pieces:
        piece = token_pieces(segments).reshape(low.shape)
        facts.append(jnp.where(segments.valid, piece, -1).astype(jnp.float32))
    of_group = rows_of_groups(plan, segments.index.shape[0])
    for fact in facts:
        parts.append(jnp.swapaxes(fact[of_group], 1, 2))
    return jnp.concatenate(parts, axis=-1)


def rows_of_groups(plan: Plan, rows: int) -> list[list[int]]:
    """[groups, group rows]: the batch's row behind each row that a group's columns name."""
    firsts = [plan.row_of_head.index(r) for r in range(plan.group_rows)]
    heads = [[g * plan.group_heads + i for i in firsts] for g in range(plan.groups)]
    table = [[min(h // plan.heads_a_row, rows - 1) for h in group] for group in heads]
    return jnp.asarray(table, jnp.int32)


def tile_pieces(plan: Plan, segments: Segments) -> jax.Array:
    """[groups, N, 1 + 2 rows] int32 of `forward.Operands`."""
    rows, length = segments.index.shape
    counts = token_pieces(segments)[..., -1] + 1  # [B, N]
    starts = jnp.where(later_starts(segments), segments.index, jnp.iinfo(jnp.int32).max)
    base = jnp.min(starts.reshape(rows, length // C, C), axis=-1) - 1
    of_group = rows_of_groups(plan, rows)
    counts, base = (jnp.swapaxes(x[of_group], 1, 2) for x in (counts, base))
    return jnp.concatenate([jnp.max(counts, axis=-1, keepdims=True), counts, base], axis=-1)


def gate_rows(plan: Plan, inputs: Inputs) -> jax.Array | None:
    """[2, groups, group heads, K] float32: exp(a_log) and dt_bias of every flattened head."""
    if plan.problem.gate is Gate.GIVEN:
        return None
    rows, heads, _, keys = inputs.q.shape
    rate = jnp.broadcast_to(jnp.exp(inputs.a_log)[:, None], (heads, keys))
    both = jnp.broadcast_to(jnp.stack([rate, inputs.dt_bias])[:, None], (2, rows, heads, keys))
    flat = both.reshape(2, rows * heads, keys)
    pad = ((0, 0), (0, plan.heads - rows * heads), (0, plan.keys - keys))
    return jnp.pad(flat, pad).reshape(2, plan.groups, plan.group_heads, plan.keys)


def forward_operands(plan: Plan, inputs: Inputs, segments: Segments) -> Operands:
    beta = guarded_beta(inputs, segments)
    operands = Operands(
        q=flat_heads(inputs.q, plan.keys),
        k=flat_heads(inputs.k, plan.keys),
        v=flat_heads(inputs.v, plan.values),
        decay=flat_heads(inputs.decay, plan.keys),
        rows=beta_rows(plan, beta),
        columns=token_columns(plan, beta, segments),
        gate=gate_rows(plan, inputs),
        starts=start_states(plan, inputs),
        pieces=tile_pieces(plan, segments) if plan.pieces else None,
        coords=None,
    )
    operands = vary(operands, varying_axes(operands))
    return operands if plan.line is None else operands._replace(coords=coordinates(plan.line))


# --- states out -----------------------------------------------------------------------------------


def rows_states(plan: Plan, x: jax.Array, inputs: Inputs) -> jax.Array:
    """Transposed [heads, N, V, K] -> [B, N, H, K, V] without padding."""
    rows, heads, _, keys = inputs.q.shape
    x = x[: rows * heads, :, : inputs.v.shape[-1], :keys]
    return jnp.transpose(x.reshape(rows, heads, *x.shape[1:]), (0, 2, 1, 4, 3))


def last_rank(plan: Plan):
    if plan.line is None:
        return True
    return jax.lax.axis_index(plan.problem.axis_name) == plan.line.size - 1


def _final(plan: Plan, inputs: Inputs, segments: Segments, operands, outputs):
    """This rank's part of the returned states: what ends here, 0 elsewhere. The row's last segment
    ends at the row's end, on the last rank, which also returns the states of segments without
    tokens; any other one ends where the next one starts."""
    if outputs.exit is None:
        return None
    last = jnp.where(last_rank(plan), rows_states(plan, outputs.exit[:, None], inputs), 0.0)
    if outputs.finals is None:
        return last[:, 0]
    finals = rows_states(plan, outputs.finals, inputs)
    m = jnp.arange(plan.problem.max_segments)
    starts = rows_states(plan, operands.starts, inputs)[:, jnp.minimum(m, plan.slots - 1)]
    started = jnp.sum(segments.first, axis=1, keepdims=True)
    inner = (m + 1 >= segments.before) & (m + 1 < segments.before + started)
    wide = lambda mask: mask[..., None, None, None]  # noqa: E731
    out = jnp.where(wide(inner), finals, 0.0)
    out = jnp.where(wide(m == segments.count - 1), last, out)
    return jnp.where(wide((m >= segments.count) & last_rank(plan)), starts, out)
