"""The definition of attention: all scores of a row at once, on one rank."""

import jax
import jax.numpy as jnp


def attention_reference(
    q: jax.Array, k: jax.Array, v: jax.Array, q_index: jax.Array, k_index: jax.Array
) -> jax.Array:
    """softmax(q k^T / sqrt(d)) v over the keys of the query's segment up to the query itself.

    Computed in the inputs' dtype; the number of keys before the row is S - T.

    Args:
        q: [B, H, T, d]. k, v: [B, G, S, d] with H a multiple of G; query head h uses the keys of
            head h // (H / G). q_index: [B, T], k_index: [B, S] segment numbers, -1 at padding.

    Returns:
        [B, H, T, d], 0 where the query is padding.
    """
    rows, _, length, size = q.shape
    groups, keys = k.shape[1:3]
    score = jnp.einsum("bgmqd,bgsd->bgmqs", q.reshape(rows, groups, -1, length, size), k)
    position = keys - length + jnp.arange(length)
    seen = (q_index[:, :, None] == k_index[:, None]) & (q_index >= 0)[:, :, None]
    seen = (seen & (position[:, None] >= jnp.arange(keys)))[:, None, None]
    score = jnp.where(seen, score / size**0.5, -1e30)
    weight = jnp.where(seen, jnp.exp(score - score.max(-1, keepdims=True)), 0)
    total = weight.sum(-1, keepdims=True)
    weight = weight / jnp.where(total > 0, total, 1)
    return jnp.einsum("bgmqs,bgsd->bgmqd", weight, v).reshape(q.shape)
