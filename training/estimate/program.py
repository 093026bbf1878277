"""Work of a compiled program: each instruction's number of executions, bundles and HBM bytes.

If a fusion only slices an operand, the slices are counted; if a buffer is updated in place, the
update is counted. For Pallas kernels each operand and result is counted once.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from training.estimate.hlo import Computation, Instruction, Module

# Instructions that move no data: aliases of existing buffers, and ends of asynchronous pairs.
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"),
    *("call", "after-all", "partition-id", "replica-id", "opt-barrier", "optimization-barrier"),
)
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_ALIASES = frozenset(("bitcast", "copy", "reshape", "transpose", "convert"))
KERNEL = 'custom_call_target="tpu_custom_call"'


@dataclass(frozen=True)
class Visit:
    """One instruction in its computation; `times`: executions in a run of the program.

    loops: the `while` instructions around it, outermost first. unknown: one of them has a trip
    count that depends on data and counts once.
    """

    instruction: Instruction
    computation: Computation
    times: int
    loops: tuple[str, ...]
    unknown: bool = False


@dataclass(frozen=True)
class Work:
    """The cost of one execution of an instruction on a device: bundles and bytes of HBM."""

    visit: Visit
    bundles: int
    hbm_bytes: int


def visits(module: Module) -> Iterator[Visit]:
    """All instructions from the entry on, in the order of execution, bodies after their loop."""
    yield from _visit(module, module.computations[module.entry], 1, (), False)


def _visit(
    module: Module, computation: Computation, times: int, loops: tuple[str, ...], unknown: bool
) -> Iterator[Visit]:
    for instruction in computation.instructions:
        yield Visit(instruction, computation, times, loops, unknown)
        inner = module.computations
        if instruction.opcode == "while":
            trips = module.trips(instruction)
            body = inner[instruction.calls["body"]]
            nested = (*loops, instruction.name)
            yield from _visit(module, body, times * (trips or 1), nested, unknown or trips is None)
        elif instruction.opcode == "conditional":
            for branch in instruction.branches:
                yield from _visit(module, inner[branch], times, loops, unknown)
        elif instruction.opcode == "call" and "to_apply" in instruction.calls:
            called = inner[instruction.calls["to_apply"]]
            yield from _visit(module, called, times, loops, unknown)


def works(module: Module, programs: Mapping[str, int]) -> list[Work]:
    """Every instruction's work. programs: bundles by name, as `bundles.Schedule.latest`."""
    found = list(visits(module))
    counts = _counts(found, programs)
    return [
        Work(visit, counts[visit.instruction.name], hbm_bytes(module, visit)) for visit in found
    ]


def _counts(found: list[Visit], programs: Mapping[str, int]) -> dict[str, int]:
    """Bundles by instruction. The compiler emits equal kernels once, under one of their names."""
    by_name = {visit.instruction.name: visit for visit in found}
    known = {name: count for name, count in programs.items() if name in by_name}
    shared: dict[tuple, int] = {}
    for name, count in known.items():
        shared.setdefault(_kind(by_name[name]), count)
    equal = {name: shared.get(_kind(visit), 0) for name, visit in by_name.items()}
    return equal | known


def _kind(visit: Visit) -> tuple:
    """A key of equal kernels: opcode, name without number, shapes of results and operands."""
    instruction = visit.instruction
    operands = visit.computation.by_name
    shapes = tuple(operands[name].outputs for name in instruction.operands if name in operands)
    stem = re.sub(r"[.\d]+$", "", instruction.name)
    return instruction.opcode, stem, instruction.outputs, shapes


def is_kernel(instruction: Instruction) -> bool:
    """Whether it is a Pallas kernel."""
    return KERNEL in instruction.attributes


def hbm_bytes(module: Module, visit: Visit) -> int:
    """Bytes of HBM that one execution reads and writes."""
    instruction = visit.instruction
    if instruction.opcode in _FREE or instruction.opcode.endswith(("-done", "-update")):
        return 0
    operands = [visit.computation.by_name.get(name) for name in instruction.operands]
    sizes = [_in_hbm(operand) if operand is not None else 0 for operand in operands]
    if instruction.opcode == "copy-start":  # destination, source, context
        return sum(array.bytes for array in instruction.outputs[:2] if array.in_hbm)
    if instruction.opcode in _SLICES:
        return (min(instruction.bytes, sizes[0]) if sizes else 0) + _in_hbm(instruction)
    if instruction.opcode == "dynamic-update-slice":
        update = operands[1].bytes if operands[1] is not None else 0
        return 2 * update if instruction.outputs[0].in_hbm else 0
    if instruction.opcode == "fusion":
        fused = module.computations[instruction.calls["calls"]]
        return _fusion_reads(fused, sizes) + _fusion_writes(fused, instruction)
    return sum(sizes) + _in_hbm(instruction)


def _in_hbm(instruction: Instruction) -> int:
    return sum(array.bytes for array in instruction.outputs if array.in_hbm)


def _fusion_reads(fused: Computation, sizes: list[int]) -> int:
    """Bytes read by a fusion whose operands have these sizes in HBM."""
    total = 0
    for parameter in fused.instructions:
        if parameter.opcode != "parameter":
            continue
        number = int(parameter.attributes)
        size = sizes[number] if number < len(sizes) else 0
        used = [_use(fused, parameter.name, user) for user in _users(fused, parameter.name)]
        total += min(size, sum(size if part is None else part for part in used))
    return total


def _users(fused: Computation, name: str) -> list[Instruction]:
    return [other for other in fused.instructions if name in other.operands]


def _use(fused: Computation, name: str, user: Instruction) -> int | None:
    """Bytes that a user reads of an operand; None: all of it."""
    if user.opcode in _SLICES and user.operands[0] == name:
        return user.bytes
    if user.opcode == "dynamic-update-slice" and user.operands[0] == name:
        return 0
    if _same_buffer(user):
        parts = [_use(fused, user.name, further) for further in _users(fused, user.name)]
        return None if None in parts or not parts else sum(part or 0 for part in parts)
    return None


def _same_buffer(instruction: Instruction) -> bool:
    """Whether the result is the operand's buffer under another layout, in a fusion."""
    aliased = "output_to_operand_aliasing={{}: (0, {})}" in instruction.attributes
    return instruction.opcode == "bitcast" or (instruction.opcode == "fusion" and aliased)


def _fusion_writes(fused: Computation, instruction: Instruction) -> int:
    root = fused.by_name[fused.root]
    leaves = [fused.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0
    for array, leaf in zip(instruction.outputs, leaves):
        update = updated(fused, leaf)
        total += 0 if not array.in_hbm else array.bytes if update is None else update.bytes
    return total


def updated(fused: Computation, leaf: Instruction) -> Instruction | None:
    """The update that a result writes into an existing buffer, or None."""
    while (leaf.opcode in _ALIASES or _same_buffer(leaf)) and leaf.operands:
        leaf = fused.by_name[leaf.operands[0]]
    if leaf.opcode != "dynamic-update-slice":
        return None
    return fused.by_name[leaf.operands[1]]
