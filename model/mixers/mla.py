"""Multi-head latent attention, as in Kimi Linear, or with rotary positions and an output gate.

x -> queries; x -> a latent, normed and expanded to each head's keys and values, and a second part
of the keys that all heads share -> attention (model/mixers/attention.py) -> optional gate -> output
projection.

With cfg.mla_output_gate, each head's result is multiplied by one sigmoid per token, as in
transformers' `bailing_hybrid`. With cfg.mla_rotation_base, the shared part of the keys and the
channels of the queries that meet it ("rope") are rotated by the token's position in its document.
Kimi Linear has no rotation. Scores depend only on differences of positions, so carried keys keep
the rotation that they have. Angles are float32: their error is about 6e-8 of the position, 0.06
radians after a million tokens.

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

_LATENT_NORM_EPS = 1e-6  # as in Kimi Linear, whatever the epsilon of its other norms


def param_specs(cfg: ModelConfig) -> Specs:
    """Matrices are normal with init_std; columns of queries are ordered (H, nope then rope)."""
    width, rank, std = cfg.d_model, cfg.mla_kv_rank, cfg.init_std
    heads, values = cfg.mla_heads, cfg.mla_heads * cfg.mla_value_dim
    expanded = heads * (cfg.mla_nope_dim + cfg.mla_value_dim)
    specs = {
        "q": matrix((width, heads * _key_size(cfg)), ("width", "heads"), std),
        "kv_down": matrix((width, rank + cfg.mla_rope_dim), ("width", "whole"), std),
        "kv_norm": gain(rank),
        "kv_up": matrix((rank, expanded), ("kv_rank", "heads"), std),
        "output": matrix((values, width), ("heads", "width"), cfg.residual_std),
    }
    if cfg.mla_output_gate:
        specs["output_gate"] = matrix((width, heads), ("width", "heads"), std)
    return specs


def init_carry(cfg: ModelConfig, rows: int) -> Arrays:
    """See `attention.init_memory`."""
    return init_memory(cfg, rows, cfg.mla_heads, _key_size(cfg))


def carry_specs(cfg: ModelConfig) -> Tree:
    """See `attention.memory_specs`."""
    return memory_specs(cfg)


def reads_positions(cfg: ModelConfig) -> bool:
    """With rotation."""
    return cfg.mla_rotation_base > 0


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
    queries = _queries(params, cfg, x, plan.positions)
    streams = queries, *_keys_and_values(params, cfg, x, plan.positions, mesh)
    mixed, ends = attend(streams, _key_size(cfg), cfg, plan, carry, mesh)
    heads = mixed.reshape(*x.shape[:2], cfg.mla_heads, _key_size(cfg))[..., : cfg.mla_value_dim]
    if cfg.mla_output_gate:
        gate = jax.nn.sigmoid(matmul(x, params["output_gate"], out_dtype=jnp.float32))
        heads = heads * gate[..., None].astype(heads.dtype)
    return matmul(heads.reshape(*x.shape[:2], -1), params["output"]), ends, {}, {}


def new_carry(cfg: ModelConfig, plan: RowPlan, carry: Arrays, ends: Arrays) -> Arrays:
    """See `attention.new_carry`."""
    return attention.new_carry(cfg, plan, carry, ends)


def _queries(
    params: Arrays, cfg: ModelConfig, x: jax.Array, positions: jax.Array | None
) -> jax.Array:
    """[B, T, H * key size]."""
    queries = matmul(x, params["q"])
    if not reads_positions(cfg):
        return queries
    heads = queries.reshape(*x.shape[:2], cfg.mla_heads, -1)
    own, shared = jnp.split(heads, [cfg.mla_nope_dim], axis=-1)
    rotated = rotate(shared, positions, cfg.mla_rotation_base)
    return jnp.concatenate([own, rotated], axis=-1).reshape(queries.shape)


def rotate(x: jax.Array, positions: jax.Array | None, base: float) -> jax.Array:
    """Rotates channels i and i + R/2 of x [B, T, H, R] by positions [B, T] * base^(-2i/R)."""
    assert positions is not None, "decoder.forward requires positions for these layers"
    half = x.shape[-1] // 2
    rates = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, :, None, None] * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, first * sin + second * cos]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _keys_and_values(
    params: Arrays, cfg: ModelConfig, x: jax.Array, positions: jax.Array | None, mesh: Mesh
) -> tuple[jax.Array, jax.Array]:
    """Keys, and values padded to the keys' size: [B, T, H * key size] each."""
    heads = (*x.shape[:2], cfg.mla_heads)
    latent, shared = jnp.split(matmul(x, params["kv_down"]), [cfg.mla_kv_rank], axis=-1)
    latent = rms_norm_by_copies(latent, params["kv_norm"], _LATENT_NORM_EPS, mesh)
    expanded = matmul(latent, params["kv_up"]).reshape(*heads, -1)
    keys, values = jnp.split(expanded, [cfg.mla_nope_dim], axis=-1)
    shared = shared[:, :, None]
    if reads_positions(cfg):
        shared = rotate(shared, positions, cfg.mla_rotation_base)
    shared = jnp.broadcast_to(shared, (*heads, cfg.mla_rope_dim))
    keys = jnp.concatenate([keys, shared], axis=-1)
    padding = _key_size(cfg) - cfg.mla_value_dim
    values = jnp.pad(values, [(0, 0)] * 3 + [(0, padding)])
    return keys.reshape(*x.shape[:2], -1), values.reshape(*x.shape[:2], -1)


def _key_size(cfg: ModelConfig) -> int:
    """Channels of a head's queries and keys."""
    return cfg.mla_nope_dim + cfg.mla_rope_dim
