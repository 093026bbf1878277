"""Checks of a whole config, before data are read or JAX starts."""

import difflib
import re

from ml_collections import ConfigDict

from configs import base
from errors import UserError
from options import OptionError, check_value, wrong


def check(config: ConfigDict) -> None:
    """Checks names, types and ranges of all options, and rules across them.

    Raises:
        UserError: one line that names the option, what it needs, and what would work.
    """
    _check_names(config)
    for name, field, metadata in base.all_options():
        check_value(f"config.{name}", _get(config, name), field, metadata)
    _check_rows(config)
    _check_schedule(config)
    _check_windows(config)
    if not re.fullmatch("(?!.*://).*|gs://[^/]+(/.*)?", config.checkpoint.directory):
        needs = "a local folder or gs://bucket/path"
        raise _wrong(config, "checkpoint.directory", needs, "gs://bucket/run")


def hints(name: str) -> list[str]:
    """Options that an unknown name may refer to, best match first: options with this earlier or
    common name, options of this name in another group, and options with a similar spelling."""
    last = name.split(".")[-1]
    found = [option for option, _, metadata in base.all_options() if last in metadata.renamed_from]
    names = [option for option, _, _ in base.all_options()]
    found += [option for option in names if option.split(".")[-1] == last]
    if not found:
        found = difflib.get_close_matches(name, names, 2, 0.6)
    return list(dict.fromkeys(found))


def _check_names(config: ConfigDict) -> None:
    """A config file unlocks the options to change them, so it might also add or remove some."""
    for group in [*base.RECORDS, *config]:
        if group not in base.RECORDS or not isinstance(config.get(group), ConfigDict):
            raise OptionError(
                f"config.{group}: needs to be one of the option groups "
                f"{', '.join(base.RECORDS)}; try starting from base.get_config() as "
                "configs/smoke.py does"
            )
    wanted = {name: field.default for name, field, _ in base.all_options()}
    given = [f"{group}.{name}" for group, options in config.items() for name in options]
    for name in given:
        if name not in wanted:
            near = hints(name) or ["one of docs/configuration.md"]
            raise OptionError(f"config.{name}: there is no such option; try {near[0]}")
    for name, default in wanted.items():
        if name not in given:
            raise OptionError(f"config.{name}: is missing; needs a value; try {default!r}")


def _check_windows(config: ConfigDict) -> None:
    if config.train.tbptt_windows > 1 and config.data.packing != "stream":
        raise _wrong(config, "train.tbptt_windows", 'data.packing="stream"', "1")
    if config.train.tbptt_windows > 1 and not config.model.carry:
        raise _wrong(config, "train.tbptt_windows", "model.carry=True", "1")


def _check_rows(config: ConfigDict) -> None:
    mesh, rows = config.mesh, config.data.global_batch_size
    length = config.data.sequence_length
    if length % mesh.context:
        raise _wrong(
            config,
            "data.sequence_length",
            f"a multiple of config.mesh.context ({mesh.context})",
            _multiples(length, mesh.context),
        )
    ranks = mesh.data * mesh.fsdp * mesh.expert
    if rows % ranks:
        raise _wrong(
            config,
            "data.global_batch_size",
            f"a multiple of config.mesh.data * fsdp * expert ({ranks})",
            _multiples(rows, ranks),
        )
    if rows % (ranks * config.train.grad_accum_steps):
        raise _wrong(
            config,
            "train.grad_accum_steps",
            f"a divisor of the rows of a rank ({rows // ranks})",
            _divisors(rows // ranks, config.train.grad_accum_steps),
        )


def _check_schedule(config: ConfigDict) -> None:
    optimizer = config.optimizer
    steps = optimizer.schedule_steps or config.train.steps
    text = "optimizer.schedule_steps" if optimizer.schedule_steps else "train.steps"
    if optimizer.warmup_steps and optimizer.warmup_steps >= steps:
        raise _wrong(
            config, "optimizer.warmup_steps", f"less than config.{text} ({steps})", f"{steps // 10}"
        )
    if optimizer.schedule == "wsd" and optimizer.warmup_steps + optimizer.decay_steps > steps:
        raise _wrong(
            config,
            "optimizer.decay_steps",
            f"warmup_steps + decay_steps <= config.{text} ({steps})",
            f"{max(1, steps - optimizer.warmup_steps)}",
        )


def _wrong(config: ConfigDict, name: str, needs: str, suggestion: str) -> UserError:
    return wrong(f"config.{name}", _get(config, name), needs, suggestion)


def _get(config: ConfigDict, name: str):
    group, option = name.split(".")
    return config[group][option]


def _multiples(value: int, unit: int) -> str:
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else f"{above}"


def _divisors(size: int, near: int) -> str:
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    below = [d for d in divisors if d < near][-1:]
    above = [d for d in divisors if d > near][:1]
    return " or ".join(str(d) for d in below + above)
