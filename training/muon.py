"""Muon for sharded matrices: each matrix is orthogonalised as a whole, on one rank.

Gradients and momenta are sharded like the parameters, but Newton-Schulz needs whole matrices.
Matrices of the same shape and sharding are stacked, padded to a multiple of the ranks, exchanged so
that each rank holds some of them whole, orthogonalised there, and exchanged back. A rank sends and
receives its own share of the momenta twice. Gathering would send all of them to every rank, and
every rank would repeat all products.

The state is that of `optax.contrib.scale_by_muon`, so the names in checkpoints are the same.
"""

import collections
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic, for five steps
_STEPS = 5
_EPS = 1e-8

Placements = dict[str, NamedSharding]  # by the parameter's path, in the form of `keystr`


def scale_by_muon(beta: float, shardings: Any) -> optax.GradientTransformation:
    """Nesterov momentum, bias-corrected, then the nearest (semi-)orthogonal matrix.

    Args:
        shardings: tree of `NamedSharding` of all parameters, including those of other rules. The
            parameters passed to the update are stacks of matrices [R, I, O] or, for experts,
            [R, E, I, O].
    """
    placements = {
        jax.tree_util.keystr(path): sharding
        for path, sharding in jax.tree_util.tree_leaves_with_path(shardings)
    }

    def init(params: Any) -> optax.contrib.MuonState:
        momenta = jax.tree.map(jnp.zeros_like, params)
        return optax.contrib.MuonState(jnp.int32(0), momenta, jnp.asarray(_COEFFICIENTS))

    def update(gradients, state, params=None):
        count = optax.safe_increment(state.count)
        momenta = optax.tree.update_moment(gradients, state.mu, beta, 1)
        ahead = optax.tree.bias_correction(momenta, beta, optax.safe_increment(count))
        here = optax.tree.bias_correction(gradients, beta, count)
        mixed = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, here)
        updates = _orthogonalise(mixed, state.ns_coeffs, placements)
        return updates, optax.contrib.MuonState(count, momenta, state.ns_coeffs)

    return optax.GradientTransformation(init, update)


def scale_by_size(factor: float) -> optax.GradientTransformation:
    """Scales an orthogonal [I, O] by factor * sqrt(max(I, O)), to an RMS of `factor`."""

    def update(updates, params=None):
        return jax.tree.map(lambda x: math.sqrt(max(x.shape[-2:])) * factor * x, updates)

    return optax.stateless(update)


def _orthogonalise(tree: Any, coefficients: jax.Array, placements: Placements) -> Any:
    """`newton_schulz` of every matrix of a tree of stacks [R, ..., I, O], each on one rank."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    groups = collections.defaultdict(list)
    for number, (path, stack) in enumerate(leaves):
        placement = placements[jax.tree_util.keystr(path)]
        groups[stack.shape[1:], placement].append(number)
    found = [stack for _, stack in leaves]
    for (_, placement), numbers in groups.items():
        spec = placement.spec
        share = jax.shard_map(
            functools.partial(_share, spec), mesh=placement.mesh,
            in_specs=(PartitionSpec(), spec), out_specs=spec,
        )  # fmt: skip
        for number, stack in zip(numbers, share(coefficients, [found[n] for n in numbers])):
            found[number] = stack
    return jax.tree.unflatten(structure, found)


def _share(spec: PartitionSpec, coefficients: jax.Array, stacks: list[jax.Array]):
    """One rank's shards of stacks of one shape -> the same shards, orthogonalised.

    Nothing is exchanged along axes that shard only the stack of matrices, not each matrix.
    """
    shapes, (inputs, outputs) = [stack.shape for stack in stacks], spec[-2:]
    exchanges = [(dimension, axes) for dimension, axes in ((1, inputs), (2, outputs)) if axes]
    ranks = math.prod(jax.lax.axis_size(axes) for _, axes in exchanges)
    stacks = [stack.reshape(-1, *stack.shape[-2:]) for stack in stacks]
    pieces = jnp.concatenate(stacks)
    x = jnp.pad(pieces, ((0, -pieces.shape[0] % ranks), (0, 0), (0, 0)))
    for dimension, axes in exchanges:
        x = jax.lax.all_to_all(x, axes, 0, dimension, tiled=True)
    x = jax.vmap(newton_schulz, (0, None))(x, coefficients)
    for dimension, axes in reversed(exchanges):
        x = jax.lax.all_to_all(x, axes, dimension, 0, tiled=True)
    ends = list(itertools.accumulate(stack.shape[0] for stack in stacks))
    whole = zip(ends, stacks, shapes)
    return [x[end - stack.shape[0] : end].reshape(shape) for end, stack, shape in whole]


def newton_schulz(x: jax.Array, coefficients: jax.Array) -> jax.Array:
    """A matrix [I, O] with about the same singular vectors and singular values near 1."""
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T, coefficients).T
    x = x / (jnp.linalg.norm(x) + _EPS)
    a, b, c = coefficients
    for _ in range(_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
