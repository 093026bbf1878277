"""Kimi Delta Attention as a recurrence, token by token (arXiv 2510.26692). All fast forms are
compared with this definition. It imports nothing of this project."""

import jax
import jax.numpy as jnp

NORM_EPS = 1e-6  # added to the sum of squares that qk_l2norm divides by


def log_decay(x, a_log=None, dt_bias=None, lower_bound=None):
    """Log decay [B, H, T, K] of the gate input x; a_log [H], dt_bias [H, K]: x itself if a_log is
    None, else the softplus gate, or with lower_bound the bounded gate."""
    if a_log is None:
        return x
    rate = jnp.exp(a_log)[:, None, None]
    x = x if dt_bias is None else x + dt_bias[:, None]
    return (
        -rate * jax.nn.softplus(x)
        if lower_bound is None
        else lower_bound * jax.nn.sigmoid(rate * x)
    )


def recurrence(
    q, k, v, decay, beta, index, *, initial_state=None, default_initial_state=None, a_log=None,
    dt_bias=None, lower_bound=None, l2norm=False, scale, table_size=0, dtype=jnp.float32,
):  # fmt: skip
    """KDA of whole rows. Shapes as in `kda`; index [B, T] is the number of the token's segment, -1
    at padding.

    Returns out [B, H, T, V], the last state [B, H, K, V] and the states after segments
    0 .. table_size - 1, [B, table_size, H, K, V], all in dtype.
    """
    rows, heads, _, keys = q.shape
    real = (index >= 0)[:, None, :, None]
    q, k, v, x, beta = (
        jnp.where(real, t.astype(dtype), 0) for t in (q, k, v, decay, beta[..., None])
    )
    if l2norm:
        q, k = (t * jax.lax.rsqrt(jnp.sum(t * t, -1, keepdims=True) + NORM_EPS) for t in (q, k))
    a = jnp.where(real, log_decay(x, a_log, dt_bias, lower_bound), 0).astype(dtype)

    fresh = default_initial_state
    fresh = jnp.zeros((heads, keys, v.shape[-1]), dtype) if fresh is None else fresh
    fresh = jnp.broadcast_to(fresh.astype(dtype), (rows, 1, *fresh.shape))
    fresh = fresh + 0 * index[0, 0]  # under shard_map: typed as varying, like the tokens' states
    given = fresh[:, :0] if initial_state is None else initial_state.astype(dtype)
    starts = jnp.concatenate([given, fresh], 1)  # the last slot serves every later segment
    slots = starts.shape[1] - 1

    def start_of(n):  # [B] -> [B, H, K, V]
        return starts[jnp.arange(rows), jnp.clip(n, 0, slots)]

    def token(carry, xs):
        S, table, current = carry
        q, k, v, a, beta, n = xs  # [B, H, .], n [B]
        opens = (n >= 0) & (n != current)
        S = jnp.where(opens[:, None, None, None], start_of(n), S)
        S = jnp.exp(a)[..., None] * S
        S = (
            S
            + beta[..., None] * k[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, S))[..., None, :]
        )
        here = jnp.arange(table_size) == n[:, None]
        table = jnp.where(here[..., None, None, None], S[:, None], table)
        return (S, table, jnp.where(n >= 0, n, current)), scale * jnp.einsum("bhk,bhkv->bhv", q, S)

    table = starts[:, jnp.clip(jnp.arange(table_size), 0, slots)]  # for segments without tokens
    xs = (*(jnp.moveaxis(t, 2, 0) for t in (q, k, v, a, beta)), index.T)
    (last, table, _), out = jax.lax.scan(token, (starts[:, 0], table, -1 + 0 * index[:, 0]), xs)
    return jnp.moveaxis(out, 0, 2), last, table
