"""The layout of both TPU kernels: conversion from `Inputs` and `Segments` and back.

Heads are flattened over the batch rows (h = b * H + head), with a head of zeros appended if their
number is odd, and K and V are padded with zeros to multiples of 128. Neither changes a result.
Segments reach the kernels as bounds to which each token's log decay is clipped (`token_limits`), so
packed documents need no masks between tokens.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kernels.kda.problem import Gate, Inputs
from kernels.kda.tpu.pair_tiles import RESET, C
from kernels.kda.tpu.plan import Plan
from kernels.segments import Segments

BETA_FLOOR = 2.0**-32  # smaller |beta| is replaced by it: the backward divides by beta
FREE = 3e38  # no upper limit on a log decay


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def largest_divisor(n: int, most: int) -> int:
    return max(d for d in range(1, min(n, most) + 1) if n % d == 0)


def vmem_bytes() -> int:
    """VMEM of one core of the target TPU; when interpreting on a CPU, that of a v7x core."""
    if pltpu.is_tpu_device():
        return pltpu.get_tpu_info().vmem_capacity_bytes
    return 64 * 2**20


def flat_heads(x: jax.Array, width: int) -> jax.Array:
    """[B, H, T, D] -> [heads, T, width], zeros in the appended head and in padded channels."""
    rows, heads, length, depth = x.shape
    x = x.reshape(rows * heads, length, depth)
    return jnp.pad(x, ((0, rows * heads % 2), (0, 0), (0, width - depth)))


def flat_states(plan: Plan, x: jax.Array) -> jax.Array:
    """[B, N, H, K, V] -> transposed [heads, N, V, K]."""
    rows, slots, heads, keys, values = x.shape
    x = jnp.transpose(x, (0, 2, 1, 4, 3)).reshape(rows * heads, slots, values, keys)
    odd = plan.heads - rows * heads
    return jnp.pad(x, ((0, odd), (0, 0), (0, plan.values - values), (0, plan.keys - keys)))


def start_slots(plan: Plan, inputs: Inputs) -> jax.Array | None:
    """[heads, slots, V, K]; with pieces, the last slot is the start state of all later segments."""
    initial, start = inputs.initial_state, inputs.default_initial_state
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
    """[B, T] float32 each: the log decay is clipped to [low, high], which leaves it unchanged, sets
    it to 0 (padding) or to RESET (at the start of a later segment)."""
    valid, start = segments.valid, later_starts(segments)
    low = jnp.where(valid, RESET, 0.0)
    high = jnp.where(start, RESET, jnp.where(valid, FREE, 0.0))
    return low, high


def later_starts(segments: Segments) -> jax.Array:
    """[B, T] bool: first tokens of all segments but the row's first."""
    return segments.first & (segments.index > 0)


def token_pieces(segments: Segments) -> jax.Array:
    """[B, N, C] int32: how many later segments start in the chunk up to and including the token."""
    rows, length = segments.index.shape
    starts = later_starts(segments).reshape(rows, length // C, C)
    return jnp.cumsum(starts, axis=-1, dtype=jnp.int32)


def token_columns(plan: Plan, beta: jax.Array, segments: Segments) -> jax.Array:
    """[groups, T, lanes] float32: `columns` of `forward_kernel.Operands`."""
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


def rows_of_groups(plan: Plan, rows: int) -> jax.Array:
    """[groups, group rows] int32: the batch row of each row of a group's columns."""
    firsts = [plan.row_of_head.index(r) for r in range(plan.group_rows)]
    heads = [[g * plan.group_heads + i for i in firsts] for g in range(plan.groups)]
    table = [[min(h // plan.heads_a_row, rows - 1) for h in group] for group in heads]
    return jnp.asarray(table, jnp.int32)


def tile_pieces(plan: Plan, segments: Segments) -> jax.Array:
    """[groups, 1 + 2 rows, N] int32: `pieces` of `forward_kernel.Operands`."""
    rows, length = segments.index.shape
    counts = token_pieces(segments)[..., -1] + 1  # [B, N]
    starts = jnp.where(later_starts(segments), segments.index, jnp.iinfo(jnp.int32).max)
    base = jnp.min(starts.reshape(rows, length // C, C), axis=-1) - 1
    of_group = rows_of_groups(plan, rows)
    counts, base = counts[of_group], base[of_group]
    return jnp.concatenate([jnp.max(counts, axis=1, keepdims=True), counts, base], axis=1)


def gate_rows(plan: Plan, inputs: Inputs) -> jax.Array | None:
    """[2, groups, group heads, K] float32: exp(a_log) and dt_bias of every flattened head."""
    if plan.problem.gate is Gate.GIVEN:
        return None
    assert inputs.a_log is not None and inputs.dt_bias is not None
    rows, heads, _, keys = inputs.q.shape
    rate = jnp.broadcast_to(jnp.exp(inputs.a_log)[:, None], (heads, keys))
    both = jnp.broadcast_to(jnp.stack([rate, inputs.dt_bias])[:, None], (2, rows, heads, keys))
    flat = both.reshape(2, rows * heads, keys)
    pad = ((0, 0), (0, plan.heads - rows * heads), (0, plan.keys - keys))
    return jnp.pad(flat, pad).reshape(2, plan.groups, plan.group_heads, plan.keys)


def rows_states(plan: Plan, x: jax.Array, inputs: Inputs) -> jax.Array:
    """Transposed [heads, N, V, K] -> [B, N, H, K, V] without padding."""
    rows, heads, _, keys = inputs.q.shape
    x = x[: rows * heads, :, : inputs.v.shape[-1], :keys]
    return jnp.transpose(x.reshape(rows, heads, *x.shape[1:]), (0, 2, 1, 4, 3))
