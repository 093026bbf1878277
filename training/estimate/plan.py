"""A plan: the estimated memory and time of a config's training step on a TPU topology.

The step time is a roofline, not a measurement. Every instruction takes the longer of the times for
its bundles and for its HBM traffic; a bundle of a Pallas kernel takes `kernel_stalls` times as long
as one of XLA's programs. Collectives add the time that is not hidden by work between start and
done, and `timeline` gives the time that context ranks wait for each other.
"""

import collections
import dataclasses
import pathlib
import tempfile

from ml_collections import ConfigDict

from training.estimate import bundles, hlo
from training.estimate.collectives import Collective, collectives
from training.estimate.compile import CPU, HLO, Facts, compile_step
from training.estimate.memory import Memory, memory_parts
from training.estimate.program import Work, is_kernel, works
from training.estimate.timeline import (
    CONTEXT,
    Event,
    events_of,
    instantaneous,
    seconds_of,
    simulate,
)
from training.estimate.topology import Generation, Topology
from training.options import MeshOptions

MESH_AXES = tuple(field.name for field in dataclasses.fields(MeshOptions))


@dataclasses.dataclass(frozen=True)
class CollectiveSum:
    """All collectives of one kind over the same axes, per step and device."""

    kind: str
    axes: tuple[str, ...]
    asynchronous: bool
    in_layers: bool
    calls: int
    bytes: int
    seconds: float
    exposed_seconds: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Estimated seconds of one step.

    kernels: of Pallas kernels. collectives: exposed, over all axes. waiting: of context ranks for
    each other, in addition to the collectives' own time.
    """

    total: float
    kernels: float
    collectives: float
    waiting: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that a plan reports; see `report.text`."""

    topology: str
    devices: int
    mesh: dict[str, int]
    rows: int
    tokens_a_row: int
    tokens_a_step: int
    facts: Facts
    memory: Memory
    hbm_capacity: float
    bundles: int
    kernel_bundles: dict[str, int]
    hbm_bytes: int
    unknown_loops: tuple[str, ...]
    collectives: tuple[CollectiveSum, ...]
    time: StepTime
    tokens_a_second: float
    model_flops_utilisation: float
    hardware_flops_utilisation: float
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.facts.needed <= self.hbm_capacity


def make_plan(config: ConfigDict, topology: Topology) -> Plan:
    """Compiles the step and estimates it.

    Raises:
        TooLarge, UserError: as `compile_step`.
    """
    with tempfile.TemporaryDirectory(prefix="plan_") as folder:
        facts = compile_step(config, topology.name, folder)
        module = hlo.parse(pathlib.Path(folder, HLO).read_text())
        schedule = bundles.read(str(pathlib.Path(folder, "schedules")))
    return _assemble(config, topology, facts, module, schedule)


def compiled_bytes(config: ConfigDict) -> int:
    """`memory/compiled_peak_bytes` of a run of this config on simulated CPU devices."""
    with tempfile.TemporaryDirectory(prefix="plan_") as folder:
        return compile_step(config, CPU, folder).needed


def _assemble(
    config: ConfigDict,
    topology: Topology,
    facts: Facts,
    module: hlo.Module,
    schedule: bundles.Schedule,
) -> Plan:
    generation = topology.generation
    mesh = {axis: config.mesh[axis] for axis in MESH_AXES}
    found = works(module, schedule.latest)
    exchanged = collectives(module, found, mesh)
    events = events_of(found, exchanged, schedule.trees, generation)
    time = step_time(found, exchanged, events, mesh[CONTEXT], generation)
    tokens = config.data.global_batch_size * config.data.sequence_length
    tokens *= config.train.tbptt_windows
    peak = facts.devices * generation.flops_a_second * time.total
    return Plan(
        topology=topology.name,
        devices=facts.devices,
        mesh=mesh,
        rows=config.data.global_batch_size,
        tokens_a_row=config.data.sequence_length,
        tokens_a_step=tokens,
        facts=facts,
        memory=memory_parts(facts, module),
        hbm_capacity=generation.hbm_bytes,
        bundles=sum(work.bundles * work.visit.times for work in found),
        kernel_bundles=kernel_bundles(found),
        hbm_bytes=sum(work.hbm_bytes * work.visit.times for work in found),
        unknown_loops=unknown_loops(found),
        collectives=summed(exchanged, generation),
        time=time,
        tokens_a_second=tokens / time.total,
        model_flops_utilisation=facts.model_flops / peak,
        hardware_flops_utilisation=facts.hardware_flops / peak,
        assumptions=assumptions(generation),
    )


def kernel_bundles(found: list[Work]) -> dict[str, int]:
    """Bundles per step of each Pallas kernel, by name without number."""
    total: collections.Counter[str] = collections.Counter()
    for work in found:
        if is_kernel(work.visit.instruction):
            name = work.visit.instruction.name.split(".")[0]
            total[name] += work.bundles * work.visit.times
    return dict(total.most_common())


def unknown_loops(found: list[Work]) -> tuple[str, ...]:
    """Loops that are counted once because their trip count depends on data."""
    names = {work.visit.loops[-1] for work in found if work.visit.unknown}
    return tuple(sorted(names))


def step_time(
    found: list[Work], exchanged: list[Collective], events: tuple[Event, ...], ranks: int,
    generation: Generation,
) -> StepTime:  # fmt: skip
    """The estimate of one step: the last context rank's time, and its parts."""
    timeline, waiting = simulate(events, ranks), simulate(instantaneous(events), ranks)
    others = [c for c in exchanged if CONTEXT not in c.axes]
    kernels = sum(
        work.visit.times * seconds_of(work, generation)
        for work in found
        if is_kernel(work.visit.instruction)
    )
    return StepTime(
        total=timeline.seconds,
        kernels=kernels,
        collectives=sum(c.times * c.exposed_seconds(generation) for c in others)
        + timeline.seconds
        - waiting.seconds,
        waiting=waiting.seconds - waiting.work,
    )


def summed(exchanged: list[Collective], generation: Generation) -> tuple[CollectiveSum, ...]:
    """Collectives by kind, axes, whether asynchronous, and whether inside the loop of layers."""
    groups: dict[tuple[str, tuple[str, ...], bool, bool], list[Collective]] = (
        collections.defaultdict(list)
    )
    for each in exchanged:
        groups[each.kind, each.axes, each.asynchronous, bool(each.loops)].append(each)
    sums = [
        CollectiveSum(
            *key,
            sum(c.times for c in group),
            sum(c.times * c.bytes for c in group),
            sum(c.times * c.seconds(generation) for c in group),
            sum(c.times * c.exposed_seconds(generation) for c in group),
        )
        for key, group in groups.items()
    ]
    return tuple(sorted(sums, key=lambda each: -each.bytes))


def assumptions(generation: Generation) -> tuple[str, ...]:
    """The assumptions of the step time, one line each."""
    built_in = "built in, calibrated on published times of tpu7x; `make tpu-check` measures them"
    return (
        f"speeds of {generation.name}: {generation.measured or built_in}",
        f"a device has {generation.flops_a_second / 1e12:.0f} TFLOP/s in bfloat16, "
        f"{generation.hbm_bytes_a_second / 1e12:.2f} TB/s of HBM, links of "
        f"{generation.link_bytes_a_second / 1e9:.0f} GB/s each way",
        f"XLA's programs issue {generation.clock / 1e9:.2f} bundles/ns, as in a large product at "
        f"peak; Pallas kernels take {generation.kernel_stalls:.3g} times as long",
        "an instruction takes the longer of its bundles and its HBM bytes; copies run in parallel",
        "a collective is a ring over one link in both directions; rows have no padding",
    )
