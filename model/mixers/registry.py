"""Mixers by their names in config.model.pattern, prefix and suffix."""

from typing import Protocol

from model.config import ModelConfig
from model.mixers import attention, kda, mla
from model.mixers.protocol import Mixer
from options import wrong

MIXERS: dict[str, Mixer] = {
    "kda": kda,
    "attention": attention,
    "mla": mla,
}


class Patterns(Protocol):
    """The names of a model's mixers: a `ModelConfig`, or config.model."""

    @property
    def prefix(self) -> str: ...
    @property
    def pattern(self) -> str: ...
    @property
    def suffix(self) -> str: ...


def mixers_of(model: Patterns) -> tuple[Mixer, ...]:
    """The mixers of prefix, pattern and suffix, in order, one per position.

    Raises:
        OptionError: an option contains an unknown name.
    """
    found: list[Mixer] = []
    for option in ("prefix", "pattern", "suffix"):
        names = getattr(model, option)
        listed = names.replace(",", " ").split()
        if any(name not in MIXERS for name in listed):
            needs = "names of " + ", ".join(MIXERS)
            raise wrong(f"config.model.{option}", names, needs, next(iter(MIXERS)))
        found += [MIXERS[name] for name in listed]
    return tuple(found)


def reads_positions(model: ModelConfig) -> bool:
    """Whether any mixer of a model (or of config.model) needs each token's position."""
    return any(mixer.reads_positions(model) for mixer in mixers_of(model))
