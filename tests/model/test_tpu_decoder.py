"""The main config's training step compiles for TPUs and runs our kernels in every KDA layer."""

import math
import os
import re

os.environ.update(
    TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1"
)

import pytest
from jax.experimental import topologies

from configs import kda_cp4
from training.estimate.compile import abstract_step

pytestmark = pytest.mark.slow


def compiled_step(topology: str, mesh: dict[str, int] | None = None, **model) -> str:
    """HLO text of the main config's training step on devices of a topology, by default four."""
    config = kda_cp4.get_config()
    config.model.update(**model)
    config.mesh.update(mesh or {})
    config.data.global_batch_size *= config.mesh.data * config.mesh.fsdp
    config.data.sequence_length = max(config.data.sequence_length, 64 * config.mesh.context)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    step, arguments, *_ = abstract_step(devices, config, 258)
    return step.lower(*arguments).compile().as_text()


@pytest.mark.parametrize(
    ("topology", "model"),
    [("tpu7x:2x2x1", {}), ("tpu7x:2x2x1", {"compute_dtype": "float32"}), ("v6e:2x2", {})],
)
def test_every_kda_layer_of_the_main_config_runs_both_kernels(topology, model):
    # A layer's kernels once for each layer.
    text = compiled_step(topology, remat="none", scan_layers=False, **model)
    kernels = [line for line in text.splitlines() if "tpu_custom_call" in line]
    layers = kda_cp4.get_config().model.num_repeats
    for name in ("kda_forward", "kda_backward"):
        count = sum(name in line for line in kernels)
        assert count == layers, f"{count} calls of {name} in {layers} layers: {kernels}"


def test_the_main_config_compiles_as_it_stands():
    """Layers scanned, and rematerialised: the forward runs twice."""
    text = compiled_step("tpu7x:2x2x1")
    kernels = [line for line in text.splitlines() if "tpu_custom_call" in line]
    assert sum("kda_forward" in line for line in kernels) == 2, kernels
    assert sum("kda_backward" in line for line in kernels) == 1, kernels


def test_new_parameters_are_not_copied():
    """Ranks divide the update; the gathered result is added to the old parameters in place."""
    text = compiled_step("tpu7x:2x2x1")
    copied = re.findall(r"= f32\[([\d,]+)\]\S* copy\(%all-gather", text)
    sizes = [math.prod(map(int, shape.split(","))) for shape in copied]
    assert text.count("all-gather(") > 10 and max(sizes, default=0) < 100, copied


@pytest.mark.parametrize(
    ("topology", "mesh"),
    [
        ("v6e:8x8", {"context": 64}),
        ("v6e:4x4", {"data": 2, "fsdp": 2, "context": 2, "tensor": 2}),
    ],
)
def test_the_step_compiles_over_64_context_ranks_and_over_all_axes(topology, mesh):
    text = compiled_step(topology, mesh, num_repeats=1)
    kernels = [line for line in text.splitlines() if "tpu_custom_call" in line]
    assert sum("kda_forward" in line for line in kernels) == 2, kernels
    assert sum("kda_backward" in line for line in kernels) == 1, kernels
    devices = math.prod(mesh.values())
    assert f"num_partitions={devices}" in text
