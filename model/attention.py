"""The attention mixer: full causal attention inside segments, without positions.

The baseline beside KDA, and the fourth layer of Kimi Linear's 3 : 1 pattern. Kimi Linear's own is
multi-head latent attention; this is plain multi-head attention with grouped keys and values, which
computes the same kind of mixing without the latent compression.

jit shards the projections; attention runs in one `jax.shard_map` island, rows over ("data",
"fsdp"), tokens over "context", heads over "tensor". There each rank gathers the row's keys and
values, and ranks exchange queries so that causality leaves them equal work (kernels/attention).

Axes: B row, T token, D residual width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels.attention import attention
from kernels.segments import Segments
from kernels.short_conv import split_heads
from model.config import ModelConfig
from model.layers import matmul
from model.sharding import CONTEXT, ROWS, TOKEN_SPEC

_CHANNEL_SPEC = PartitionSpec(ROWS, CONTEXT, "tensor")  # [B, T, channels of all heads]


def attention_mixer(
    params: dict[str, Any], cfg: ModelConfig, x: jax.Array, segments: Segments, mesh: Mesh
) -> jax.Array:
    """Mixes x [B, T, D] along the tokens of each segment of this row -> [B, T, D].

    Attention keeps to the row: where a document goes on from the last row, its tokens there are not
    seen (a KDA layer's state is carried instead).
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
        return matmul(island(streams, segments), params["output"])
