"""Random calls of `short_conv`, and their results in float64 as sums over taps that a loop picks.

For tests, and for the check of the kernels on a TPU (training/tpu_check).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.cases import number
from kernels.segments import plan_segments
from kernels.short_conv.api import short_conv


def example(ids, width=4, seed=0, with_tail=True, channels=5):
    """x, weight, tail and cotangents of y and the next tail, float32."""
    rng = np.random.default_rng(seed)
    rows, length = ids.shape
    x = rng.standard_normal((rows, length, channels)).astype(np.float32)
    weight = rng.standard_normal((width, channels)).astype(np.float32)
    tail = rng.standard_normal((rows, width - 1, channels)).astype(np.float32) * with_tail
    cotangents = tuple(rng.standard_normal(t.shape).astype(np.float32) for t in (x, tail))
    return x, weight, tail, cotangents


def taps(ids, width):
    """source [B, T, W]: index into (tail, x) along time, -1 where the tap adds nothing; next_source
    [B, W - 1] likewise for the next tail."""
    rows, length = ids.shape
    source = np.full((rows, length, width), -1)
    following = np.full((rows, width - 1), -1)
    for b in range(rows):
        index, _ = number(ids[b])
        owner = np.concatenate([np.zeros(width - 1, int), index])  # the tail is of segment 0

        def pick(t, j, owner=owner):
            position = t - j + width - 1
            return position if owner[position] == owner[t + width - 1] else -1

        for t in np.flatnonzero(ids[b]):
            source[b, t] = [pick(t, j) for j in range(width)]
        real = np.flatnonzero(ids[b])
        if len(real):
            following[b] = [pick(real[-1], j) for j in reversed(range(width - 1))]
        else:
            following[b] = np.arange(width - 1)
    return source, following


def oracle(x, weight, tail, ids, activation, cotangents):
    """(y, next tail) and their gradients in float64, on the host."""
    source, following = taps(ids, weight.shape[0])

    def run(x, weight, tail):
        whole = jnp.concatenate([tail, x], axis=1)
        rows = jnp.arange(x.shape[0])[:, None]
        y = jnp.zeros(())
        for j in range(weight.shape[0]):
            picked = whole[rows, source[..., j]]
            y += jnp.where(source[..., j, None] >= 0, picked * weight[weight.shape[0] - 1 - j], 0)
        y = y * jax.nn.sigmoid(y) if activation == "silu" else y
        return y, jnp.where(following[..., None] >= 0, whole[rows, following], 0)

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(np.asarray(t, np.float64)) for t in (x, weight, tail)]
        value, pull = jax.vjp(run, *wide)
        return value, pull(tuple(np.asarray(c, np.float64) for c in cotangents))


def call_of(
    mesh: Mesh | None,
    activation: str | None = "silu",
    implementation: str | None = None,
    *,
    heads: int | None = None,
    with_tail: bool = True,
    check_vma: bool = True,
) -> Callable:
    """(x, weight, tail, ids) -> (y, next tail), to be jitted; axis "context" of it divides T."""
    axis = None if mesh is None else "context"

    def call(x, weight, tail, ids):
        return short_conv(
            x,
            weight,
            plan_segments(ids, axis),
            heads=heads,
            tail=tail if with_tail else None,
            axis_name=axis,
            activation=activation,
            implementation=implementation,
        )

    if mesh is None:
        return call
    token = P(None, "context")
    y = token if heads is None else P(None, None, "context")
    return jax.shard_map(
        call, mesh=mesh, in_specs=(token, P(), P(), token), out_specs=(y, P()),
        check_vma=check_vma,
    )  # fmt: skip


def with_gradients(call: Callable) -> Callable:
    """(x, weight, tail, ids, cotangents) -> ((y, next tail), gradients of x, weight and tail)."""

    def function(x, weight, tail, ids, cotangents):
        value, pull = jax.vjp(lambda *args: call(*args, ids), x, weight, tail)
        return value, pull(cotangents)

    return function
