"""The result of all checks as Markdown, to paste into an issue."""

import dataclasses
import platform

from training.tpu_check.outcome import GOOD, Machine, Outcome, Status


@dataclasses.dataclass(frozen=True)
class Row:
    """One check and its result. seconds: including compilation."""

    name: str
    outcome: Outcome
    seconds: float


def table(machine: Machine, rows: list[Row], how: str, date: str, factors: str) -> str:
    """The results as Markdown; factors: a sentence about the measured speeds."""
    bad = [row for row in rows if row.outcome.status not in GOOD]
    done = sum(row.outcome.status is Status.OK for row in rows)
    total = sum(row.seconds for row in rows)
    head = (
        f"**tpu-check** of {date}: {how}, {machine.devices} x {machine.device_kind}, jax "
        f"{machine.jax}, libtpu {machine.libtpu}, Python {platform.python_version()}. "
        f"{done} of {len(rows)} passed, {len(bad)} did not, in {total:.0f} s. {factors}"
    )
    lines = [
        f"| {row.name} | {_status(row.outcome.status)} | {row.outcome.detail.replace('|', '/')} | "
        f"{row.seconds:.1f} |"
        for row in rows
    ]
    return "\n".join([head, "", "| check | result | found | s |", "|---|---|---|---|", *lines])


def _status(status: Status) -> str:
    return status if status in GOOD else f"**{status}**"


def exit_code(rows: list[Row]) -> int:
    """0 if every check passed or was skipped for lack of devices, else 1."""
    return int(any(row.outcome.status not in GOOD for row in rows))
