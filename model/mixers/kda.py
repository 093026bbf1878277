"""The Kimi Delta Attention mixer, layer for layer what transformers' `kimi_linear` computes.

x -> q, k, v projections -> causal depthwise convolution and SiLU -> KDA with l2-normalised q and k,
a low-rank decay gate and a sigmoid beta -> RMS norm of each head, gated by a low-rank sigmoid ->
output projection. No biases.

jit shards the projections; convolution and KDA run in one `jax.shard_map` island, rows over
("data", "fsdp"), tokens over "context", heads over "tensor". Parameters start as
flash-linear-attention's do.

Axes: B row, T token, D residual width, H head, K key channel, V value channel, W convolution taps.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels.kda import kda
from kernels.kda.problem import CHUNK
from kernels.short_conv import short_conv, split_heads
from model.axes import (
    CONTEXT,
    FSDP,
    ROWS,
    TENSOR,
    TOKEN_SPEC,
    TOKENS,
    Arrays,
    MeshNeed,
    ParamSpec,
    Specs,
    Tree,
    gain,
    matrix,
    matrix_flops,
    vector,
)
from model.config import ModelConfig
from model.layers import gated_rms_norm, matmul, vary
from model.mixers.protocol import Metrics, RowPlan

READS_POSITIONS = False
STREAMS = ("q", "k", "v")

_CHANNEL_SPEC = PartitionSpec(ROWS, CONTEXT, TENSOR)  # [B, T, channels of all heads]
_STATE_SPEC = PartitionSpec(ROWS, TENSOR)  # [B, H, K, V]
_TAIL_SPEC = PartitionSpec(ROWS, None, TENSOR)  # [B, W - 1, channels of all heads]
_HEAD_SPEC = PartitionSpec(TENSOR)  # [H, ...]
_TAP_SPEC = PartitionSpec(None, TENSOR)  # [W, channels of all heads]


def param_specs(cfg: ModelConfig) -> Specs:
    """Projections are normal with init_std; a_log = log U(1, 16); dt_bias is the inverse softplus
    of a time step log-uniform in [1e-3, 0.1], so that exp(a_log) softplus(dt_bias) forgets over one
    to a thousand tokens; convolutions are torch's default, uniform in +-W^-1/2.
    """
    width, rank = cfg.d_model, cfg.gate_rank
    keys, values = cfg.kda_heads * cfg.key_dim, cfg.kda_heads * cfg.value_dim
    std = cfg.init_std
    specs = {
        "q": matrix((width, keys), ("width", "heads"), std),
        "k": matrix((width, keys), ("width", "heads"), std),
        "v": matrix((width, values), ("width", "heads"), std),
        "q_conv": _taps(cfg.conv_kernel_size, keys),
        "k_conv": _taps(cfg.conv_kernel_size, keys),
        "v_conv": _taps(cfg.conv_kernel_size, values),
        "decay_a": matrix((width, rank), ("width", "gate_rank"), std),
        "decay_b": matrix((rank, keys), ("gate_rank", "heads"), std),
        "a_log": vector((cfg.kda_heads,), ("heads",), _log_uniform_rate),
        "dt_bias": vector((cfg.kda_heads, cfg.key_dim), ("heads", "whole"), _inverse_softplus_step),
        "beta": matrix((width, cfg.kda_heads), ("width", "heads"), std),
        "output_gate_a": matrix((width, rank), ("width", "gate_rank"), std),
        "output_gate_b": matrix((rank, values), ("gate_rank", "heads"), std),
        "output_norm": gain(cfg.value_dim),
        "output": matrix((values, width), ("heads", "width"), cfg.residual_std),
    }
    if cfg.learned_initial_state:
        shape = (cfg.kda_heads, cfg.key_dim, cfg.value_dim)
        specs["start_state"] = vector(shape, ("heads", "whole", "whole"), _zeros)
    return specs


def forward(
    params: Arrays, cfg: ModelConfig, x: jax.Array, plan: RowPlan, carry: Arrays, mesh: Mesh
) -> tuple[jax.Array, Arrays, Metrics]:
    """Mixes x [B, T, D] along the tokens of each segment.

    Args:
        params: this layer's parameters, matrices in the compute dtype and the rest float32.
        carry: {"state": [B, H, K, V] float32, "conv": {"q", "k", "v"} [B, W - 1, channels]} at the
            end of each row's last segment so far. Ignored unless cfg.carry.

    Returns:
        [B, T, D] in x's dtype, the carry after these tokens, and no metrics.
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
    return y, _end(plan, carry, end) if cfg.carry else carry, {}


def init_carry(cfg: ModelConfig, rows: int) -> Arrays:
    """Zeros: {"state": [B, H, K, V] float32, "conv": {"q", "k", "v"} [B, W - 1, channels] in the
    compute dtype}; {} without cfg.carry."""
    if not cfg.carry:
        return {}
    state = jnp.zeros((rows, cfg.kda_heads, cfg.key_dim, cfg.value_dim), jnp.float32)
    channels = {"q": cfg.key_dim, "k": cfg.key_dim, "v": cfg.value_dim}
    conv = {
        name: jnp.zeros((rows, cfg.conv_kernel_size - 1, cfg.kda_heads * size), cfg.compute_dtype)
        for name, size in channels.items()
    }
    return {"state": state, "conv": conv}


def carry_specs(cfg: ModelConfig) -> Tree:
    """Rows as the batch's, heads over tensor."""
    if not cfg.carry:
        return {}
    return {"state": _STATE_SPEC, "conv": dict.fromkeys(STREAMS, _TAIL_SPEC)}


def flops_per_token(cfg: ModelConfig) -> float:
    """Matrices, convolutions and the chunked recurrence."""
    channels = cfg.kda_heads * (2 * cfg.key_dim + cfg.value_dim)
    convolutions = 2.0 * cfg.conv_kernel_size * channels
    return matrix_flops(param_specs(cfg)) + convolutions + recurrence_flops(cfg)


def recurrence_flops(cfg: ModelConfig) -> float:
    """Forward FLOPs a token of one layer's chunked recurrence, all heads, C tokens a chunk.

    A token and head: 6 K V for the state (p S, q S, S'), 4 C K for L and Aqk, 4 C V for A and Aqk
    times values, 2/3 C^2 for the inverse of I + L. Row length, packing and ranks do not count.
    """
    k, v, c = cfg.key_dim, cfg.value_dim, CHUNK
    return cfg.kda_heads * (6.0 * k * v + 4.0 * c * (k + v) + 2.0 / 3.0 * c * c)


def flops_per_key(cfg: ModelConfig) -> float:
    """None: the state has a fixed size."""
    return 0.0


def mesh_needs(cfg: ModelConfig) -> list[MeshNeed]:
    """Heads over tensor, the gates' inner size over fsdp."""
    return [
        MeshNeed(FSDP, "gate_rank", cfg.gate_rank),
        MeshNeed(TENSOR, "kda_heads", cfg.kda_heads),
    ]


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
    specs = dict.fromkeys(("q_conv", "k_conv", "v_conv"), _TAP_SPEC)
    specs |= dict.fromkeys(("a_log", "dt_bias"), _HEAD_SPEC)
    if cfg.learned_initial_state:
        specs["start_state"] = _HEAD_SPEC
    ends = carry_specs(cfg)
    axis_name = CONTEXT if mesh.shape[CONTEXT] > 1 else None

    def mix(params, streams, decay, beta, segments, begin):
        return _mix_local(cfg, axis_name, params, streams, decay, beta, segments, begin)

    return jax.shard_map(
        mix,
        mesh=mesh,
        in_specs=(specs, _CHANNEL_SPEC, _CHANNEL_SPEC, _CHANNEL_SPEC, TOKEN_SPEC, ends),
        out_specs=(_CHANNEL_SPEC, ends),
    )


def _mix_local(cfg, axis_name, params, streams, decay, beta, segments, begin):
    """One rank's part: streams [b, t, h * K or V], decay [b, t, h * K], beta [b, t, h]."""
    # Shared over rows and context: vary here, so that their gradients are summed once, here.
    params = jax.tree.map(lambda p: vary(p, TOKENS), params)
    implementation = None if cfg.kda_implementation == "auto" else cfg.kda_implementation
    streams, tails = short_conv(
        streams,
        {name: params[name + "_conv"] for name in STREAMS},
        segments,
        heads=beta.shape[-1],
        tail=begin["conv"] if cfg.carry else None,
        axis_name=axis_name,
        implementation=implementation,
    )
    out, state = kda(
        streams["q"],
        streams["k"],
        streams["v"],
        split_heads(decay, beta.shape[-1]),
        jnp.moveaxis(beta, 2, 1),
        segments,
        initial_state=begin["state"][:, None] if cfg.carry else None,
        default_initial_state=params.get("start_state"),
        final_state="last" if cfg.carry else "none",
        a_log=params["a_log"],
        dt_bias=params["dt_bias"],
        lower_bound=cfg.gate_lower_bound if cfg.decay_gate == "bounded" else None,
        qk_l2norm=True,
        axis_name=axis_name,
        state_policy=cfg.kda_state_policy,
        implementation=implementation,
    )
    end = {"state": state, "conv": tails} if cfg.carry else {}
    if axis_name is None:
        # One rank: the sum changes nothing, and says that the ends are the same on all ranks.
        end = jax.tree.map(lambda x: jax.lax.psum(x, CONTEXT), end)
    return jnp.moveaxis(out, 1, 2).reshape(*beta.shape[:2], -1), end


def _taps(width: int, channels: int) -> ParamSpec:
    def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        bound = width**-0.5
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

    return ParamSpec(
        (width, channels), ("whole", "heads"), init, decays=True, cast=False, muon=False
    )


def _zeros(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def _log_uniform_rate(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0))


def _inverse_softplus_step(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    low, high = math.log(1e-3), math.log(0.1)
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
    return step + jnp.log(-jnp.expm1(-step))
