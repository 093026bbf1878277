"""The choice of experts for each token, their weights, and the biases that balance them.

Axes: n token of a rank, E expert, k choice of a token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from model.config import ModelConfig


class Routing(NamedTuple):
    """The choices of a rank's tokens.

    experts: [n, k] int32; E at padding, which has no expert. weights: [n, k] float32; 0 at padding.
    counts: [E] int32, tokens of each expert.
    """

    experts: jax.Array
    weights: jax.Array
    counts: jax.Array


@jax.named_scope("routing")
def route(scores: jax.Array, bias: jax.Array, valid: jax.Array, cfg: ModelConfig) -> Routing:
    """Chooses experts by score + bias; their weights are the scores without the bias.

    Args:
        scores: [n, E] float32, sigmoids. bias: [E] float32, without a gradient. valid: [n] bool.
    """
    choice = jax.lax.stop_gradient(scores + bias)
    experts = jax.lax.top_k(choice, cfg.experts_per_token)[1]
    chosen = experts[..., None] == jnp.arange(scores.shape[1])  # [n, k, E]
    # A sum over a comparison rather than a gather, whose gradient would be a scatter.
    weights = jnp.sum(jnp.where(chosen, scores[:, None], 0.0), axis=-1)
    weights = cfg.router_scale * weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    counts = jnp.sum(chosen & valid[:, None, None], axis=(0, 1), dtype=jnp.int32)
    experts = jnp.where(valid[:, None], experts, scores.shape[1])
    return Routing(experts, jnp.where(valid[:, None], weights, 0.0), counts)


def balanced(bias: jax.Array, counts: jax.Array, rate: float) -> jax.Array:
    """Biases [..., E] after a step in which experts computed counts [..., E] tokens."""
    mean = jnp.mean(counts, axis=-1, keepdims=True)
    return bias + rate * jnp.sign(mean - counts)
