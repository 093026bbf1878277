"""The nearest settings that fit: a mesh for a topology's devices, a step for a device's memory."""

import copy
import math
from collections.abc import Iterator

from ml_collections import ConfigDict

from errors import UserError
from training.estimate.compile import TooLarge
from training.estimate.plan import Plan, make_plan
from training.estimate.topology import Topology

MOST_TRIES = 4  # compilations of changed settings, after the one that did not fit


def check_devices(config: ConfigDict, topology: Topology) -> None:
    """Refuses a mesh that needs more devices than the topology has, or leaves some unused.

    Raises:
        UserError: one line with the change of one axis that uses all devices.
    """
    axes = dict(config.mesh)
    needed, found = math.prod(axes.values()), topology.devices
    if needed == found:
        return
    shape = " x ".join(f"{axis} {n}" for axis, n in axes.items() if n > 1) or "one device"
    raise UserError(
        f"--plan={topology.name}: has {found} devices, config.mesh ({shape}) needs {needed}; "
        f"try {_fitting_mesh(config, found)}"
    )


def _fitting_mesh(config: ConfigDict, devices: int) -> str:
    """The change of one axis that uses all devices and divides the sizes that the axis splits."""
    axes = dict(config.mesh)
    data, model = config.data, config.model
    cut = {
        "context": data.sequence_length,
        "fsdp": math.gcd(data.global_batch_size // (axes["data"] * axes["expert"]), model.d_model),
        "data": data.global_batch_size // (axes["fsdp"] * axes["expert"]),
        "tensor": math.gcd(model.kda_heads, model.d_ff),
    }
    for axis, size in cut.items():
        rest = math.prod(axes.values()) // axes[axis]
        if devices % rest == 0 and size % (devices // rest) == 0:
            return f"--config.mesh.{axis}={devices // rest}"
    return f"--config.mesh.context={devices} and 1 for the other axes"


def plan_or_nearest(config: ConfigDict, topology: Topology) -> tuple[Plan, tuple[str, ...]]:
    """(the plan, no changes), or the plan of the first changed settings that fit, and the changes.

    Raises:
        UserError: no change fits; the message says how much memory is missing.
    """
    try:
        plan = make_plan(config, topology)
        if plan.fits:
            return plan, ()
        missing = f"needs {plan.facts.needed / 1e9:.1f} GB of {plan.hbm_capacity / 1e9:.1f} GB"
    except TooLarge as error:
        missing = str(error)
    for overrides in _smaller(config):
        try:
            plan = make_plan(_changed(config, overrides), topology)
        except TooLarge as error:
            missing = f"{missing}; with {_text(overrides)[-1]} it {error}"
            continue
        if plan.fits:
            return plan, _text(overrides)
    raise UserError(
        f"--plan={topology.name}: a device's memory is too small ({missing}); try a larger "
        "topology, a shorter config.data.sequence_length or a smaller model"
    )


def _smaller(config: ConfigDict) -> list[dict[str, int | str]]:
    """Changes that need less memory, cheapest first; each includes the previous ones."""
    changes: list[dict[str, int | str]] = []
    together: dict[str, int | str] = {}
    for name, value in _steps(config):
        together = together | {name: value}
        changes.append(together)
    return changes[:MOST_TRIES]


def _steps(config: ConfigDict) -> Iterator[tuple[str, int | str]]:
    if config.model.remat not in ("full", "offload"):
        yield "model.remat", "full"
    if config.model.kda_state_policy == "save":
        yield "model.kda_state_policy", "remat"
    if config.model.remat != "offload":
        yield "model.remat", "offload"
    mesh = config.mesh
    if mesh.data > 1 and config.model.d_model % (mesh.data * mesh.fsdp) == 0:
        yield "mesh.fsdp", mesh.data * mesh.fsdp
    rows = config.data.global_batch_size // (mesh.data * mesh.fsdp * mesh.expert)
    parts = config.train.grad_accum_steps
    while parts * 2 <= rows and rows % (parts * 2) == 0:
        parts *= 2
        yield "train.grad_accum_steps", parts


def _changed(config: ConfigDict, overrides: dict[str, int | str]) -> ConfigDict:
    changed = copy.deepcopy(config)
    for name, value in overrides.items():
        group, option = name.split(".")
        changed[group][option] = value
        if name == "mesh.fsdp":
            changed.mesh.data = 1
    return changed


def _text(overrides: dict[str, int | str]) -> tuple[str, ...]:
    lines = [f"--config.{name}={value}" for name, value in overrides.items()]
    return tuple(lines) + (("--config.mesh.data=1",) if "mesh.fsdp" in overrides else ())
