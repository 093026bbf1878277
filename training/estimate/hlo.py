"""Parses a compiled program's scheduled HLO text into records.

It reads only what estimates need: the order of instructions, the sizes and memory of their outputs,
operands, called computations, trip counts of loops, and the devices of a collective.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# Attributes of some kernels hold line breaks: what follows one is neither an instruction, nor the
# beginning or the end of a computation.
_CONTINUED = re.compile(r"\n(?! |%|ENTRY |\}$|\}, execution_thread|$)", re.MULTILINE)
_INDEX = re.compile(r"/\*index=\d+\*/")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"(pred|[a-z]+\d+(?:e\dm\d\w*)?)\[([\d,]*)\](\{[^{}]*\})?")
_MEMORY = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(calls|body|condition|to_apply|called_computations)=\{?(%[^,}\s]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Array:
    """One array produced by an instruction; `in_hbm` is false for VMEM, SMEM and host memory."""

    dtype: str
    shape: tuple[int, ...]
    in_hbm: bool

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        if self.dtype == "pred":
            return self.elements
        bits = re.search(r"\d+", self.dtype)
        return -(-self.elements * int(bits.group()) // 8) if bits else 0


@dataclass(frozen=True)
class Instruction:
    """One instruction; `outputs` are the leaves of its shape, `operands` names of instructions."""

    name: str
    opcode: str
    outputs: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str = field(repr=False)

    @functools.cached_property
    def calls(self) -> Mapping[str, str]:
        """Called computations by role: "calls", "body", "condition", "to_apply"."""
        return {role: name.lstrip("%") for role, name in _CALLED.findall(self.attributes)}

    @functools.cached_property
    def branches(self) -> tuple[str, ...]:
        found = _BRANCHES.search(self.attributes)
        return tuple(_NAME.findall(found.group(1))) if found else ()

    @functools.cached_property
    def op_name(self) -> str:
        """Where the instruction comes from in the JAX program, such as "jit(step)/jvp()/add"."""
        found = _OP_NAME.search(self.attributes)
        return found.group(1) if found else ""

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.outputs)


@dataclass(frozen=True)
class Computation:
    """Instructions in the order of execution; `root` is the name of the result."""

    name: str
    instructions: tuple[Instruction, ...]
    root: str

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}


@dataclass(frozen=True)
class Module:
    """A program: its computations by name, and the name of the entry."""

    computations: Mapping[str, Computation]
    entry: str

    def trips(self, loop: Instruction) -> int | None:
        """Trip count of a `while`; None if it depends on data.

        Loops that JAX generates count from 0 in steps of 1 up to a constant in the condition.
        """
        condition = self.computations[loop.calls["condition"]]
        root = condition.by_name[condition.root]
        if root.opcode != "compare" or "direction=LT" not in root.attributes:
            return self._fused_trips(condition, root)
        constants = [condition.by_name.get(name) for name in root.operands]
        values = [int(c.attributes) for c in constants if c is not None and c.opcode == "constant"]
        return values[0] if len(values) == 1 else None

    def _fused_trips(self, condition: Computation, root: Instruction) -> int | None:
        """The same if the comparison is fused and has the constant as an operand."""
        constants = [
            int(found.attributes)
            for name in root.operands
            if (found := condition.by_name[name]).opcode == "constant"
        ]
        return constants[0] if root.opcode == "fusion" and len(constants) == 1 else None


def parse(text: str) -> Module:
    """The module of an HLO text, as `compiled.as_text()` returns it."""
    computations: dict[str, Computation] = {}
    entry, name, root = "", "", ""
    body: list[Instruction] = []
    for raw in _CONTINUED.sub(" ", text).splitlines():
        if raw.startswith("}") and name:
            computations[name] = Computation(name, tuple(body), root)
            name = ""
        elif not raw.startswith(" "):
            if found := _COMPUTATION.match(raw):
                name, body = found.group(2), []
                entry = name if found.group(1) else entry
        elif name and (found := _INSTRUCTION.match(raw)):
            body.append(_instruction(found.group(2), _INDEX.sub("", raw[found.end() :])))
            root = found.group(2) if found.group(1) else root
    return Module(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
    """`text`: what follows the equals sign: shape, opcode, operands in parentheses, attributes."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opening = text.index("(", end)
    closing = _closing(text, opening)
    inside, after = text[opening + 1 : closing], text[closing + 1 :]
    opcode = text[end:opening].strip()
    attributes = inside if opcode in ("constant", "parameter") else after
    return Instruction(
        name, opcode, tuple(arrays(text[:end])), tuple(_NAME.findall(inside)), attributes
    )


def arrays(shape: str) -> Iterator[Array]:
    """The leaves of a shape's text, such as "(f32[2,3]{1,0:T(8,128)S(1)}, s32[])"."""
    for dtype, sizes, layout in _ARRAY.findall(shape):
        memory = _MEMORY.search(layout)
        shape_of = tuple(int(size) for size in sizes.split(",") if size)
        yield Array(dtype, shape_of, memory is None or memory.group(1) == "0")


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for found in re.finditer(r"[()]", text[opening:]):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return opening + found.start()
    raise ValueError(f"unbalanced parentheses: {text[opening : opening + 80]!r}")
