"""How long context ranks wait for each other in a compiled training step, for P = 2 to 256.

    python -m benchmarks.cp_timeline                        the table, an hour on two cores
    python -m benchmarks.cp_timeline --heads 16 --tokens 2048 --pattern kda
    python -m benchmarks.cp_timeline --generation v6e

Each row of the table is a decoder of 24 layers and heads of 128, compiled with one row per step,
with `heads` heads and `tokens` tokens per rank, for context axes of 4, 16 and 64: the ranks decide
how far ahead matrices are gathered (model/ahead.py). The timeline
(training/estimate/timeline.py) runs the compiled program's instructions on P ranks: bundles and
loops of the kernels, and the collectives over context where the compiler scheduled them, each with
its start and end. A figure is the efficiency of a step: a rank's own work divided by the time until
the last rank is done. "step" counts the time of messages and collectives as waiting. "skew" assumes
instantaneous collectives, so it shows only the loss from waiting for each other. "call" is a KDA
layer's kernels alone, forward then backward.

Assumptions, and what would confirm each on hardware:
    a bundle takes the same time on every rank          step times of a profile, rank by rank
    a kernel's bundle takes 1.85 times an XLA one's     bundles against time, one call at P = 1
    messages take bytes / link bandwidth and 1 us       one call at P = 2 and 4 against P = 1
    a permute waits for two neighbours, see timeline    a profile with one rank slowed down
    a collective ends when all ranks have begun it, and the same; the compiled programs hold no wait
      its start waits for none (SparseCores)            at the start
    2, 4 and 8 ranks run the program compiled for 4,    compilation for P (memory, not the order)
      256 that for 64
"""

import argparse
import collections
import dataclasses
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

from benchmarks.step_tpu import large_config
from training.estimate import bundles, hlo
from training.estimate.collectives import Collective, collectives
from training.estimate.compile import HLO, compile_step
from training.estimate.plan import MESH_AXES
from training.estimate.program import Work, works
from training.estimate.timeline import (
    CONTEXT,
    Event,
    Relay,
    Repeat,
    events_of,
    instantaneous,
    simulate,
)
from training.estimate.topology import Topology

RANKS = (2, 4, 8, 16, 64, 256)
# Programs by the ranks that they are compiled for: which columns they fill, and whole slices.
COLUMNS = {4: (2, 4, 8), 16: (16,), 64: (64, 256)}
SLICES = {
    "tpu7x": {4: "2x1x1", 16: "2x2x2", 64: "4x4x2"},
    "v6e": {4: "2x2", 16: "4x4", 64: "8x8"},
}
PURE, HYBRID = "kda", "kda,kda,kda,attention"
TABLE = [
    (16, 512, PURE),
    (16, 2048, PURE),
    (16, 8192, PURE),
    (8, 2048, PURE),
    (32, 2048, PURE),
    (16, 512, HYBRID),
    (16, 2048, HYBRID),
    (16, 8192, HYBRID),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: heads and tokens on a rank, the pattern of its layers, and the TPU generation."""

    heads: int
    tokens: int
    pattern: str
    layers: int
    generation: str


@dataclasses.dataclass(frozen=True)
class Program:
    """The parts of a compiled step that the timeline needs."""

    works: list[Work]
    collectives: list[Collective]
    events: tuple[Event, ...]


def compiled(case: Case, ranks: int) -> Program:
    """Compiles the case's step in a child process and reads its program."""
    topology = Topology.parse(f"{case.generation}:{SLICES[case.generation][ranks]}")
    config = large_config(case.tokens * ranks, case.heads * 128, case.layers, case.pattern)
    config.mesh.context = ranks
    with tempfile.TemporaryDirectory(prefix="cp_timeline_") as folder:
        compile_step(config, topology.name, folder)
        module = hlo.parse(pathlib.Path(folder, HLO).read_text())
        schedule = bundles.read(str(pathlib.Path(folder, "schedules")))
    mesh = {axis: config.mesh[axis] for axis in MESH_AXES}
    found = works(module, schedule.latest)
    exchanged = collectives(module, found, mesh)
    return Program(
        found, exchanged, events_of(found, exchanged, schedule.trees, topology.generation)
    )


def one_call(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The last forward relay and the first backward one: the kernels of one layer."""
    relays = list(relays_of(events))
    forward = [relay for relay in relays if not relay.backward]
    backward = [relay for relay in relays if relay.backward]
    return (*forward[:1], *backward[:1])


def relays_of(events: tuple[Event, ...]) -> list[Relay]:
    """All relays, in order; a loop's relays once."""
    found: list[Relay] = []
    for event in events:
        if isinstance(event, Repeat):
            found += relays_of(event.body)
        elif isinstance(event, Relay):
            found.append(event)
    return found


def row(events: Mapping[int, tuple[Event, ...]]) -> str:
    """Efficiencies for the ranks whose column a program fills; events by compiled ranks."""
    figures = ""
    for ranks in RANKS:
        column = next((e for n, e in events.items() if ranks in COLUMNS[n]), None)
        figures += " " * 7 + "-" if column is None else f"{simulate(column, ranks).efficiency:8.3f}"
    return figures


def synchronisations(program: Program) -> list[str]:
    """Collectives over context inside the loops over layers, which limit the ranks' drift."""
    lines = []
    for each in program.collectives:
        if CONTEXT not in each.axes or not each.loops or each.kind == "collective-permute":
            continue
        kind = f"asynchronous, {each.overlapped:,} bundles between start and done"
        how = kind if each.asynchronous else "synchronous"
        axes = " x ".join(each.axes)
        lines.append(f"{each.kind} over {axes}, {each.bytes / 1e6:.2f} MB, {how}")
    return lines


def show(case: Case, sizes: Sequence[int]) -> None:
    programs = {ranks: compiled(case, ranks) for ranks in sizes}
    events = {ranks: program.events for ranks, program in programs.items()}
    name = f"{case.heads} heads, {case.tokens} tokens, {case.pattern}"
    print(f"{name:44s} step{row(events)}")
    print(f"{'':44s} skew{row({n: instantaneous(e) for n, e in events.items()})}")
    print(f"{'':44s} call{row({n: one_call(e) for n, e in events.items()})}")
    for ranks, program in programs.items():
        for line, times in collections.Counter(synchronisations(program)).items():
            print(f"    in a repeat, {ranks} ranks: {times} x {line}")
    for relay in one_call(events[sizes[0]]):
        direction = "backward" if relay.backward else "forward"
        parts = (relay.before, relay.slot, relay.after, relay.tail)
        before, slot, after, tail = (f"{1e6 * part:.1f}" for part in parts)
        print(
            f"    {direction}: {relay.groups} groups, microseconds before {before}, slot {slot}, "
            f"after {after}, tail {tail}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--generation", default="tpu7x", choices=SLICES)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(COLUMNS), choices=COLUMNS)
    parser.add_argument("--heads", type=int, help="per rank; prints one row instead of the table")
    parser.add_argument("--tokens", type=int, default=2048, help="per rank (default 2048)")
    parser.add_argument("--pattern", default=PURE)
    parser.add_argument("--layers", type=int, default=24)
    args = parser.parse_args()
    table = [(args.heads, args.tokens, args.pattern)] if args.heads else TABLE
    print(f"{args.layers} layers, {args.generation}; efficiency for P =".ljust(49), end="")
    print("".join(f"{ranks:8d}" for ranks in RANKS))
    for heads, tokens, pattern in table:
        show(Case(heads, tokens, pattern, args.layers, args.generation), args.ranks)


if __name__ == "__main__":
    main()
