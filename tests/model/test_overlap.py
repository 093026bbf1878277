"""What runs while matrices are gathered and gradients reduced, read from compiled steps."""

import os

os.environ.update(
    TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1"
)

import pytest
from jax.experimental import topologies

from configs import kda_cp4
from model.axes import CONTEXT, MESH_AXES
from training.estimate import hlo
from training.estimate.collectives import Collective, collectives
from training.estimate.compile import abstract_step
from training.estimate.program import Work, is_kernel, works

pytestmark = pytest.mark.slow

# Whole slices: with a part of one, tpu7x leaves collectives to the TensorCores.
CASES = [
    ("v6e:2x2", {"context": 4}),
    ("v6e:4x4", {"fsdp": 4, "context": 4}),
    ("tpu7x:2x1x1", {"context": 4}),
    ("tpu7x:2x2x2", {"fsdp": 4, "context": 4}),
]


def program(topology: str, mesh: dict[str, int], **model) -> tuple[list[Work], list[Collective]]:
    """The main config's step: its instructions, and collectives over context inside its loops."""
    config = kda_cp4.get_config()
    config.mesh.update(dict.fromkeys(MESH_AXES, 1) | mesh)
    config.data.global_batch_size *= mesh.get("fsdp", 1)
    config.model.update(**model)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    step, arguments, *_ = abstract_step(devices, config, 258)
    module = hlo.parse(step.lower(*arguments).compile().as_text())
    found = works(module, {})
    sizes = {axis: config.mesh[axis] for axis in MESH_AXES}
    exchanged = collectives(module, found, sizes)
    return found, [c for c in exchanged if c.loops and CONTEXT in c.axes]


def hidden_by(found: list[Work], collective: Collective) -> set[str]:
    """Of "kda" and "ffn": what runs between a collective's begin and its end."""
    names = [work.visit.instruction.name for work in found]
    between = found[names.index(collective.begin) : names.index(collective.done)]
    seen = set()
    for work in between:
        instruction = work.visit.instruction
        if is_kernel(instruction) and instruction.name.startswith("kda_"):
            seen.add("kda")
        if "/ffn/" in instruction.op_name and "dot_general" in instruction.op_name:
            seen.add("ffn")
    return seen


def faults(found: list[Work], exchanged: list[Collective], staged: bool = False) -> list[str]:
    """Collectives of matrices and gradients that a rank waits for in the loop over layers.

    staged: an exchange is a message per mesh axis; of those over context alone, no more is asked
    than that they are asynchronous.
    """
    bad = []
    for each in exchanged:
        if each.kind in ("all-reduce", "all-to-all") or not each.asynchronous:
            bad.append(f"{each.kind} {each.bytes}: synchronous")
        elif staged:
            continue
        elif each.kind != "collective-permute" and not hidden_by(found, each):
            bad.append(f"{each.kind} {each.bytes}: neither kernel nor feed-forward product")
    return bad


@pytest.mark.parametrize(("topology", "mesh"), CASES)
def test_gathers_and_reductions_run_beside_the_layers(topology, mesh):
    found, exchanged = program(topology, mesh)
    staged = topology == "v6e:4x4"  # see gathered.py: more devices than one message can have
    assert faults(found, exchanged, staged) == []
    kinds = [each.kind for each in exchanged]
    # Mixer's matrices by their divided dimension, three of the feed-forward layer; a gather in the
    # forward and one in the backward for each.
    assert kinds.count("all-gather") == 2 * kinds.count("reduce-scatter") > 0, kinds
    assert kinds.count("collective-permute") == 2, kinds  # the halo, once each way


def test_the_plain_form_fails():
    """Matrices gathered where they are used, gradients reduced where they arise."""
    assert faults(*program("v6e:2x2", {"context": 4}, remat="dots"))
