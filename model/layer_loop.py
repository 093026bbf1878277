"""The loop over layers, with an explicit gradient.

A layer is a function

    (params, hidden, carry, plan, entry) -> (hidden, ends, entry, metrics)

With entry None it receives from the neighbouring context ranks what enters its rank (a recurrent
state, a convolution's last inputs) and returns it as `entry`. Given that entry, it repeats itself
without messages; its gradient is that of the first call.

The forward keeps each layer's input and entry, never its parameters as gathered for use. The
backward recomputes a layer from these, so that only cotangents pass between ranks: if states passed
again, the last rank, which is first in the backward, would wait for all ranks before it.

While the layers of one repeat are computed, matrices of the next are gathered (in the backward,
those of the previous one), and gradients of the repeat that the backward has just completed are
reduced. So a rank waits only for what others began a repeat ago; ahead.py says for which matrices.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from model.ahead import Ahead
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

    def repeat(hidden, stacked):
        hidden, (ends, metrics, _) = _repeat(layers, plan, hidden, *stacked)
        return hidden, (ends, metrics)

    return _loop(scan, repeat, hidden, (params, carry))


def run_layers_recomputed(
    ahead: Ahead,
    layers: list[Layer],
    params: Stacked,
    hidden: jax.Array,
    carry: Stacked,
    plan: Any,
    scan: bool,
    to_host: bool = False,
) -> tuple[jax.Array, tuple[Stacked, Stacked]]:
    """`run_layers` that keeps each layer's input and entry, and recomputes the rest.

    ahead: which matrices of the pattern's positions are gathered a repeat ahead, and how. to_host:
    inputs and entries are kept in the host's memory. A TPU copies them while it computes: out of
    the forward's loop a layer at a time, and back into the backward's.
    """
    if not ahead.in_pairs:
        return _recomputed(_Loop(layers, ahead, scan, to_host), params, hidden, carry, plan)
    loop = _Loop(layers * 2, ahead.paired(), scan, to_host)
    params, carry = _in_pairs(params[0]), _in_pairs(carry[0])
    hidden, (ends, metrics) = _recomputed(loop, params, hidden, carry, plan)
    return hidden, ((_one_by_one(ends),), (_one_by_one(metrics),))


def _recomputed(loop: "_Loop", params: Stacked, hidden: jax.Array, carry: Stacked, plan: Any):
    """See `run_layers_recomputed`."""

    @jax.custom_vjp
    def run(params, hidden, carry, plan):
        hidden, (ends, metrics, _) = loop.forward(params, hidden, carry, plan)
        return hidden, (ends, metrics)

    def forward(params, hidden, carry, plan):
        hidden, (ends, metrics, kept) = loop.forward(params, hidden, carry, plan)
        return (hidden, (ends, metrics)), (params, carry, plan, kept)

    def backward(saved, cotangents):
        params, carry, plan, kept = saved
        d_hidden, (d_ends, d_metrics) = cotangents
        stacked = carry, kept, d_ends, d_metrics
        d_params, d_hidden, d_carry = loop.backward(params, d_hidden, plan, stacked)
        return d_params, d_hidden, d_carry, None

    run.defvjp(forward, backward)
    return run(params, hidden, carry, plan)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The forward and the backward of `run_layers_recomputed`."""

    layers: list[Layer]
    ahead: Ahead
    scan: bool
    to_host: bool

    def forward(self, params: Stacked, hidden: jax.Array, carry: Stacked, plan: Any):
        """(hidden, stacked (ends, metrics, kept)); kept: each layer's input and entry."""
        matrices, others = self.ahead.split(params)
        last = _length(others) - 1

        def repeat(state, stacked):
            (hidden, copies), (index, others, carry) = state, stacked
            following = self._gather(matrices, jnp.minimum(index + 1, last))
            params = self.ahead.join(copies, others)
            hidden, results = _repeat(self.layers, plan, hidden, params, carry, self.to_host)
            return (hidden, following), results

        begin = hidden, self._gather(matrices, 0)
        stacked = jnp.arange(last + 1), others, carry
        (hidden, _), results = _loop(self.scan, repeat, begin, stacked)
        return hidden, results

    def backward(self, params: Stacked, d_hidden: jax.Array, plan: Any, stacked: Stacked):
        """Gradients of params, hidden and carry. stacked: what `_pull` takes after params."""
        matrices, others = self.ahead.split(params)
        last = _length(others) - 1

        def repeat(state, stacked):
            (d_hidden, copies, shares, sums), (index, others, stacked) = state, stacked
            following = self._gather(matrices, jnp.maximum(index - 1, 0))
            sums = self._put(sums, shares, jnp.minimum(index + 1, last))
            if not self.scan:  # else the compiler merges what is computed again with the first time
                stacked = jax.lax.optimization_barrier(stacked)
            params = self.ahead.join(copies, others)
            d_hidden, (d_params, d_carry) = _pull_repeat(
                self.layers, plan, d_hidden, (params, *stacked), self.to_host
            )
            shares, d_others = self.ahead.split_gradient(d_params)
            return (d_hidden, following, shares, sums), (d_others, d_carry)

        begin = (
            d_hidden,
            self._gather(matrices, last),
            self.ahead.no_shares(),
            self.ahead.no_gradient(matrices),
        )
        stacked = jnp.arange(last + 1), others, stacked
        state, (d_others, d_carry) = _loop(self.scan, repeat, begin, stacked, reverse=True)
        d_hidden, _, shares, sums = state
        return _merged(self._put(sums, shares, 0), d_others), d_hidden, d_carry

    def _gather(self, matrices: Stacked, index) -> Stacked:
        """Copies of the matrices of one repeat."""
        return self.ahead.gather(
            jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), matrices)
        )

    def _put(self, sums: Stacked, shares: Stacked, index) -> Stacked:
        """Gradients with those of one repeat, reduced."""
        put = jax.lax.dynamic_update_index_in_dim
        return jax.tree.map(lambda x, new: put(x, new, index, 0), sums, self.ahead.reduce(shares))


def _repeat(layers: list[Layer], plan, hidden, params, carry, to_host: bool = False):
    """One repeat: (hidden, (ends, metrics, kept) over its positions)."""
    results = []
    for layer, now, begin in zip(layers, params, carry, strict=True):
        given = hidden
        hidden, ends, entry, metrics = layer(now, hidden, begin, plan, None)
        kept = given, entry
        if to_host:
            kept = _moved(kept, jax.memory.Space.Host)
        results.append((ends, metrics, kept))
    return hidden, tuple(zip(*results, strict=True))


def _pull_repeat(layers: list[Layer], plan, d_hidden, stacked, from_host: bool):
    """(d_hidden before a repeat, gradients of (params, carry) over its positions)."""
    gradients = []
    for layer, *now in reversed(list(zip(layers, *stacked, strict=True))):
        if from_host:
            now[2] = _moved(now[2], jax.memory.Space.Device)
        d_hidden, gradient = _pull(layer, plan, d_hidden, *now)
        gradients.append(gradient)
    return d_hidden, tuple(zip(*reversed(gradients), strict=True))


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


def _merged(first: Tree, second: Tree) -> Tree:
    """A tree with second's leaves where first has None."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, first, second, is_leaf=lambda x: x is None
    )


def _in_pairs(layers: Tree) -> Stacked:
    """Arrays [R, ...] of one position -> [R / 2, ...] of two."""
    folded = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), layers)
    return tuple(jax.tree.map(lambda x, n=n: x[:, n], folded) for n in range(2))


def _one_by_one(positions: Stacked) -> Tree:
    """The inverse of `_in_pairs`."""
    return jax.tree.map(lambda *xs: jnp.stack(xs, 1).reshape(-1, *xs[0].shape[1:]), *positions)


def _length(stacked: Stacked) -> int:
    return jax.tree.leaves(stacked)[0].shape[0]


def _loop(scan: bool, body, carry, xs, reverse: bool = False):
    """`jax.lax.scan`, or the same written out."""
    if scan:
        return jax.lax.scan(body, carry, xs, reverse=reverse)
    count = _length(xs)
    results: list[Any] = [None] * count
    for index in reversed(range(count)) if reverse else range(count):
        carry, results[index] = body(carry, jax.tree.map(lambda x, n=index: x[n], xs))
    return carry, jax.tree.map(lambda *layers: jnp.stack(layers), *results)
