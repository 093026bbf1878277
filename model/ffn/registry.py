"""Feed-forward layers by their names in config.model.ffn."""

from model.config import ModelConfig
from model.ffn import experts, swiglu
from model.ffn.protocol import FeedForward
from options import wrong

FEED_FORWARDS: dict[str, FeedForward] = {
    "swiglu": swiglu,
    "experts": experts,
}


def feed_forwards_of(cfg: ModelConfig) -> tuple[FeedForward, ...]:
    """The feed-forward layers, one for each mixer of `registry.mixers_of`.

    Raises:
        OptionError: config.model.ffn contains an unknown name, or the wrong number of names.
    """
    names = cfg.ffns
    if any(name not in FEED_FORWARDS for name in names) or len(names) != len(cfg.mixers):
        needs = (
            "one name, or one for each mixer of config.model.prefix, pattern and suffix "
            f"({len(cfg.mixers)}), of "
        )
        raise wrong("config.model.ffn", cfg.ffn, needs + ", ".join(FEED_FORWARDS), "swiglu")
    return tuple(FEED_FORWARDS[name] for name in names)
