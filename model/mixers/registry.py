"""Mixers by the names that config.model.pattern uses."""

from model.config import ModelConfig
from model.mixers import attention, kda, mla
from model.mixers.protocol import Mixer
from options import wrong

MIXERS: dict[str, Mixer] = {
    "kda": kda,
    "attention": attention,
    "mla": mla,
}


def mixers_named(names: str) -> tuple[Mixer, ...]:
    """The mixers of a pattern, in order.

    Raises:
        OptionError: config.model.pattern names one that does not exist.
    """
    listed = names.replace(",", " ").split()
    if any(name not in MIXERS for name in listed):
        needs = "names of " + ", ".join(MIXERS)
        raise wrong("config.model.pattern", names, needs, next(iter(MIXERS)))
    return tuple(MIXERS[name] for name in listed)


def mixers_of(cfg: ModelConfig) -> tuple[Mixer, ...]:
    """The mixers of one repeat, in order; see `mixers_named`."""
    return mixers_named(cfg.pattern)


def reads_positions(names: str) -> bool:
    """Whether a mixer of a pattern needs each token's place in its document on the device."""
    return any(mixer.READS_POSITIONS for mixer in mixers_named(names))
