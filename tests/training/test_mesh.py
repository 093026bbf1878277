"""Meshes over absent topologies: neighbours inside a slice, and which axes may cross slices."""

import itertools
import os

os.environ.update(
    TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1"
)

import jax
import pytest
from jax.experimental import topologies

from errors import UserError
from model.axes import CONTEXT, DATA, FSDP, MESH_AXES, TENSOR
from training.mesh import arrange


def devices_of(name: str, slices: int = 1):
    described = topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices)
    return described.devices


@pytest.mark.parametrize(("ranks", "most"), [(16, 1), (8, 2)])
def test_neighbours_on_the_context_axis_are_neighbours_in_the_machine(ranks, most):
    """In the order of their numbers, the next rank is up to four links away."""
    devices = devices_of("v6e:4x4")
    mesh = arrange({FSDP: len(devices) // ranks, CONTEXT: ranks}, devices)
    for row in mesh.devices.reshape(-1, ranks):
        hops = [
            sum(abs(a - b) for a, b in zip(one.coords, next_.coords))
            for one, next_ in itertools.pairwise(row)
        ]
        assert max(hops) == most, hops
    assert mesh.axis_names == MESH_AXES and set(mesh.devices.flat) == set(devices)


@pytest.mark.parametrize("sizes", [{DATA: 2, CONTEXT: 4}, {FSDP: 2, CONTEXT: 2, TENSOR: 2}])
def test_only_data_and_fsdp_cross_slices(sizes):
    mesh = arrange(sizes, devices_of("v6e:2x2", slices=2))
    rows = mesh.devices.reshape(2, 4)
    assert [{device.slice_index for device in row} for row in rows] == [{0}, {1}]


@pytest.mark.parametrize(
    ("sizes", "works"),
    [
        ({CONTEXT: 8}, "try --config.mesh.data=2 --config.mesh.context=4$"),
        ({CONTEXT: 2, TENSOR: 4}, "try --config.mesh.data=2 --config.mesh.context=1$"),
        ({TENSOR: 8}, "try --config.mesh.data=2 --config.mesh.tensor=4$"),
    ],
)
def test_a_context_axis_across_slices_is_refused(sizes, works):
    with pytest.raises(UserError, match=r"2 slices.*needs a multiple of 2; " + works):
        arrange(sizes, devices_of("v6e:2x2", slices=2))


def test_some_devices_of_this_machine():
    assert arrange({TENSOR: 2}, jax.devices()[:2]).shape[TENSOR] == 2
