"""Compares a checkpoint's config with this run's: model, structure of the state, other options.

Data are not compared here: the loader refuses a position that belongs to other data.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from training.optimizer import options_of
from training.tunables import rate, schedule_of

Config = Mapping[str, Mapping[str, Any]]
JUMP = 0.01  # smaller relative changes of the learning rate are not reported


@dataclasses.dataclass(frozen=True)
class Differences:
    """Lines "config.x.y is a there and b here", by their effect on resuming."""

    model: list[str]
    state: list[str]
    other: list[str]


def with_defaults(saved: Config, defaults: Config) -> Config:
    """A saved config, with the defaults of options that were added since: the default of an option
    is the trainer's behaviour before it had that option."""
    return {group: {**defaults.get(group, {}), **saved.get(group, {})}
            for group in {**saved, **defaults}}  # fmt: skip


def differences(saved: Config, current: Config, meanings: Mapping[str, str]) -> Differences:
    """Compares two configs as nested dicts.

    Args:
        meanings: `Option.on_resume` by the option's name; options that only one config has are
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


def rate_jump(saved: Config, current: Config, step: int) -> str:
    """A line if the learning rate after `step` differs from that of the checkpoint's schedule, ""
    if it is the same."""
    before, after = (_schedule(config) for config in (saved, current))
    expected, found = float(before(step)), float(after(step))
    if abs(found - expected) <= JUMP * expected:
        return ""
    line = (
        f"the learning rate goes from {float(before(max(step - 1, 0))):.2e} at step {step} to "
        f"{found:.2e} at step {step + 1}; the checkpoint's schedule has {expected:.2e} there"
    )
    if not (saved["optimizer"]["schedule_steps"] or current["optimizer"]["schedule_steps"]):
        steps = saved["train"]["steps"]
        return f"{line}, which --config.optimizer.schedule_steps={steps} keeps"
    return f"{line}, which the options of config.optimizer that were changed keep, set back"


def _schedule(config: Config) -> Callable[[int], jax.Array]:
    options = options_of(config["optimizer"], config["train"]["steps"])
    return functools.partial(rate, schedule_of(options))
