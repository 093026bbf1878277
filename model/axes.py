"""Mesh axes, what is split along them, and `ParamSpec`, the description of one parameter.

Mesh axes: "data", "fsdp" and "expert" split rows, "context" tokens, "tensor" heads, FFN columns and
the vocabulary; "expert" also splits the experts of a layer. Parameters are sharded over "tensor"
along heads, FFN and vocabulary, and matrices over "fsdp", "expert" and "context" along the first
axis that is divisible; every "data" rank holds all of them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

DATA, FSDP, EXPERT, CONTEXT, TENSOR = MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
ROWS = (DATA, FSDP, EXPERT)
TOKENS = (*ROWS, CONTEXT)
TOKEN_SPEC = PartitionSpec(ROWS, CONTEXT)  # [B, T] and [B, T, D]

Tree = Any  # a pytree; JAX has no public type for one
Arrays = dict[str, Any]  # a pytree of arrays whose root is a dict
Specs = Mapping[str, Any]  # a pytree of ParamSpec whose root is a dict

AT_REST = (FSDP, EXPERT, CONTEXT)  # mesh axes that shard matrices in storage, but not in use
_TENSOR_AXES = ("vocab", "heads", "ffn")  # divided over "tensor": the first that a parameter has
_INNER_AXES = ("width", "gate_rank", "kv_rank")  # a parameter with one of these is a matrix

Init = Callable[[jax.Array, tuple[int, ...]], jax.Array]


class MeshNeed(NamedTuple):
    """A mesh axis must divide the size of an option of config.model."""

    axis: str
    option: str
    size: int


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter. All are float32; they are cast when they are used.

    Attributes:
        shape: elements along each axis. axes: what each axis is: "repeats", "width", "gate_rank",
            "kv_rank", "vocab", "heads", "ffn", "experts", or "whole", which is never divided.
        init: (key, shape) -> float32 array. decays: weight decay applies.
        cast: layers use it in the compute dtype; the others stay float32.
        muon: the last two axes are a matrix (input, output) that Muon may orthogonalise; "repeats"
            and "experts" before them stack such matrices.
        trained: the optimizer changes it; the others change in `FeedForward.after_step`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    decays: bool
    cast: bool
    muon: bool
    trained: bool = True

    @property
    def is_matrix(self) -> bool:
        """Whether `AT_REST` divides it where it is kept; the others are small and stay whole."""
        return any(axis in _INNER_AXES for axis in self.axes)

    @property
    def use_partition(self) -> PartitionSpec:
        """How it is divided where it is used: over tensor, and experts over expert."""
        named = [axis for axis in self.axes if axis in _TENSOR_AXES][:1]
        cut = dict.fromkeys(named, TENSOR) | {"experts": EXPERT}
        return PartitionSpec(*map(cut.get, self.axes))

    def partition(self, mesh: Mesh) -> PartitionSpec:
        """How it is divided at rest: a matrix over `AT_REST`, too.

        Along one axis if one is divisible by all of them, trying the residual width first;
        otherwise each mesh axis divides another axis. A mesh axis that divides none leaves it
        whole. Small parameters stay whole.
        """
        if not self.is_matrix:
            return self.use_partition
        divided: list[tuple[str, ...]] = [(axis,) if axis else () for axis in self.use_partition]
        missing = tuple(axis for axis in AT_REST if axis not in self.use_partition)
        if not self._divide(divided, missing, mesh):
            for axis in missing:
                self._divide(divided, (axis,), mesh)
        return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in divided))

    def _divide(self, divided: list[tuple[str, ...]], axes: tuple[str, ...], mesh: Mesh) -> bool:
        """Adds mesh axes to the first axis divisible by them; returns whether there is one."""
        candidates = [n for n, axis in enumerate(self.axes) if axis != "repeats"]
        for n in sorted(candidates, key=lambda n: self.axes[n] not in _INNER_AXES):
            if self.shape[n] % math.prod(mesh.shape[axis] for axis in (*divided[n], *axes)) == 0:
                divided[n] += axes
                return True
        return False


def matrix(
    shape: tuple[int, ...], axes: tuple[str, ...], std: float, *, muon: bool = True
) -> ParamSpec:
    """A matrix, initialised normally with this standard deviation; it decays and is cast."""

    def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return std * jax.random.normal(key, shape, jnp.float32)

    return ParamSpec(shape, axes, init, decays=True, cast=True, muon=muon)


def vector(shape: tuple[int, ...], axes: tuple[str, ...], init: Init) -> ParamSpec:
    """A parameter that neither decays nor is cast."""
    return ParamSpec(shape, axes, init, decays=False, cast=False, muon=False)


def gain(size: int) -> ParamSpec:
    """The gain of a norm, initialised to ones."""
    return vector((size,), ("whole",), lambda key, shape: jnp.ones(shape, jnp.float32))


def matrix_flops(specs: Tree) -> float:
    """Forward FLOPs per token of multiplying by every matrix of a tree of `ParamSpec`."""
    return 2.0 * sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs) if spec.cast)
