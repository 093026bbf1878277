"""The attention mixer: full causal attention inside segments, without positions.

The baseline for KDA, and the fourth layer of a 3 : 1 pattern as in Kimi Linear. Kimi Linear uses
multi-head latent attention there; this is multi-head attention with grouped keys and values and
without the latent compression.

jit shards the projections. Attention runs in one `jax.shard_map`, with rows over `ROWS`, tokens
over "context" and heads over "tensor". Each rank gathers the row's keys and values, and ranks
exchange queries so that they have equal work under causality (kernels/attention).

Axes: B row, T token, D residual width, G key-value head, M token of the memory, d head channel.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels.attention import Memory, attention
from kernels.short_conv import split_heads
from model.axes import (
    CONTEXT,
    ROWS,
    TENSOR,
    TOKEN_SPEC,
    Arrays,
    MeshNeed,
    Specs,
    Tree,
    matrix,
    matrix_flops,
)
from model.config import ModelConfig
from model.layers import matmul
from model.mixers.protocol import Metrics, RowPlan

_CHANNEL_SPEC = PartitionSpec(ROWS, CONTEXT, TENSOR)  # [B, T, channels of all heads]
_KEYS_SPEC = PartitionSpec(ROWS, TENSOR, CONTEXT)  # [B, G, M, d]
_MEMORY_SPECS = (_KEYS_SPEC, _KEYS_SPEC, TOKEN_SPEC)


def param_specs(cfg: ModelConfig) -> Specs:
    """Projections of queries, keys, values and the output."""
    width, std = cfg.d_model, cfg.init_std
    queries = cfg.attention_heads * cfg.attention_head_dim
    keys = cfg.attention_kv_heads * cfg.attention_head_dim
    return {
        "q": matrix((width, queries), ("width", "heads"), std),
        "k": matrix((width, keys), ("width", "heads"), std),
        "v": matrix((width, keys), ("width", "heads"), std),
        "output": matrix((queries, width), ("heads", "width"), cfg.residual_std),
    }


def init_carry(cfg: ModelConfig, rows: int) -> Arrays:
    """See `init_memory`."""
    return init_memory(cfg, rows, cfg.attention_kv_heads, cfg.attention_head_dim)


def carry_specs(cfg: ModelConfig) -> Tree:
    """See `memory_specs`."""
    return memory_specs(cfg)


def init_memory(cfg: ModelConfig, rows: int, groups: int, size: int) -> Arrays:
    """An empty memory: {"k", "v": [B, G, M, d] in the compute dtype, "valid": [B, M] float32}.

    Tokens are in order, the last one at the end; valid is 1 if the token belongs to the last
    segment so far, else 0. {} without cfg.carry or cfg.attention_memory.
    """
    if not (cfg.carry and cfg.attention_memory):
        return {}
    shape = (rows, groups, cfg.attention_memory, size)
    keys = jnp.zeros(shape, cfg.compute_dtype)
    return {"k": keys, "v": keys, "valid": jnp.zeros((rows, cfg.attention_memory), jnp.float32)}


def memory_specs(cfg: ModelConfig) -> Tree:
    """Rows as the batch's, heads over tensor, tokens over context."""
    if not (cfg.carry and cfg.attention_memory):
        return {}
    return dict(zip(Memory._fields, _MEMORY_SPECS))


def reads_positions(cfg: ModelConfig) -> bool:
    """Never."""
    return False


def flops_per_token(cfg: ModelConfig) -> float:
    """The projections."""
    return matrix_flops(param_specs(cfg))


def flops_per_key(cfg: ModelConfig) -> float:
    """Scores and their values, all heads."""
    return 4.0 * cfg.attention_heads * cfg.attention_head_dim


def mesh_needs(cfg: ModelConfig) -> list[MeshNeed]:
    """Heads over tensor, carried tokens over context."""
    return [
        MeshNeed(TENSOR, "attention_heads", cfg.attention_heads),
        MeshNeed(TENSOR, "attention_kv_heads", cfg.attention_kv_heads),
        *memory_needs(cfg),
    ]


def memory_needs(cfg: ModelConfig) -> list[MeshNeed]:
    """Carried tokens over context."""
    return [MeshNeed(CONTEXT, "attention_memory", cfg.attention_memory)]


def forward(
    params: Arrays,
    cfg: ModelConfig,
    x: jax.Array,
    plan: RowPlan,
    carry: Arrays,
    entry: Arrays | None,
    mesh: Mesh,
) -> tuple[jax.Array, Arrays, Arrays, Metrics]:
    """Mixes x [B, T, D] along the tokens of each segment.

    Args:
        carry: as returned by `init_carry`. A row that continues also sees these keys and values,
            the last cfg.attention_memory tokens of its first segment; other rows see only
            themselves.

    Returns:
        y, the carry after these tokens, no entry (keys and values are gathered again when the layer
        is recomputed), and no metrics.
    """
    q, k, v = (matmul(x, params[name]) for name in ("q", "k", "v"))
    mixed, ends = attend((q, k, v), cfg.attention_head_dim, cfg, plan, carry, mesh)
    return matmul(mixed, params["output"]), ends, {}, {}


def attend(
    streams: tuple[jax.Array, jax.Array, jax.Array],
    size: int,
    cfg: ModelConfig,
    plan: RowPlan,
    carry: Arrays,
    mesh: Mesh,
) -> tuple[jax.Array, Arrays]:
    """Attention on each rank's rows, tokens and heads, and what `new_carry` needs.

    Args:
        streams: queries [B, T, H * d], keys and values [B, T, G * d]. size: d.

    Returns:
        [B, T, H * d] in the streams' dtype, and the memory after these tokens.
    """
    axis_name = CONTEXT if mesh.shape[CONTEXT] > 1 else None

    def on_rank(streams, segments, begin):
        q, k, v = (split_heads(y, y.shape[2] // size) for y in streams)
        memory = Memory(*begin) if begin else None
        out, end = attention(
            q, k, v, segments, memory=memory, axis_name=axis_name, block=cfg.attention_block
        )
        out = jnp.moveaxis(out, 1, 2).reshape(*segments.index.shape, -1)
        return out, {} if end is None else _floating(end)

    # The TPU kernels do not declare over which axes their results vary. All differentiated inputs
    # and all results name every axis, so nothing depends on that check.
    island = jax.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=(_CHANNEL_SPEC, TOKEN_SPEC, _MEMORY_SPECS if carry else ()),
        out_specs=(_CHANNEL_SPEC, memory_specs(cfg) if carry else {}),
        check_vma=False,
    )
    with jax.named_scope("attention"):
        mixed, end = island(streams, plan.segments, _begin(plan, carry))
    return mixed, end


def new_carry(cfg: ModelConfig, plan: RowPlan, carry: Arrays, ends: Arrays) -> Arrays:
    """The ends; a row that is all padding keeps its carry."""

    def merge(old: jax.Array, new: jax.Array) -> jax.Array:
        rows = plan.has_tokens.reshape(-1, *[1] * (old.ndim - 2))
        return jnp.where(rows, new.astype(old.dtype), old)

    return jax.tree.map(merge, carry, ends)


def _begin(plan: RowPlan, carry: Arrays) -> tuple[jax.Array, ...]:
    """The fields of each row's initial `Memory`; nothing is valid in rows that do not continue."""
    if not carry:
        return ()
    return carry["k"], carry["v"], (carry["valid"] > 0.5) & plan.continues[:, None]


def _floating(memory: Memory) -> Arrays:
    """The carried form: only floating-point numbers, since gradients have the carry's structure."""
    return {"k": memory.k, "v": memory.v, "valid": memory.valid.astype(jnp.float32)}
