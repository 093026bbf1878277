"""Attention of one token per row, as in generation, with all its scores at once.

Axes: B row, G key-value head, M query head per key-value head, S key, d head channel.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite, so that a row with every score masked stays finite
Keys = tuple[jax.Array, jax.Array, jax.Array]  # k, v [B, G, S, d]; visible [B, S] bool


def attend(q: jax.Array, parts: Sequence[Keys]) -> jax.Array:
    """A row's query [B, H, 1, d] against all keys of `parts`, which are not concatenated, as this
    would copy them. Sums and the softmax are float32.

    Returns:
        [B, H, 1, d] in q's dtype; 0 if a row sees no key.
    """
    queries = q.reshape(q.shape[0], parts[0][0].shape[1], -1, q.shape[-1])
    scores = [_scores(queries, k, seen) for k, _, seen in parts]
    top = functools.reduce(jnp.maximum, (score.max(-1, keepdims=True) for score in scores))
    weights = [jnp.where(score > _MASKED, jnp.exp(score - top), 0) for score in scores]
    total = sum(weight.sum(-1, keepdims=True) for weight in weights)
    out = sum(
        _product("bgms,bgsd->bgmd", weight.astype(v.dtype), v)
        for weight, (_, v, _) in zip(weights, parts)
    )
    return (out / jnp.where(total > 0, total, 1)).astype(q.dtype).reshape(q.shape)


def _scores(queries: jax.Array, k: jax.Array, seen: jax.Array) -> jax.Array:
    score = _product("bgmd,bgsd->bgms", queries, k) * queries.shape[-1] ** -0.5
    return jnp.where(seen[:, None, None], score, _MASKED)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)
