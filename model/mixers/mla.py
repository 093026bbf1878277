"""Multi-head latent attention without positions, as in Kimi Linear.

x -> queries; x -> a latent, normed and expanded to each head's keys and values, and a second part
of the keys that all heads share -> attention (model/mixers/attention.py) -> output projection. The
shared part is the one to which other models apply a rotation, hence "rope"; here nothing does.

The attention implementation has a single head size, so values are padded with zeros to that of the
keys. At Kimi Linear's sizes (192 and 128), products with values, and carried values, cost 1.5 times
as much. The carry holds expanded keys and values, not the latent.

Axes: B row, T token, D residual width, H head.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from model.axes import TENSOR, Arrays, MeshNeed, Specs, Tree, gain, matrix, matrix_flops
from model.config import ModelConfig
from model.layers import matmul, rms_norm_by_copies
from model.mixers import attention
from model.mixers.attention import attend, init_memory, memory_needs, memory_specs
from model.mixers.protocol import Metrics, RowPlan

READS_POSITIONS = False
_LATENT_NORM_EPS = 1e-6  # as in Kimi Linear, whatever the epsilon of its other norms


def param_specs(cfg: ModelConfig) -> Specs:
    """Matrices are normal with init_std; columns of queries are ordered (H, nope then rope)."""
    width, rank, std = cfg.d_model, cfg.mla_kv_rank, cfg.init_std
    heads, values = cfg.mla_heads, cfg.mla_heads * cfg.mla_value_dim
    expanded = heads * (cfg.mla_nope_dim + cfg.mla_value_dim)
    return {
        "q": matrix((width, heads * _key_size(cfg)), ("width", "heads"), std),
        "kv_down": matrix((width, rank + cfg.mla_rope_dim), ("width", "whole"), std),
        "kv_norm": gain(rank),
        "kv_up": matrix((rank, expanded), ("kv_rank", "heads"), std),
        "output": matrix((values, width), ("heads", "width"), cfg.residual_std),
    }


def init_carry(cfg: ModelConfig, rows: int) -> Arrays:
    """See `attention.init_memory`."""
    return init_memory(cfg, rows, cfg.mla_heads, _key_size(cfg))


def carry_specs(cfg: ModelConfig) -> Tree:
    """See `attention.memory_specs`."""
    return memory_specs(cfg)


def flops_per_token(cfg: ModelConfig) -> float:
    """The projections."""
    return matrix_flops(param_specs(cfg))


def flops_per_key(cfg: ModelConfig) -> float:
    """Scores and their values, all heads, without the values' padding."""
    return 2.0 * cfg.mla_heads * (_key_size(cfg) + cfg.mla_value_dim)


def mesh_needs(cfg: ModelConfig) -> list[MeshNeed]:
    """Heads over tensor, carried tokens over context."""
    return [MeshNeed(TENSOR, "mla_heads", cfg.mla_heads), *memory_needs(cfg)]


def forward(
    params: Arrays,
    cfg: ModelConfig,
    x: jax.Array,
    plan: RowPlan,
    carry: Arrays,
    entry: Arrays | None,
    mesh: Mesh,
) -> tuple[jax.Array, Arrays, Arrays, Metrics]:
    """Mixes x [B, T, D] along the tokens of each segment. See `protocol.Mixer`."""
    streams = (matmul(x, params["q"]), *_keys_and_values(params, cfg, x, mesh))
    mixed, ends = attend(streams, _key_size(cfg), cfg, plan, carry, mesh)
    heads = mixed.reshape(*x.shape[:2], cfg.mla_heads, _key_size(cfg))[..., : cfg.mla_value_dim]
    return matmul(heads.reshape(*x.shape[:2], -1), params["output"]), ends, {}, {}


def new_carry(cfg: ModelConfig, plan: RowPlan, carry: Arrays, ends: Arrays) -> Arrays:
    """See `attention.new_carry`."""
    return attention.new_carry(cfg, plan, carry, ends)


def _keys_and_values(
    params: Arrays, cfg: ModelConfig, x: jax.Array, mesh: Mesh
) -> tuple[jax.Array, jax.Array]:
    """Keys, and values padded to the keys' size: [B, T, H * key size] each."""
    heads = (*x.shape[:2], cfg.mla_heads)
    latent, shared = jnp.split(matmul(x, params["kv_down"]), [cfg.mla_kv_rank], axis=-1)
    latent = rms_norm_by_copies(latent, params["kv_norm"], _LATENT_NORM_EPS, mesh)
    expanded = matmul(latent, params["kv_up"]).reshape(*heads, -1)
    keys, values = jnp.split(expanded, [cfg.mla_nope_dim], axis=-1)
    shared = jnp.broadcast_to(shared[:, :, None], (*heads, cfg.mla_rope_dim))
    keys = jnp.concatenate([keys, shared], axis=-1)
    padding = _key_size(cfg) - cfg.mla_value_dim
    values = jnp.pad(values, [(0, 0)] * 3 + [(0, padding)])
    return keys.reshape(*x.shape[:2], -1), values.reshape(*x.shape[:2], -1)


def _key_size(cfg: ModelConfig) -> int:
    """Channels of a head's queries and keys."""
    return cfg.mla_nope_dim + cfg.mla_rope_dim
