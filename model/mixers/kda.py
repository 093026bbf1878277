"""The Kimi Delta Attention mixer; it computes the same as transformers' `kimi_linear`.

x -> q, k, v projections -> causal depthwise convolution and SiLU -> KDA with l2-normalised q and k,
a decay gate and a sigmoid beta -> RMS norm of each head, gated by a sigmoid -> output projection.
No biases. Options: gates of full instead of low rank, several value heads per head of q and k,
beta up to 2.

jit shards the projections; convolution, KDA and the gated norm run in one `jax.shard_map`, with
rows over `ROWS`, tokens over "context" and heads over "tensor". Parameters are
initialised as in flash-linear-attention.

Axes: B row, T token, D residual width, H head (of v, where q and k have fewer), K key channel,
V value channel, W convolution taps.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels.kda import kda_on_rank
from kernels.kda.problem import CHUNK
from kernels.short_conv import short_conv_on_rank, split_heads
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

STREAMS = ("q", "k", "v")

_CHANNEL_SPEC = PartitionSpec(ROWS, CONTEXT, TENSOR)  # [B, T, channels of all heads]
_STATE_SPEC = PartitionSpec(ROWS, TENSOR)  # [B, H, K, V]
_TAIL_SPEC = PartitionSpec(ROWS, None, TENSOR)  # [B, W - 1, channels of all heads]


def param_specs(cfg: ModelConfig) -> Specs:
    """Projections are normal with init_std; a_log = log U(1, 16); dt_bias is the inverse softplus
    of a time step log-uniform in [1e-3, 0.1], so that exp(a_log) softplus(dt_bias) forgets over one
    to a thousand tokens; convolutions are torch's default, uniform in +-W^-1/2.
    """
    width, std, heads = cfg.d_model, cfg.init_std, cfg.value_heads
    keys, values = cfg.kda_heads * cfg.key_dim, heads * cfg.value_dim
    specs = {
        "q": matrix((width, keys), ("width", "heads"), std),
        "k": matrix((width, keys), ("width", "heads"), std),
        "v": matrix((width, values), ("width", "heads"), std),
        "q_conv": _taps(cfg.conv_kernel_size, keys),
        "k_conv": _taps(cfg.conv_kernel_size, keys),
        "v_conv": _taps(cfg.conv_kernel_size, values),
        **_gate_specs(cfg, "decay", heads * cfg.key_dim),
        "a_log": vector((heads,), ("heads",), _log_uniform_rate),
        "dt_bias": vector((heads, cfg.key_dim), ("heads", "whole"), _inverse_softplus_step),
        "beta": matrix((width, heads), ("width", "heads"), std),
        **_gate_specs(cfg, "output_gate", values),
        "output_norm": gain(cfg.value_dim),
        "output": matrix((values, width), ("heads", "width"), cfg.residual_std),
    }
    if cfg.learned_initial_state:
        shape = (heads, cfg.key_dim, cfg.value_dim)
        specs["start_state"] = vector(shape, ("heads", "whole", "whole"), _zeros)
    return specs


def forward(
    params: Arrays,
    cfg: ModelConfig,
    x: jax.Array,
    plan: RowPlan,
    carry: Arrays,
    entry: Arrays | None,
    mesh: Mesh,
) -> tuple[jax.Array, Arrays, Arrays, Metrics]:
    """Mixes x [B, T, D] along the tokens of each segment. See `protocol.Mixer`.

    Args:
        carry: {"state": [P, B, H, K, V] float32, "conv": {"q", "k", "v"} [P, B, W - 1, channels]}
            at the end of each row's last segment so far; {} without cfg.carry.

    Returns:
        y, ends of the same structure as the carry, entry {"state": [P, B, H, K, V] float32, "halo":
        [P, B, W - 1, channels of q, k and v]}, and no metrics.
    """
    streams = {name: matmul(x, params[name]) for name in STREAMS}
    decay = _gate(params, "decay", x)
    beta = jax.nn.sigmoid(matmul(x, params["beta"], out_dtype=jnp.float32))
    if cfg.negative_eigenvalues:
        beta = 2.0 * beta
    gate = _gate(params, "output_gate", x)
    small = {name: param for name, param in params.items() if name in _small_specs(cfg)}
    island = _island(cfg, mesh, entry is not None)
    mixed, ends, entry = island(small, streams, decay, beta, gate, plan, carry, entry)
    return matmul(mixed, params["output"]), ends, entry, {}


def new_carry(cfg: ModelConfig, plan: RowPlan, carry: Arrays, ends: Arrays) -> Arrays:
    """The ends; a row that is all padding keeps its carry."""

    def merge(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(plan.has_tokens.reshape(-1, *[1] * (old.ndim - 2)), new, old)

    return jax.tree.map(merge, carry, ends)


def init_carry(cfg: ModelConfig, rows: int) -> Arrays:
    """Zeros: {"state": [B, H, K, V] float32, "conv": {"q", "k", "v"} [B, W - 1, channels] in the
    compute dtype}; {} without cfg.carry."""
    if not cfg.carry:
        return {}
    state = jnp.zeros((rows, cfg.value_heads, cfg.key_dim, cfg.value_dim), jnp.float32)
    conv = {
        name: jnp.zeros((rows, cfg.conv_kernel_size - 1, size), cfg.compute_dtype)
        for name, size in _channels(cfg).items()
    }
    return {"state": state, "conv": conv}


def carry_specs(cfg: ModelConfig) -> Tree:
    """Rows as the batch's, heads over tensor."""
    if not cfg.carry:
        return {}
    return {"state": _STATE_SPEC, "conv": dict.fromkeys(STREAMS, _TAIL_SPEC)}


def reads_positions(cfg: ModelConfig) -> bool:
    """Never."""
    return False


def flops_per_token(cfg: ModelConfig) -> float:
    """Matrices, convolutions and the chunked recurrence."""
    convolutions = 2.0 * cfg.conv_kernel_size * sum(_channels(cfg).values())
    return matrix_flops(param_specs(cfg)) + convolutions + recurrence_flops(cfg)


def recurrence_flops(cfg: ModelConfig) -> float:
    """Forward FLOPs per token of one layer's chunked recurrence, all heads, C tokens per chunk.

    Per token and head: 6 K V for the state (p S, q S, S'), 4 C K for L and Aqk, 4 C V for A and Aqk
    times values, 2/3 C^2 for the inverse of I + L. They do not depend on row length, packing or
    ranks.
    """
    k, v, c = cfg.key_dim, cfg.value_dim, CHUNK
    return cfg.value_heads * (6.0 * k * v + 4.0 * c * (k + v) + 2.0 / 3.0 * c * c)


def flops_per_key(cfg: ModelConfig) -> float:
    """None: the state has a fixed size."""
    return 0.0


def mesh_needs(cfg: ModelConfig) -> list[MeshNeed]:
    """Heads over tensor, the gates' inner size over fsdp."""
    return [
        MeshNeed(FSDP, "gate_rank", cfg.gate_rank),
        MeshNeed(TENSOR, "kda_heads", cfg.kda_heads),
    ]


def _channels(cfg: ModelConfig) -> dict[str, int]:
    """Channels of all heads of each stream."""
    keys = cfg.kda_heads * cfg.key_dim
    return {"q": keys, "k": keys, "v": cfg.value_heads * cfg.value_dim}


def _gate_specs(cfg: ModelConfig, name: str, channels: int) -> Specs:
    """The matrices from the residual width to a gate's channels: one, or two of gate_rank."""
    width, rank, std = cfg.d_model, cfg.gate_rank, cfg.init_std
    if not rank:
        return {name: matrix((width, channels), ("width", "heads"), std)}
    return {
        f"{name}_a": matrix((width, rank), ("width", "gate_rank"), std),
        f"{name}_b": matrix((rank, channels), ("gate_rank", "heads"), std),
    }


def _gate(params: Arrays, name: str, x: jax.Array) -> jax.Array:
    """x [B, T, D] times the matrices of `_gate_specs`."""
    if name in params:
        return matmul(x, params[name])
    return matmul(matmul(x, params[f"{name}_a"]), params[f"{name}_b"])


def _small_specs(cfg: ModelConfig) -> dict[str, PartitionSpec]:
    """Shardings of the copies of small parameters, by name."""
    tokens = PartitionSpec(TOKENS)
    specs = dict.fromkeys((f"{name}_conv" for name in STREAMS), PartitionSpec(TOKENS, None, TENSOR))
    specs |= dict.fromkeys(("a_log", "dt_bias"), PartitionSpec(TOKENS, TENSOR))
    specs["output_norm"] = tokens
    if cfg.learned_initial_state:
        specs["start_state"] = PartitionSpec(TOKENS, TENSOR)
    return specs


def _island(cfg: ModelConfig, mesh: Mesh, repeated: bool) -> Callable[..., tuple]:
    """Convolution, KDA and the gated norm on each rank's rows, tokens and heads.

    Arrays of which every rank has its own copy or contribution are [1, ...] inside, [P, ...]
    outside.
    """
    of_rank = functools.partial(jax.tree.map, lambda spec: PartitionSpec(CONTEXT, *spec))
    carries = of_rank(carry_specs(cfg))
    entries = of_rank({"state": _STATE_SPEC, "halo": _TAIL_SPEC})
    plans: Any = RowPlan(TOKEN_SPEC, PartitionSpec(ROWS), PartitionSpec(ROWS), TOKEN_SPEC)  # type: ignore[arg-type]
    axis_name = CONTEXT if mesh.shape[CONTEXT] > 1 else None

    def mix(params, streams, decay, beta, gate, plan, carry, entry):
        params, carry, entry = jax.tree.map(lambda x: x[0], (params, carry, entry))
        begin = _begin(params, cfg, plan, carry) if cfg.carry else {}
        mixed, *exchanged = _mix_local(
            cfg, axis_name, params, streams, decay, beta, plan.segments, begin, entry
        )
        heads = (*beta.shape, cfg.value_dim)
        normed = gated_rms_norm(
            mixed.reshape(heads), gate.reshape(heads), params["output_norm"], cfg.norm_eps
        )
        ends, entry = jax.tree.map(lambda x: vary(x, (CONTEXT,))[None], exchanged)
        return normed.reshape(mixed.shape), ends, entry

    channels = _CHANNEL_SPEC
    return jax.shard_map(
        mix,
        mesh=mesh,
        in_specs=(
            _small_specs(cfg), channels, channels, channels, channels, plans, carries,
            entries if repeated else None,
        ),
        out_specs=(channels, carries, entries),
    )  # fmt: skip


def _begin(params: Arrays, cfg: ModelConfig, plan: RowPlan, carry: Arrays) -> Arrays:
    """The start states of each row's first segment: the carry if it continues, else fresh ones."""
    fresh = params["start_state"] if cfg.learned_initial_state else 0.0
    state = jnp.where(plan.continues[:, None, None, None], carry["state"], fresh)
    tails = {
        name: jnp.where(plan.continues[:, None, None], tail, 0)
        for name, tail in carry["conv"].items()
    }
    return {"state": state, "conv": tails}


def _mix_local(cfg, axis_name, params, streams, decay, beta, segments, begin, entry):
    """One rank's part: streams [b, t, channels], decay [b, t, h * K], beta [b, t, h].

    Returns (out [b, t, h * V], the rank's contribution to the ends, entry).
    """
    implementation = None if cfg.kda_implementation == "auto" else cfg.kda_implementation
    shared = cfg.value_heads // cfg.kda_heads  # value heads per head of q and k
    streams, tails, halo = short_conv_on_rank(
        streams,
        {name: params[name + "_conv"] for name in STREAMS},
        segments,
        heads=beta.shape[-1] // shared,
        tail=begin["conv"] if cfg.carry else None,
        halo=None if entry is None else entry["halo"],
        axis_name=axis_name,
        implementation=implementation,
    )
    out, state, entered = kda_on_rank(
        _repeated(streams["q"], shared),
        _repeated(streams["k"], shared),
        _apart(streams["v"], shared),
        split_heads(decay, beta.shape[-1]),
        jnp.moveaxis(beta, 2, 1),
        segments,
        entry=None if entry is None else entry["state"],
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
    ends = {"state": state, "conv": tails} if cfg.carry else {}
    mixed = jnp.moveaxis(out, 1, 2).reshape(*beta.shape[:2], -1)
    return mixed, ends, {"state": entered, "halo": halo}


def _repeated(x: jax.Array, count: int) -> jax.Array:
    """[B, H, T, d] -> [B, H * count, T, d], every head `count` times in a row."""
    return x if count == 1 else jnp.repeat(x, count, axis=1)


def _apart(x: jax.Array, count: int) -> jax.Array:
    """[B, H, T, count * d] -> [B, H * count, T, d]: the heads that share a head of q and k."""
    if count == 1:
        return x
    rows, heads, tokens, _ = x.shape
    return jnp.moveaxis(x.reshape(rows, heads, tokens, count, -1), 3, 2).reshape(
        rows, heads * count, tokens, -1
    )


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
