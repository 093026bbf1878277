"""The mesh: devices ordered so that neighbours along an axis are neighbours in the machine."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from errors import UserError
from model.axes import CONTEXT, DATA, FSDP, MESH_AXES, TENSOR

CROSSING = (DATA, FSDP)  # axes that may cross slices: they communicate once per layer or step


def arrange(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """The mesh over all of `devices`, in one slice or in several that a slower network (DCN)
    connects.

    Args:
        sizes: devices along each axis; missing axes have size 1. The product is the number of
            devices.

    Raises:
        UserError: data and fsdp do not divide into the slices, so that context or tensor would
            cross them.
    """
    shape = {axis: sizes.get(axis, 1) for axis in MESH_AXES}
    slices = len({_slice_of(device) for device in devices})
    across = _across(shape, slices)
    within = [size // across[axis] for axis, size in shape.items()]
    if slices == 1:
        array = mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
    else:
        array = mesh_utils.create_hybrid_device_mesh(
            within, list(across.values()), devices, allow_split_physical_axes=True
        )
    return Mesh(np.asarray(array), MESH_AXES)


def _slice_of(device: jax.Device) -> int:
    """The number of a TPU's slice; 0 if there is only one. Other platforms may count hosts by the
    same name, between which nothing is refused."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def _across(shape: Mapping[str, int], slices: int) -> dict[str, int]:
    """The number of slices over which each axis extends: as many as possible for data, the rest for
    fsdp."""
    across, left = dict.fromkeys(shape, 1), slices
    for axis in CROSSING:
        across[axis] = math.gcd(shape[axis], left)
        left //= across[axis]
    if left > 1:
        raise UserError(
            f"config.mesh: the devices are in {slices} slices, and only data and fsdp may cross "
            f"the slower network between them; data x fsdp ({shape[DATA]} x {shape[FSDP]}) needs "
            f"a multiple of {slices}; try {_narrower(shape, left)}"
        )
    return across


def _narrower(shape: Mapping[str, int], left: int) -> str:
    """A change that takes the missing factor from context, or from tensor."""
    for axis in (CONTEXT, TENSOR):
        if shape[axis] % left == 0:
            data = f"--config.mesh.data={shape[DATA] * left}"
            return f"{data} --config.mesh.{axis}={shape[axis] // left}"
    return "devices of one slice"
