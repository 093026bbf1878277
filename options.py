"""Declares an option once: default, meaning, unit, range and choices, as dataclass field metadata.

Every package declares its options in frozen records (`data/options.py`, `model/config.py`,
`training/options.py`, ...). `configs/base.py` collects the records; checks, `--help` and
docs/configuration.md are derived from the same metadata. This module imports only errors.py and
the standard library, so any package may import it.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from errors import UserError

MAX_INT = 2**31 - 1  # steps and positions are counted in int32


class OptionError(UserError):
    """A mistake in an option: one line with the option, its value, what it needs, what to try."""


@dataclasses.dataclass(frozen=True)
class Option:
    """Metadata of one option.

    Attributes:
        help: meaning in one or two sentences, without default, unit and range.
        unit: such as "steps", "tokens"; "" for strings, booleans and dimensionless numbers.
        minimum, maximum: inclusive bounds. above, below: exclusive bounds. None: unbounded.
        choices: the allowed values of a string; () allows any.
        try_value: the value that an error suggests. None: the default.
        renamed_from: earlier names, and names that other trainers use, for hints.
        on_resume: what a change means for a run that resumes. "model": the saved parameters belong
            to a different model; "state": the rest of the saved state has a different structure;
            "report": the change is allowed and reported; "silent": it is allowed.
    """

    help: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    try_value: Any = None
    renamed_from: tuple[str, ...] = ()
    on_resume: str = "report"

    def constraint(self) -> str:
        """The allowed values in words, "" if there is no constraint."""
        if self.choices:
            return "one of " + ", ".join(repr(choice) for choice in self.choices)
        bounds = [
            f"{sign} {bound:g}"
            for sign, bound in (
                (">=", self.minimum),
                (">", self.above),
                ("<=", self.maximum),
                ("<", self.below),
            )
            if bound is not None
        ]
        return " and ".join(bounds)

    def accepts(self, value: Any) -> bool:
        """Whether a value of the option's type is within range."""
        if self.choices:
            return value in self.choices
        return not (
            (self.minimum is not None and not value >= self.minimum)
            or (self.maximum is not None and not value <= self.maximum)
            or (self.above is not None and not value > self.above)
            or (self.below is not None and not value < self.below)
        )


def option[T](default: T, help: str, **metadata: Any) -> T:
    """A dataclass field that is an option; `metadata` are the other attributes of `Option`."""
    field: T = dataclasses.field(
        default=default, metadata={"option": Option(help=help, **metadata)}
    )
    return field


def declared(record: type) -> Iterator[tuple[dataclasses.Field, Option]]:
    """Yields the options of a record, in order; fields without metadata are not options."""
    for field in dataclasses.fields(record):
        if "option" in field.metadata:
            yield field, field.metadata["option"]


def check(record: Any, group: str) -> None:
    """Checks the type, range and choices of each option of a record.

    Args:
        record: an instance of a dataclass. group: its name in the config, such as "data".

    Raises:
        OptionError: for the first option that fails a check.
    """
    for field, metadata in declared(type(record)):
        check_value(f"config.{group}.{field.name}", getattr(record, field.name), field, metadata)


def check_value(name: str, value: Any, field: dataclasses.Field, metadata: Option) -> None:
    """Checks one value; `name` is the option's full name for the message."""
    kind: type = type(field.default)
    suggestion = field.default if metadata.try_value is None else metadata.try_value
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise wrong(name, value, f"a value of type {kind.__name__}", suggestion)
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong(name, value, "a finite number", suggestion)
    if isinstance(value, int) and value > MAX_INT:
        raise wrong(name, value, f"a whole number <= {MAX_INT}", suggestion)
    if not metadata.accepts(value):
        needs = metadata.constraint()
        raise wrong(name, value, needs if metadata.choices else f"a number {needs}", suggestion)


def wrong(name: str, value: Any, needs: str, suggestion: Any) -> OptionError:
    """The error for an option: every message about an option has this form."""
    return OptionError(f"{name}={value!r}: needs {needs}; try {suggestion}")
