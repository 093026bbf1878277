"""The Kimi Delta Attention mixer, layer for layer what transformers' `kimi_linear` computes.

x -> q, k, v projections -> causal depthwise convolution and SiLU -> KDA with l2-normalised q and k,
a low-rank decay gate and a sigmoid beta -> RMS norm of each head, gated by a low-rank sigmoid ->
output projection. No biases.

jit shards the projections; convolution and KDA run in one `jax.shard_map` island, rows over
("data", "fsdp"), tokens over "context", heads over "tensor".

Axes: B row, T token, D residual width, H head, K key channel, V value channel, W convolution taps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels.kda import kda
from kernels.segments import Segments
from kernels.short_conv import short_conv, split_heads
from model.config import ModelConfig
from model.layers import gated_rms_norm, matmul, vary
from model.sharding import CONTEXT, ROWS, TOKEN_SPEC

Arrays = dict[str, Any]
STREAMS = ("q", "k", "v")

CHANNEL_SPEC = PartitionSpec(ROWS, CONTEXT, "tensor")  # [B, T, channels of all heads]
STATE_SPEC = PartitionSpec(ROWS, "tensor")  # [B, H, K, V]
TAIL_SPEC = PartitionSpec(ROWS, None, "tensor")  # [B, W - 1, channels of all heads]
_HEAD_SPEC = PartitionSpec("tensor")  # [H, ...]
_TAP_SPEC = PartitionSpec(None, "tensor")  # [W, channels of all heads]


class RowPlan(NamedTuple):
    """What a batch's rows mean for every layer; depends on the ids and flags alone.

    segments: see kernels.segments. continues: [B] bool, the row's first segment goes on from the
    carry. has_tokens: [B] bool, the row is not all padding.
    """

    segments: Segments
    continues: jax.Array
    has_tokens: jax.Array


def kda_mixer(
    params: Arrays, cfg: ModelConfig, x: jax.Array, plan: RowPlan, carry: Arrays, mesh: Mesh
) -> tuple[jax.Array, Arrays]:
    """Mixes x [B, T, D] along the tokens of each segment.

    Args:
        params: this layer's parameters, matrices in the compute dtype and the rest float32.
        carry: {"state": [B, H, K, V] float32, "conv": {"q", "k", "v"} [B, W - 1, channels]} at the
            end of each row's last segment so far. Ignored unless cfg.carry.

    Returns:
        [B, T, D] in x's dtype, and the carry after these tokens.
    """
    streams = {name: matmul(x, params[name]) for name in STREAMS}
    decay = matmul(matmul(x, params["decay_a"]), params["decay_b"])
    beta = jax.nn.sigmoid(matmul(x, params["beta"], out_dtype=jnp.float32))
    begin = _begin(params, cfg, plan, carry) if cfg.carry else {}
    mixed, end = _island(cfg, mesh)(
        _island_params(params, cfg), streams, decay, beta, plan.segments, begin
    )
    gate = matmul(matmul(x, params["output_gate_a"]), params["output_gate_b"])
    heads = (*x.shape[:2], cfg.kda_heads, cfg.value_dim)
    normed = gated_rms_norm(
        mixed.reshape(heads), gate.reshape(heads), params["output_norm"], cfg.norm_eps
    )
    y = matmul(normed.reshape(mixed.shape), params["output"])
    return y, _end(plan, carry, end) if cfg.carry else carry


def init_kda_carry(cfg: ModelConfig, rows: int) -> Arrays:
    """The carry of one layer before any token: zeros. Convolution inputs have the compute dtype."""
    state = jnp.zeros((rows, cfg.kda_heads, cfg.key_dim, cfg.value_dim), jnp.float32)
    channels = {"q": cfg.key_dim, "k": cfg.key_dim, "v": cfg.value_dim}
    conv = {
        name: jnp.zeros((rows, cfg.conv_kernel_size - 1, cfg.kda_heads * size), cfg.compute_dtype)
        for name, size in channels.items()
    }
    return {"state": state, "conv": conv}


def _begin(params: Arrays, cfg: ModelConfig, plan: RowPlan, carry: Arrays) -> Arrays:
    """What each row's first segment starts from: the carry where it continues, else afresh."""
    fresh = params["start_state"] if cfg.learned_initial_state else 0.0
    state = jnp.where(plan.continues[:, None, None, None], carry["state"], fresh)
    tails = {
        name: jnp.where(plan.continues[:, None, None], tail, 0)
        for name, tail in carry["conv"].items()
    }
    return {"state": state, "conv": tails}


def _end(plan: RowPlan, carry: Arrays, end: Arrays) -> Arrays:
    """The carry after a batch: a row of only padding hands on what it was given."""

    def merge(old, new):
        rows = plan.has_tokens.reshape(-1, *[1] * (old.ndim - 1))
        return jnp.where(rows, new, old)

    return jax.tree.map(merge, carry, end)


def _island_params(params: Arrays, cfg: ModelConfig) -> Arrays:
    names = ["q_conv", "k_conv", "v_conv", "a_log", "dt_bias"]
    return {name: params[name] for name in names + ["start_state"] * cfg.learned_initial_state}


def _island(cfg: ModelConfig, mesh: Mesh):
    """Convolution and KDA on each rank's rows, tokens and heads, as one `jax.shard_map`."""
    param_specs = dict.fromkeys(("q_conv", "k_conv", "v_conv"), _TAP_SPEC)
    param_specs |= dict.fromkeys(("a_log", "dt_bias"), _HEAD_SPEC)
    if cfg.learned_initial_state:
        param_specs["start_state"] = _HEAD_SPEC
    carry_specs = {"state": STATE_SPEC, "conv": TAIL_SPEC} if cfg.carry else {}
    axis_name = CONTEXT if mesh.shape[CONTEXT] > 1 else None

    def mix(params, streams, decay, beta, segments, begin):
        return _mix_local(cfg, axis_name, params, streams, decay, beta, segments, begin)

    return jax.shard_map(
        mix,
        mesh=mesh,
        in_specs=(param_specs, CHANNEL_SPEC, CHANNEL_SPEC, CHANNEL_SPEC, TOKEN_SPEC, carry_specs),
        out_specs=(CHANNEL_SPEC, carry_specs),
    )


def _mix_local(cfg, axis_name, params, streams, decay, beta, segments, begin):
    """One rank's part: streams [b, t, h * K or V], decay [b, t, h * K], beta [b, t, h]."""
    # Shared over rows and context: vary here, so that their gradients are summed once, here.
    params = jax.tree.map(lambda p: vary(p, (*ROWS, CONTEXT)), params)
    streams, tails = short_conv(
        streams,
        {name: params[name + "_conv"] for name in STREAMS},
        segments,
        heads=beta.shape[-1],
        tail=begin["conv"] if cfg.carry else None,
        axis_name=axis_name,
        implementation=cfg.kda_implementation,
    )
    out, state = kda(
        streams["q"],
        streams["k"],
        streams["v"],
        split_heads(decay, beta.shape[-1]),
        jnp.moveaxis(beta, 2, 1),
        segments,
        initial_state=begin["state"][:, None] if cfg.carry else None,
        start_state=params.get("start_state"),
        final_state="last" if cfg.carry else "none",
        a_log=params["a_log"],
        dt_bias=params["dt_bias"],
        lower_bound=cfg.gate_lower_bound if cfg.decay_gate == "bounded" else None,
        qk_l2norm=True,
        axis_name=axis_name,
        state_policy=cfg.kda_state_policy,
        implementation=cfg.kda_implementation,
    )
    end = {"state": state, "conv": tails} if cfg.carry else {}
    if axis_name is None:
        # One rank: the sum changes nothing, and says that the ends are the same on all ranks.
        end = jax.tree.map(lambda x: jax.lax.psum(x, CONTEXT), end)
    return jnp.moveaxis(out, 1, 2).reshape(*beta.shape[:2], -1), end
