"""Collectives of a compiled program: kind, mesh axes, bytes, and what overlaps with them."""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from training.estimate.hlo import Instruction, Module
from training.estimate.program import Visit, Work
from training.estimate.topology import Generation

RAGGED = "ragged-all-to-all"
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all", RAGGED)
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


@dataclass(frozen=True)
class Collective:
    """One collective instruction.

    axes: mesh axes that it crosses. ranks: devices that take part together. bytes: of the full
    array on one device (what a gather makes, what a reduction takes). begin: name of the
    instruction that hands over its operands: itself, or a start's last `-update`. done: name of the
    instruction that waits for it, "" where it is synchronous. overlapped: bundles of other work
    between begin and done. upward: a permute sends from a rank to the next.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    ranks: int
    bytes: int
    times: int
    loops: tuple[str, ...]
    begin: str
    done: str
    overlapped: int
    upward: bool
    op_name: str

    @property
    def asynchronous(self) -> bool:
        return bool(self.done)

    def seconds(self, generation: Generation) -> float:
        """One execution on a ring of both directions of one link."""
        link = generation.link_bytes_a_second
        if self.kind == "collective-permute":
            return self.bytes / link + generation.hop_seconds
        passes = 2 if self.kind == "all-reduce" else 1
        share = (self.ranks - 1) / self.ranks
        hops = generation.hop_seconds * (self.ranks // 2)
        return passes * (self.bytes * share / (2 * link) + hops)

    def exposed_seconds(self, generation: Generation) -> float:
        """The part of one execution that no work between start and done hides."""
        hidden = self.overlapped / generation.clock if self.asynchronous else 0.0
        return max(self.seconds(generation) - hidden, 0.0)


def collectives(module: Module, works: list[Work], mesh: Mapping[str, int]) -> list[Collective]:
    """All collectives of a program. mesh: sizes of the mesh axes, in the devices' order."""
    found = []
    for place, work in enumerate(works):
        inner = _collective_of(module, work.visit.instruction)
        if inner is None:
            continue
        axes, ranks = _axes(inner.attributes, mesh)
        if ranks == 1:
            continue
        begin, done, overlapped = _span(works, place)
        visit = work.visit
        found.append(
            Collective(
                visit.instruction.name, _kind(inner.opcode), axes, ranks, _bytes(inner, visit),
                visit.times, visit.loops, begin, done, overlapped, _upward(inner.attributes),
                visit.instruction.op_name,
            )
        )  # fmt: skip
    return found


def _kind(opcode: str) -> str:
    return opcode.removesuffix("-start")


def _collective_of(module: Module, instruction: Instruction) -> Instruction | None:
    """The collective that an instruction is, or that it starts in a called computation."""
    if _kind(instruction.opcode) in KINDS:
        return instruction
    if instruction.opcode in ("async-start", "call-start", "fusion", "custom-call-start"):
        for called in instruction.calls.values():
            if called not in module.computations:
                continue
            for inner in module.computations[called].instructions:
                if _kind(inner.opcode) in KINDS:
                    return inner
                if inner.opcode in ("fusion", "call") and (deeper := _collective_of(module, inner)):
                    return deeper
    return None


def _upward(attributes: str) -> bool:
    pairs = _PAIRS.search(attributes)
    return pairs is not None and int(pairs.group(1)) < int(pairs.group(2))


def _bytes(inner: Instruction, visit: Visit) -> int:
    """Bytes of the full array: the largest of result and operands."""
    if inner.opcode.endswith("-start"):
        return max(array.bytes for array in inner.outputs)
    operands = [visit.computation.by_name.get(name) for name in inner.operands]
    if inner.opcode == RAGGED:  # one side is as long as the tokens, the other as the room for them
        return min(array.bytes for array in (inner, operands[0]) if array is not None)
    taken = sum(operand.bytes for operand in operands if operand is not None)
    return max(inner.bytes, taken)


def _span(works: list[Work], start: int) -> tuple[str, str, int]:
    """(begin, done, overlapped) of a `Collective` whose first instruction is at `start`."""
    visit = works[start].visit
    begin = visit.instruction.name
    if not visit.instruction.opcode.endswith("-start"):
        return begin, "", 0
    between = 0
    for work in works[start + 1 :]:
        other = work.visit
        if other.loops[: len(visit.loops)] != visit.loops:
            break
        if begin in other.instruction.operands:
            if other.instruction.opcode.endswith("-done"):
                return begin, other.instruction.name, between
            if other.instruction.opcode.endswith("-update"):
                begin, between = other.instruction.name, 0
        between += work.bundles * (other.times // visit.times)
    return begin, "", between


def _axes(attributes: str, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """(mesh axes that the first group of devices varies along, its number of devices)."""
    named = _NAMED.search(attributes)
    if named and (used := tuple(re.findall(r"'([^']+)'", named.group(2)))) and set(used) <= {*mesh}:
        crossed = tuple(axis for axis in used if mesh[axis] > 1)
        return crossed, math.prod(mesh[axis] for axis in crossed)
    group = _group(attributes, mesh, named)
    places = [_place(device, mesh) for device in group]
    varying = tuple(axis for i, axis in enumerate(mesh) if len({place[i] for place in places}) > 1)
    return varying, len(group)


def _group(attributes: str, mesh: Mapping[str, int], named: re.Match | None) -> list[int]:
    """Devices of the first group; all where the text names none."""
    if named:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named.group(1)))
        used = set(re.findall(r"'([^']+)'", named.group(2)))
        ranges = [range(int(n)) if axis in used else range(1) for axis, n in sizes.items()]
        strides = _strides([int(n) for n in sizes.values()])
        return [sum(i * s for i, s in zip(at, strides)) for at in itertools.product(*ranges)]
    if iota := _IOTA.search(attributes):
        groups, source = (list(map(int, iota.group(i).split(","))) for i in (1, 2))
        order = list(map(int, iota.group(3).split(","))) if iota.group(3) else range(len(source))
        strides = _strides(source)
        turned = itertools.product(*(range(source[axis]) for axis in order))
        flat = (sum(i * strides[axis] for i, axis in zip(at, order)) for at in turned)
        return list(itertools.islice(flat, math.prod(groups[1:])))
    if found := _LISTED.search(attributes):
        return list(map(int, found.group(1).split(",")))
    if pairs := _PAIRS.search(attributes):
        return [int(pairs.group(1)), int(pairs.group(2))]
    return list(range(math.prod(mesh.values())))


def _strides(sizes: list[int]) -> list[int]:
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _place(device: int, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Coordinates of a device in the mesh."""
    sizes = list(mesh.values())
    return tuple(device // stride % n for stride, n in zip(_strides(sizes), sizes))
