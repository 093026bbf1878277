"""The attention mixer: full causal attention inside segments, without positions.

The baseline beside KDA, and the fourth layer of Kimi Linear's 3 : 1 pattern. Kimi Linear's own is
multi-head latent attention; this is plain multi-head attention with grouped keys and values, which
computes the same kind of mixing without the latent compression.

jit shards the projections; attention runs in one `jax.shard_map` island, rows over ("data",
"fsdp"), tokens over "context", heads over "tensor". There each rank gathers the row's keys and
values, and ranks exchange queries so that causality leaves them equal work (kernels/attention).

Axes: B row, T token, D residual width.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels.attention import attention
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

READS_POSITIONS = False
_CHANNEL_SPEC = PartitionSpec(ROWS, CONTEXT, TENSOR)  # [B, T, channels of all heads]


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
    """None: attention sees the current row only."""
    return {}


def carry_specs(cfg: ModelConfig) -> Tree:
    """None."""
    return {}


def flops_per_token(cfg: ModelConfig) -> float:
    """The projections."""
    return matrix_flops(param_specs(cfg))


def flops_per_key(cfg: ModelConfig) -> float:
    """Scores and their values, all heads."""
    return 4.0 * cfg.attention_heads * cfg.attention_head_dim


def mesh_needs(cfg: ModelConfig) -> list[MeshNeed]:
    """Heads over tensor."""
    return [
        MeshNeed(TENSOR, "attention_heads", cfg.attention_heads),
        MeshNeed(TENSOR, "attention_kv_heads", cfg.attention_kv_heads),
    ]


def forward(
    params: Arrays, cfg: ModelConfig, x: jax.Array, plan: RowPlan, carry: Arrays, mesh: Mesh
) -> tuple[jax.Array, Arrays, Metrics]:
    """Mixes x [B, T, D] along the tokens of each segment of this row -> [B, T, D].

    Attention keeps to the row: where a document continues from the last row, its tokens there are
    not seen (a KDA layer's state is carried instead).
    """
    streams = [matmul(x, params[name]) for name in ("q", "k", "v")]
    axis_name = CONTEXT if mesh.shape[CONTEXT] > 1 else None

    def attend(streams, segments):
        q, k, v = (split_heads(y, y.shape[2] // cfg.attention_head_dim) for y in streams)
        out, _ = attention(q, k, v, segments, axis_name=axis_name, block=cfg.attention_block)
        return jnp.moveaxis(out, 1, 2).reshape(*segments.index.shape, -1)

    # The TPU kernels do not say along which axes their results vary. Every axis is named by the
    # inputs that have a gradient and by the result, so nothing depends on that check.
    island = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(_CHANNEL_SPEC, TOKEN_SPEC),
        out_specs=_CHANNEL_SPEC,
        check_vma=False,
    )
    with jax.named_scope("attention"):
        return matmul(island(streams, plan.segments), params["output"]), carry, {}
