"""Mesh axes, what is cut along them, and `ParamSpec`, the description of one parameter.

Mesh axes: "data" and "fsdp" divide rows, "context" tokens, "tensor" heads, FFN columns and the
vocabulary. Parameters are divided over "fsdp" along the residual width and over "tensor" along
heads, FFN and vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

DATA, FSDP, CONTEXT, TENSOR = MESH_AXES = ("data", "fsdp", "context", "tensor")
ROWS = (DATA, FSDP)
TOKENS = (*ROWS, CONTEXT)
TOKEN_SPEC = PartitionSpec(ROWS, CONTEXT)  # [B, T] and [B, T, D]

Tree = Any  # a pytree; JAX has no public type for one
Arrays = dict[str, Any]  # a pytree of arrays whose root is a dict
Specs = Mapping[str, Any]  # a pytree of ParamSpec whose root is a dict

# Which mesh axis divides an axis of a parameter. A mesh axis divides one axis of a parameter at
# most, the first that asks for it.
_MESH_AXIS = {
    "repeats": None,
    "vocab": TENSOR,
    "width": FSDP,
    "gate_rank": FSDP,
    "heads": TENSOR,
    "ffn": TENSOR,
    "whole": None,
}

Init = Callable[[jax.Array, tuple[int, ...]], jax.Array]


class MeshNeed(NamedTuple):
    """A mesh axis must divide the size of an option of config.model."""

    axis: str
    option: str
    size: int


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter. All are float32; they are cast where they are used.

    Attributes:
        shape: elements along each axis. axes: what each axis is, a key of `_MESH_AXIS`.
        init: (key, shape) -> float32 array. decays: weight decay applies.
        cast: layers use it in the compute dtype; the others stay float32.
        muon: the last two axes are a matrix (input, output) that Muon may orthogonalise; a leading
            "repeats" axis stacks such matrices.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    decays: bool
    cast: bool
    muon: bool

    @property
    def partition(self) -> PartitionSpec:
        """How it is divided at rest."""
        taken: list[str | None] = []
        for axis in self.axes:
            mesh_axis = _MESH_AXIS[axis]
            taken.append(None if mesh_axis in taken else mesh_axis)
        return PartitionSpec(*taken)

    @property
    def use_partition(self) -> PartitionSpec:
        """How it is divided where it is used: gathered over fsdp."""
        return PartitionSpec(*(None if axis == FSDP else axis for axis in self.partition))


def matrix(
    shape: tuple[int, ...], axes: tuple[str, ...], std: float, *, muon: bool = True
) -> ParamSpec:
    """A matrix, normal with this standard deviation; it decays and is cast."""

    def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return std * jax.random.normal(key, shape, jnp.float32)

    return ParamSpec(shape, axes, init, decays=True, cast=True, muon=muon)


def vector(shape: tuple[int, ...], axes: tuple[str, ...], init: Init) -> ParamSpec:
    """A parameter that neither decays nor is cast."""
    return ParamSpec(shape, axes, init, decays=False, cast=False, muon=False)


def gain(size: int) -> ParamSpec:
    """The gain of a norm, ones."""
    return vector((size,), ("whole",), lambda key, shape: jnp.ones(shape, jnp.float32))


def matrix_flops(specs: Tree) -> float:
    """Forward FLOPs a token of multiplying with every matrix of a tree of `ParamSpec`."""
    return 2.0 * sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs) if spec.cast)
