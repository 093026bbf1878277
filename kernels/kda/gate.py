"""The three gate forms and their gradients, float32, on arrays [..., H, C, K] (H head, K
channel)."""

import jax
import jax.numpy as jnp

from kernels.kda.problem import Gate, Problem


def log_decay(problem: Problem, x, a_log, dt_bias):
    """Log decay (<= 0) of the gate input x [..., H, C, K]; a_log [H], dt_bias [H, K]."""
    if problem.gate is Gate.GIVEN:
        return x
    x = x + dt_bias[:, None]
    rate = jnp.exp(a_log)[:, None, None]
    if problem.gate is Gate.BOUNDED:
        return problem.lower_bound * jax.nn.sigmoid(rate * x)
    # softplus; several times faster on CPU than jax.nn.softplus
    return -rate * (jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x))))


def log_decay_backward(problem: Problem, x, a_log, dt_bias, a, d_a):
    """Gradients (x [..., H, C, K], a_log [H], dt_bias [H, K]) from a = log_decay(x) and d_a."""
    if problem.gate is Gate.GIVEN:
        return d_a, None, None
    x = x + dt_bias[:, None]
    rate = jnp.exp(a_log)[:, None, None]
    leading = tuple(range(x.ndim - 3))
    if problem.gate is Gate.BOUNDED:
        slope = jax.nn.sigmoid(rate * x) * jax.nn.sigmoid(-rate * x)
        d_x = d_a * problem.lower_bound * slope * rate
        d_a_log = jnp.sum(d_x * x, (*leading, -2, -1))
    else:
        d_x = -rate * jax.nn.sigmoid(x) * d_a
        d_a_log = jnp.sum(d_a * a, (*leading, -2, -1))
    return d_x, d_a_log, jnp.sum(d_x, (*leading, -2))
