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


def mixers_of(cfg: ModelConfig) -> tuple[Mixer, ...]:
    """The mixers of one repeat, in order.

    Raises:
        OptionError: config.model.pattern names one that does not exist.
    """
    for name in cfg.mixers:
        if name not in MIXERS:
            needs = "names of " + ", ".join(MIXERS)
            raise wrong("config.model.pattern", cfg.pattern, needs, next(iter(MIXERS)))
    return tuple(MIXERS[name] for name in cfg.mixers)
