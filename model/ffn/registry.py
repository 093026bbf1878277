"""Feed-forward layers by the names that config.model.ffn uses."""

from model.config import ModelConfig
from model.ffn import experts, swiglu
from model.ffn.protocol import FeedForward
from options import wrong

FEED_FORWARDS: dict[str, FeedForward] = {
    "swiglu": swiglu,
    "experts": experts,
}


def feed_forwards_of(cfg: ModelConfig) -> tuple[FeedForward, ...]:
    """The feed-forward layers, one beside each mixer of `registry.mixers_of`.

    Raises:
        OptionError: config.model.ffn names one that does not exist, or too few or too many.
    """
    names = cfg.ffns
    if any(name not in FEED_FORWARDS for name in names) or len(names) != len(cfg.mixers):
        needs = (
            "one name, or one for each mixer of config.model.prefix, pattern and suffix "
            f"({len(cfg.mixers)}), of "
        )
        raise wrong("config.model.ffn", cfg.ffn, needs + ", ".join(FEED_FORWARDS), "swiglu")
    return tuple(FEED_FORWARDS[name] for name in names)
