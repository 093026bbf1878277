"""The loop over layers, with an explicit gradient.

A layer is a function

    (params, hidden, carry, plan, entry) -> (hidden, ends, entry, metrics)

With entry None it receives from the neighbouring context ranks what enters its rank (a recurrent
state, a convolution's last inputs) and returns it as `entry`. Given that entry, it repeats itself
without messages; its gradient is that of the first call.

The forward keeps each layer's input and entry, never its parameters as gathered for use. The
backward recomputes a layer from these, so that only cotangents pass between ranks: if states passed
again, the last rank, which is first in the backward, would wait for all ranks before it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from model.axes import Tree

Layer = Callable[..., tuple[jax.Array, Tree, Tree, Tree]]
Stacked = tuple[Any, ...]  # one tree per position of the pattern, arrays [R, ...]


def run_layers(
    layers: list[Layer], params: Stacked, hidden: jax.Array, carry: Stacked, plan: Any, scan: bool
) -> tuple[jax.Array, tuple[Stacked, Stacked]]:
    """All layers, R times the pattern, differentiated by JAX: it keeps what it needs.

    scan: compile one repeat of the pattern, not all R of them.

    Returns:
        hidden, and (ends, metrics) stacked over repeats.
    """
    hidden, (ends, metrics, _) = _forward(layers, params, hidden, carry, plan, scan)
    return hidden, (ends, metrics)


def run_layers_recomputed(
    layers: list[Layer],
    params: Stacked,
    hidden: jax.Array,
    carry: Stacked,
    plan: Any,
    scan: bool,
    to_host: bool = False,
) -> tuple[jax.Array, tuple[Stacked, Stacked]]:
    """`run_layers` that keeps each layer's input and entry, and recomputes the rest.

    to_host: they are kept in the host's memory. A TPU copies them while it computes: out of the
    forward's loop a layer at a time, and back into the backward's.
    """

    @jax.custom_vjp
    def run(params, hidden, carry, plan):
        return run_layers(layers, params, hidden, carry, plan, scan)

    def forward(params, hidden, carry, plan):
        hidden, (ends, metrics, kept) = _forward(layers, params, hidden, carry, plan, scan, to_host)
        return (hidden, (ends, metrics)), (params, carry, plan, kept)

    def backward(saved, cotangents):
        params, carry, plan, kept = saved
        d_hidden, (d_ends, d_metrics) = cotangents

        def repeat(d_hidden, stacked):
            gradients = []
            if not scan:  # else the compiler merges what is computed again with the first time
                stacked = jax.lax.optimization_barrier(stacked)
            for layer, *now in reversed(list(zip(layers, *stacked, strict=True))):
                if to_host:
                    now[2] = _moved(now[2], jax.memory.Space.Device)
                d_hidden, gradient = _pull(layer, plan, d_hidden, *now)
                gradients.append(gradient)
            return d_hidden, tuple(zip(*reversed(gradients), strict=True))

        stacked = params, carry, kept, d_ends, d_metrics
        d_hidden, (d_params, d_carry) = _loop(scan, repeat, d_hidden, stacked, reverse=True)
        return d_params, d_hidden, d_carry, None

    run.defvjp(forward, backward)
    return run(params, hidden, carry, plan)


def _forward(layers, params, hidden, carry, plan, scan, to_host=False):
    """(hidden, stacked (ends, metrics, kept)); kept: each layer's input and entry."""

    def repeat(hidden, stacked):
        results = []
        for layer, now, begin in zip(layers, *stacked, strict=True):
            given = hidden
            hidden, ends, entry, metrics = layer(now, hidden, begin, plan, None)
            kept = given, entry
            if to_host:
                kept = _moved(kept, jax.memory.Space.Host)
            results.append((ends, metrics, kept))
        return hidden, tuple(zip(*results, strict=True))

    return _loop(scan, repeat, hidden, (params, carry))


def _moved(tree: Tree, space: Any) -> Tree:
    """space: a jax.memory.Space."""
    return jax.tree.map(lambda x: jax.device_put(x, space), tree)


def _pull(layer: Layer, plan, d_hidden, params, carry, kept, d_ends, d_metrics):
    """(d_hidden before the layer, gradients of (params, carry))."""
    hidden, entry = kept

    def again(params, hidden, carry):
        hidden, ends, _, metrics = layer(params, hidden, carry, plan, entry)
        return hidden, ends, metrics

    _, pull = jax.vjp(again, params, hidden, carry)
    d_params, d_hidden, d_carry = pull((d_hidden, d_ends, d_metrics))
    return d_hidden, (d_params, d_carry)


def _loop(scan: bool, body, carry, xs, reverse: bool = False):
    """`jax.lax.scan`, or the same written out."""
    if scan:
        return jax.lax.scan(body, carry, xs, reverse=reverse)
    count = len(jax.tree.leaves(xs)[0])
    results: list[Any] = [None] * count
    for index in reversed(range(count)) if reverse else range(count):
        carry, results[index] = body(carry, jax.tree.map(lambda x, n=index: x[n], xs))
    return carry, jax.tree.map(lambda *layers: jnp.stack(layers), *results)
