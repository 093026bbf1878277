"""A plan as text and as JSON."""

import dataclasses
import json
from collections.abc import Iterator

from training.estimate.plan import Plan


def as_json(plan: Plan) -> str:
    """All fields of the record, and `fits`."""
    return json.dumps({"fits": plan.fits} | dataclasses.asdict(plan), indent=2)


def as_text(plan: Plan) -> str:
    """The report of `--plan`."""
    return "\n".join(
        [*_summary(plan), *_memory(plan), *_work(plan), *_exchange(plan), *_time(plan)]
    )


def _summary(plan: Plan) -> Iterator[str]:
    mesh = " x ".join(f"{axis} {n}" for axis, n in plan.mesh.items() if n > 1) or "one device"
    facts = plan.facts
    yield (
        f"{facts.parameters / 1e6:,.1f}M parameters, {facts.layers} layers, on {plan.devices} "
        f"devices of {plan.topology} ({mesh}); a step takes {plan.rows} rows x "
        f"{plan.tokens_a_row} tokens ({plan.tokens_a_step:,} in total)"
    )
    seconds = facts.lower_seconds + facts.compile_seconds
    yield f"compiled in {seconds:.1f} s, {facts.lower_seconds:.1f} s of it tracing and lowering"


def _memory(plan: Plan) -> Iterator[str]:
    needed, capacity = plan.facts.needed, plan.hbm_capacity
    left = capacity - needed
    yield (
        f"memory per device: {_size(needed)} of {_size(capacity)}, "
        + (f"fits with {_size(left)} to spare" if plan.fits else f"{_size(-left)} too much")
        + f" (the compiler's peak, with program code: {_size(plan.facts.live)})"
    )
    for name, size in dataclasses.asdict(plan.memory).items():
        yield f"  {name.replace('_', ' '):28s}{_size(size):>10s}"
    if plan.facts.host:
        yield f"memory of the host, for each device: {_size(plan.facts.host)}"


def _work(plan: Plan) -> Iterator[str]:
    facts = plan.facts
    yield (
        f"model FLOPs per step {facts.model_flops:.3e}, hardware FLOPs {facts.hardware_flops:.3e} "
        f"(recomputation, chunks, optimizer: x {facts.hardware_flops / facts.model_flops:.2f})"
    )
    yield f"per device and step: {plan.bundles:,} bundles, {_size(plan.hbm_bytes)} of HBM traffic"
    for name, count in plan.kernel_bundles.items():
        yield f"  {name:28s}{count:>14,d} bundles"
    if plan.unknown_loops:
        loops = len(plan.unknown_loops)
        yield f"  loops counted once because their trip counts depend on data: {loops}"


def _exchange(plan: Plan) -> Iterator[str]:
    yield "collectives per device and step:"
    if not plan.collectives:
        yield "  none"
    for each in plan.collectives:
        kind = f"{'asynchronous ' if each.asynchronous else ''}{each.kind}"
        where = "in layers" if each.in_layers else ""
        yield (
            f"  {kind:34s}{' x '.join(each.axes):18s}{each.calls:>6d} calls{_size(each.bytes):>10s}"
            f"{1e3 * each.exposed_seconds:>9.3f} ms exposed  {where}".rstrip()
        )


def _time(plan: Plan) -> Iterator[str]:
    time = plan.time
    yield (
        f"estimated step time {time.total:.4g} s (kernels {time.kernels:.3g}, exposed collectives "
        f"{time.collectives:.2g}, context ranks waiting {time.waiting:.2g}), "
        f"{plan.tokens_a_second:,.0f} tokens/s, MFU {plan.model_flops_utilisation:.1%}, "
        f"HFU {plan.hardware_flops_utilisation:.1%}"
    )
    yield "an estimate, not a measurement; it assumes that"
    for line in plan.assumptions:
        yield f"  - {line}"


def _size(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"
