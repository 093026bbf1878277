"""Prepares a call's tokens for the recurrence, in float32, on arrays [..., C, channels]."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda.gates import log_decay, reciprocal_norm
from kernels.kda.problem import Problem


class Raw(NamedTuple):
    """Tokens as given, in any float dtype, and the gate's parameters, broadcastable against x."""

    q: jax.Array  # [..., C, K]
    k: jax.Array
    x: jax.Array  # gate input
    beta: jax.Array  # [..., C, 1]
    a_log: jax.Array | None  # [..., 1, 1]
    dt_bias: jax.Array | None  # [..., 1, K]


class Tokens(NamedTuple):
    """Prepared tokens, float32; all values are zero at padding, so padding does not decay."""

    q: jax.Array  # scaled, and normalized if requested
    k: jax.Array
    beta: jax.Array  # [..., C, 1]
    a: jax.Array  # log decay


def prepare(problem: Problem, raw: Raw, valid: jax.Array) -> Tokens:
    """Prepares tokens. Padding is masked first, so that it cannot affect a result or a gradient."""
    q, k, x, beta = (jnp.where(valid, t, 0).astype(jnp.float32) for t in raw[:4])
    if problem.l2norm:
        q, k = (t * reciprocal_norm(jnp.sum(t * t, -1, keepdims=True)) for t in (q, k))
    rate = None if raw.a_log is None else jnp.exp(raw.a_log)
    a = jnp.where(valid, log_decay(problem, x, rate, raw.dt_bias), 0)
    return Tokens(q * problem.scale, k, beta, a)
