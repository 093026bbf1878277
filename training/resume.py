"""Whether a checkpoint's model and state are of this run's kind, and what else has changed since.

Data is not compared here: the loader knows what a position means and refuses one of other data.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Differences:
    """Lines "config.x.y a there, b here", by what they mean for going on."""

    model: list[str]
    state: list[str]
    other: list[str]


def differences(saved: Config, current: Config, meanings: Mapping[str, str]) -> Differences:
    """Compares two configs as nested dicts.

    Args:
        meanings: `Option.on_resume` by the option's name; options that are unknown to either are
            reported.
    """
    found = Differences([], [], [])
    for group in sorted({*saved, *current}):
        old, new = saved.get(group, {}), current.get(group, {})
        for name in sorted({*old, *new}):
            if old.get(name) == new.get(name):
                continue
            meaning = meanings.get(f"{group}.{name}", "report")
            line = f"config.{group}.{name} is {old.get(name)!r} there and {new.get(name)!r} here"
            if meaning == "model":
                found.model.append(line)
            elif meaning == "state":
                found.state.append(line)
            elif meaning == "report":
                found.other.append(line)
    return found
