"""Mixture of experts: each token goes to the k of E experts that its router scores highest.

x -> sigmoid scores in float32 -> the k experts with the highest score + bias, weighted by the
scores without the bias -> the sum of their SwiGLUs; in addition shared experts, one SwiGLU for all
tokens. No loss term balances the experts: each step moves each bias by a fixed amount towards equal
token counts (`after_step`).

Each rank routes its own tokens and orders them by expert. They are sent along the "expert" axis to
the ranks that hold the experts, multiplied there group by group, and sent back.

Axes: B row, T token, D residual width, F column of an expert, E expert, k choice of a token; on a
rank n token, M = n k row.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels.grouped import grouped_matmul
from model.axes import (
    CONTEXT,
    DATA,
    EXPERT,
    FSDP,
    TENSOR,
    TOKEN_SPEC,
    TOKENS,
    Arrays,
    MeshNeed,
    Specs,
    matrix,
    vector,
)
from model.config import ModelConfig
from model.ffn.exchange import move, plan_exchange
from model.ffn.routing import balanced, route
from model.ffn.swiglu import swiglu, swiglu_specs
from model.layers import matmul, vary
from model.mixers.protocol import Metrics, RowPlan


def param_specs(cfg: ModelConfig) -> Specs:
    """gate, up [E, D, F] and down [E, F, D]; the router [D, E], float32; its bias [E], initially
    zero and without a gradient; "shared": one SwiGLU of shared_experts * F columns."""
    count = cfg.num_experts
    router = matrix((cfg.d_model, count), ("width", "whole"), cfg.init_std, muon=False)
    bias = vector((count,), ("whole",), lambda key, shape: jnp.zeros(shape, jnp.float32))
    specs: dict[str, Any] = {
        "router": dataclasses.replace(router, cast=False),
        "router_bias": dataclasses.replace(bias, trained=False),
    }
    for name, spec in swiglu_specs(cfg, cfg.expert_d_ff).items():
        shape, axes = (count, *spec.shape), ("experts", *spec.axes)
        specs[name] = dataclasses.replace(spec, shape=shape, axes=axes)
    if cfg.shared_experts:
        specs["shared"] = swiglu_specs(cfg, cfg.shared_experts * cfg.expert_d_ff)
    return specs


def forward(
    params: Arrays, cfg: ModelConfig, x: jax.Array, plan: RowPlan, mesh: Mesh
) -> tuple[jax.Array, Metrics]:
    """x [B, T, D] -> (y [B, T, D], metrics); see `protocol.FeedForward`.

    Metrics, one contribution per token rank: "expert_tokens" [ranks, E], tokens that each expert
    computed; "dropped_tokens" [ranks], routed minus computed tokens, which is 0.
    """
    scores = jax.nn.sigmoid(matmul(x.astype(jnp.float32), params["router"]))
    columns, rows = PartitionSpec(EXPERT, None, TENSOR), PartitionSpec(EXPERT, TENSOR)
    ranks = PartitionSpec(TOKENS)
    island = jax.shard_map(
        functools.partial(_on_rank, cfg),
        mesh=mesh,
        in_specs=(
            TOKEN_SPEC, TOKEN_SPEC, TOKEN_SPEC, ranks,
            {"gate": columns, "up": columns, "down": rows},
        ),
        out_specs=(TOKEN_SPEC, {"expert_tokens": ranks, "dropped_tokens": ranks}),
    )  # fmt: skip
    matrices = {name: params[name] for name in ("gate", "up", "down")}
    y, metrics = island(x, scores, plan.segments.valid, params["router_bias"], matrices)
    return y + swiglu(x, params["shared"]) if cfg.shared_experts else y, metrics


def after_step(params: Arrays, cfg: ModelConfig, metrics: Metrics) -> tuple[Arrays, Metrics]:
    """Moves the biases, and reports "expert_load": the experts' maximum of tokens over the mean."""
    counts = metrics["expert_tokens"]
    bias = balanced(params["router_bias"], counts, cfg.router_bias_rate)
    load = counts.max(axis=-1) / jnp.maximum(counts.mean(axis=-1), 1e-9)
    return params | {"router_bias": bias}, {"expert_load": load}


def flops_per_token(cfg: ModelConfig) -> float:
    """The router and the experts that compute a token: k of them and the shared ones."""
    active = 3 * cfg.expert_d_ff * (cfg.experts_per_token + cfg.shared_experts)
    return 2.0 * cfg.d_model * (cfg.num_experts + active)


def mesh_needs(cfg: ModelConfig) -> list[MeshNeed]:
    """Experts over expert, their columns over tensor."""
    return [
        MeshNeed(EXPERT, "num_experts", cfg.num_experts),
        MeshNeed(TENSOR, "expert_d_ff", cfg.expert_d_ff),
    ]


def _on_rank(cfg: ModelConfig, x, scores, valid, bias, matrices):
    """One rank's tokens x [b, t, D]: (y [b, t, D], metrics)."""
    matrices = {name: vary(w, (DATA, FSDP, CONTEXT)) for name, w in matrices.items()}
    tokens, valid = x.reshape(-1, x.shape[-1]), valid.reshape(-1)
    # Padding is excluded: its rows are zeros before the experts, and dropped after them.
    tokens = vary(jnp.where(valid[:, None], tokens, 0), (TENSOR,))
    routing = route(scores.reshape(valid.size, -1), bias[0], valid, cfg)
    order = jnp.argsort(routing.experts.reshape(-1), stable=True)  # [M] choices by expert
    places = jnp.argsort(order)  # [M] where each choice went
    rows = _take(tokens, order // cfg.experts_per_token, places.reshape(valid.size, -1))
    rows, computed = _compute(cfg, rows, routing.counts, matrices)
    chosen = _take(rows, places, order[:, None]).reshape(valid.size, -1, x.shape[-1])
    chosen = jnp.where(valid[:, None, None], chosen, 0)
    y = jnp.sum(routing.weights[..., None] * chosen, axis=1).astype(x.dtype)
    routed = jnp.sum(valid) * cfg.experts_per_token
    metrics = {
        "expert_tokens": routing.counts.astype(jnp.float32)[None],
        "dropped_tokens": (routed - computed).astype(jnp.float32)[None],
    }
    return jax.lax.psum(y, TENSOR).reshape(x.shape), metrics


@jax.named_scope("experts")
def _compute(cfg: ModelConfig, rows, counts, matrices):
    """Rows [M, D] ordered by expert -> (the experts' results, the number of rows that this rank's
    experts computed)."""
    ranks = jax.lax.axis_size(EXPERT)
    if ranks == 1:
        return _swiglu_of_groups(rows, matrices, counts), jnp.sum(counts)
    exchange = plan_exchange(counts)
    most = min(
        cfg.experts_per_token, cfg.num_experts // ranks
    )  # rows of a token that one rank gets
    room = ranks * most * (rows.shape[0] // cfg.experts_per_token)
    there, back = exchange.there, exchange.back
    out = _swiglu_of_groups(move(rows, there, back, room), matrices, exchange.sizes)
    return move(out, back, there, rows.shape[0]), jnp.sum(exchange.sizes)


def _swiglu_of_groups(rows: jax.Array, matrices: Arrays, sizes: jax.Array) -> jax.Array:
    gate = grouped_matmul(rows, matrices["gate"], sizes)
    hidden = jax.nn.silu(gate) * grouped_matmul(rows, matrices["up"], sizes)
    return grouped_matmul(hidden, matrices["down"], sizes)


@jax.custom_vjp
def _take(x: jax.Array, rows: jax.Array, back: jax.Array) -> jax.Array:
    """x[rows], with a gradient that is also a gather: back [n, c] are the c positions of row n."""
    return x[rows]


def _take_forward(x, rows, back):
    return x[rows], back


def _take_backward(back, d_out):
    return jnp.sum(d_out[back], axis=1, dtype=jnp.float32).astype(d_out.dtype), None, None


_take.defvjp(_take_forward, _take_backward)
