"""Parts of the memory that a compiled step needs on one device.

Parameters, moments, carried state and batch are exact. Gradients are counted as one float32 array
per parameter. Saved activations are read from the program: arrays that a loop of the forward fills
slice by slice for the backward. The rest of the compiler's total is temporary. The parts need not
all exist at the same time, so the rest can be 0.
"""

import dataclasses

from training.estimate.compile import Facts
from training.estimate.hlo import Array, Computation, Instruction, Module
from training.estimate.program import updated, visits


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    parameters: int
    moments: int
    carried_state: int
    batch: int
    gradients: int
    saved_activations: int
    logits: int
    other_temporaries: int


def memory_parts(facts: Facts, module: Module) -> Memory:
    """Splits `facts.needed`."""
    saved = max(sum(array.bytes for array in stacked(module)) - facts.carry_bytes, 0)
    known = facts.gradient_bytes + saved + facts.logit_bytes
    return Memory(
        parameters=facts.parameter_bytes,
        moments=facts.moment_bytes,
        carried_state=facts.carry_bytes,
        batch=facts.batch_bytes,
        gradients=facts.gradient_bytes,
        saved_activations=saved,
        logits=facts.logit_bytes,
        other_temporaries=max(facts.needed - facts.arguments - known, 0),
    )


def stacked(module: Module) -> list[Array]:
    """Arrays that the forward's loop over layers fills, one slice per layer."""
    found: list[Array] = []
    for visit in visits(module):
        loop = visit.instruction
        if loop.opcode == "while" and not visit.loops and "transpose(" not in loop.op_name:
            body = module.computations[loop.calls["body"]]
            root = body.by_name[body.root]
            made = [body.by_name[name] for name in root.operands]
            found += [
                array
                for array, leaf in zip(loop.outputs, made)
                if array.in_hbm and _is_filled(module, body, leaf, array)
            ]
    return found


def _is_filled(module: Module, body: Computation, leaf: Instruction, array: Array) -> bool:
    """Whether a loop's result is its own input with one slice replaced."""
    index = 0
    while leaf.opcode in ("bitcast", "get-tuple-element", "copy", "copy-done", "copy-start"):
        if leaf.opcode == "get-tuple-element":
            index = int(leaf.attributes.split("index=")[1].split(",")[0])
        leaf = body.by_name[leaf.operands[0]]
    if leaf.opcode == "dynamic-update-slice":
        return True
    if leaf.opcode != "fusion" or leaf.outputs[min(index, len(leaf.outputs) - 1)] != array:
        return False
    fused = module.computations[leaf.calls["calls"]]
    root = fused.by_name[fused.root]
    result = fused.by_name[root.operands[index]] if root.opcode == "tuple" else root
    return updated(fused, result) is not None
