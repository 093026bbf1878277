"""Matrices gathered for use: each token rank has its own copy, and its own share of the gradient.

A matrix is kept divided over fsdp and context (`ParamSpec.partition`) and used whole. Products with
it (`layers.matmul`) take the rank's copy; what they give to its gradient stays on the rank until
`reduce` sums the shares of all ranks and divides the sum as the matrix is kept. Both steps are
functions of their own, so that the loop over layers can begin them a layer early or end them a
layer late.

Axes: I input, O output of a matrix; ranks are those of `TOKENS`.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels.vma import vary
from model.axes import TENSOR, TOKENS, ParamSpec, Tree

Stages = list[tuple[str, ...]]  # mesh axes of each message of one exchange
_V6E_RANKS = 8


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("copies", "shares"),
    meta_fields=("spec", "mesh"),
)
@dataclasses.dataclass(frozen=True)
class Gathered:
    """A matrix as products take it.

    Attributes:
        copies: [ranks, I, O] in the compute dtype, one copy a token rank. It has no gradient.
        shares: zeros [ranks, I, O] float32, whose gradient is each rank's share of the matrix's.
            Nothing reads the values, so compiled programs do not contain them.
        spec: how I and O are divided over tensor.
    """

    copies: jax.Array
    shares: jax.Array
    spec: PartitionSpec
    mesh: Mesh


def takes(spec: ParamSpec) -> bool:
    """Whether layers use a parameter in this form: a matrix that only products read."""
    return spec.is_matrix and spec.cast and len(spec.axes) == 2


def gather(
    params: Sequence[jax.Array], specs: Sequence[ParamSpec], dtype: str, mesh: Mesh
) -> list[jax.Array]:
    """Matrices [I, O] float32 at rest -> copies [ranks, I, O]; not differentiable, see `use`.

    Those that are gathered along one dimension of the same size travel in one message.
    """
    if not params:
        return []

    def cast(param: jax.Array) -> jax.Array:
        # Rounded first, which changes nothing: XLA would otherwise cast the matrices of all layers
        # before the loop over layers, and hold both copies throughout.
        kind = jnp.finfo(dtype)
        return jax.lax.reduce_precision(param, kind.nexp, kind.nmant).astype(dtype)

    def on_rank(params: list[jax.Array]) -> list[jax.Array]:
        whole = _exchanged(params, specs, mesh, _all_gather)
        return [vary(x, TOKENS)[None] for x in whole]

    island = jax.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=([spec.partition(mesh) for spec in specs],),
        out_specs=[_of_ranks(spec) for spec in specs],
    )
    return island([cast(param) for param in params])


def reduce(shares: Sequence[jax.Array], specs: Sequence[ParamSpec], mesh: Mesh) -> list[jax.Array]:
    """Shares [ranks, I, O] float32 -> their sums [I, O], divided as the matrices are at rest.

    Those that are divided along one dimension of the same size travel in one message.
    """
    if not shares:
        return []

    def on_rank(shares: list[jax.Array]) -> list[jax.Array]:
        sums = _exchanged([x[0] for x in shares], specs, mesh, _reduce_scatter)
        return [_over_other_axes(x, spec, mesh) for x, spec in zip(sums, specs, strict=True)]

    island = jax.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=([_of_ranks(spec) for spec in specs],),
        out_specs=[spec.partition(mesh) for spec in specs],
    )
    return island(list(shares))


def hold(copies: jax.Array, spec: ParamSpec, mesh: Mesh) -> Gathered:
    """Copies as products take them."""
    shares = no_shares(spec, mesh)
    return Gathered(copies, shares, spec.use_partition, mesh)


def no_shares(spec: ParamSpec, mesh: Mesh) -> jax.Array:
    """Shares of a gradient that is zero."""
    ranks = math.prod(mesh.shape[axis] for axis in TOKENS)
    zeros = jnp.zeros((ranks, *spec.shape), jnp.float32)
    return jax.lax.with_sharding_constraint(zeros, jax.NamedSharding(mesh, _of_ranks(spec)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def use(param: jax.Array, spec: ParamSpec, dtype: str, mesh: Mesh) -> Gathered:
    """`gather` and `hold` of one matrix; its gradient is reduced where it arises."""
    return hold(gather([param], [spec], dtype, mesh)[0], spec, mesh)


def _use_forward(param, spec, dtype, mesh):
    return use(param, spec, dtype, mesh), None


def _use_backward(spec, dtype, mesh, _, gradient: Gathered):
    return tuple(reduce([gradient.shares], [spec], mesh))


use.defvjp(_use_forward, _use_backward)


def finish_with(params: Tree, x: jax.Array) -> tuple[Tree, jax.Array]:
    """Both unchanged. In the backward, the shares of the parameters' gradients are computed before
    the gradient of x is used: else the compiler computes them last, and their sums over ranks begin
    when little work is left to hide them."""

    def is_gathered(x: Any) -> bool:
        return isinstance(x, Gathered)

    leaves, structure = jax.tree.flatten(params, is_leaf=is_gathered)
    given = [leaf.shares for leaf in leaves if is_gathered(leaf)]
    shares, x = _finish_with(given, x)
    now = iter(shares)
    leaves = [
        dataclasses.replace(leaf, shares=next(now)) if is_gathered(leaf) else leaf
        for leaf in leaves
    ]
    return jax.tree.unflatten(structure, leaves), x


@jax.custom_vjp
def _finish_with(shares, x):
    return shares, x


_finish_with.defvjp(
    lambda shares, x: ((shares, x), None),
    lambda _, gradients: jax.lax.optimization_barrier(gradients),
)


def _of_ranks(spec: ParamSpec) -> PartitionSpec:
    return PartitionSpec(TOKENS, *spec.use_partition)


def _exchanged(
    pieces: list[jax.Array],
    specs: Sequence[ParamSpec],
    mesh: Mesh,
    exchange: Callable[[jax.Array, int, Stages], jax.Array],
) -> list[jax.Array]:
    """Each piece after its exchanges; pieces with one and the same exchange are joined for it."""
    groups = collections.defaultdict(list)
    for number, spec in enumerate(specs):
        exchanges = tuple(_exchanges(spec, mesh))
        sizes = tuple(spec.shape[dimension] for dimension, _ in exchanges)
        groups[exchanges, sizes, TENSOR in spec.use_partition].append(number)
    found = list(pieces)
    for (exchanges, *_), numbers in groups.items():
        if len(exchanges) == 1:
            ((dimension, axes),) = exchanges
            joined = jnp.concatenate([pieces[n] for n in numbers], axis=1 - dimension)
            ends = itertools.accumulate(pieces[n].shape[1 - dimension] for n in numbers)
            joined = exchange(joined, dimension, _stages(axes, mesh))
            parts = jnp.split(joined, list(ends)[:-1], 1 - dimension)
            for number, part in zip(numbers, parts, strict=True):
                found[number] = part
            continue
        for number in numbers:
            for dimension, axes in exchanges:
                found[number] = exchange(found[number], dimension, _stages(axes, mesh))
    return found


def _all_gather(x: jax.Array, dimension: int, stages: Stages) -> jax.Array:
    for axes in reversed(stages):
        x = jax.lax.all_gather(x, axes, axis=dimension, tiled=True)
    return x


def _reduce_scatter(x: jax.Array, dimension: int, stages: Stages) -> jax.Array:
    for axes in stages:
        x = jax.lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)
    return x


def _stages(axes: tuple[str, ...], mesh: Mesh) -> Stages:
    """The axes of each message of an exchange, in the order of a sum: all axes in one message, but
    one message per axis on v6e if they have more than `_V6E_RANKS` devices. There the SparseCores
    take no larger message over several axes (libtpu 0.0.52): a gather would be synchronous, and a
    reduce-scatter an all-reduce."""
    ranks = math.prod(mesh.shape[axis] for axis in axes)
    if mesh.devices.flat[0].device_kind != "TPU v6 lite" or ranks <= _V6E_RANKS:
        return [axes]
    return [(axis,) for axis in axes]


def _over_other_axes(total: jax.Array, spec: ParamSpec, mesh: Mesh) -> jax.Array:
    """The sum over the token ranks' axes that do not divide the matrix at rest."""
    scattered = {axis for _, axes in _exchanges(spec, mesh) for axis in axes}
    others = tuple(axis for axis in TOKENS if axis not in scattered)
    return jax.lax.psum(total, others) if others else total


def _exchanges(spec: ParamSpec, mesh: Mesh) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(dimension, mesh axes that divide it at rest but not in use)."""
    kept, used = spec.partition(mesh), spec.use_partition
    for dimension, (at_rest, in_use) in enumerate(zip(kept, used, strict=True)):
        names = at_rest if isinstance(at_rest, tuple) else (at_rest,) if at_rest else ()
        axes = tuple(axis for axis in names if axis != in_use)
        if axes:
            yield dimension, axes
