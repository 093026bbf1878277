"""Floating-point operations that training a token needs; a multiply-add counts as two.

Model FLOPs: what the mathematics needs, not what rematerialisation repeats. The backward of a
product is two products of its size, so training is three times the forward.
"""

from model.config import ModelConfig
from model.ffn import feed_forwards_of
from model.mixers.registry import mixers_of

_TRAIN = 3  # forward and backward over forward


def train_flops_per_token(cfg: ModelConfig) -> float:
    """Everything that is the same for every token: what layers declare, and the head.

    The embedding is read, not multiplied; the vocabulary's padding does not count.
    """
    head = 2.0 * cfg.d_model * cfg.vocab_size
    mixers = sum(mixer.flops_per_token(cfg) for mixer in mixers_of(cfg))
    ffns = sum(ffn.flops_per_token(cfg) for ffn in feed_forwards_of(cfg))
    return _TRAIN * (head + cfg.num_repeats * (mixers + ffns))


def key_flops_per_token(cfg: ModelConfig, mean_context: float) -> float:
    """What grows with the keys that a token sees, training, all layers; 0 without such layers.

    mean_context: keys that a query sees, on average; (n + 1) / 2 for documents of n tokens.
    """
    forward = sum(mixer.flops_per_key(cfg) for mixer in mixers_of(cfg))
    return _TRAIN * cfg.num_repeats * forward * mean_context
