"""Floating-point operations that training a token needs; a multiply-add counts as two.

Model FLOPs: what the mathematics needs, not what rematerialisation repeats. The backward of a
product is two products of its size, so training is three times the forward.
"""

from model.config import ModelConfig
from model.ffn.registry import feed_forwards_of
from model.mixers.registry import mixers_of

_TRAIN = 3  # forward and backward over forward


def train_flops_per_token(cfg: ModelConfig) -> float:
    """Everything that is the same for every token: what layers declare, and the head.

    The embedding is read, not multiplied; the vocabulary's padding does not count.
    """
    head = 2.0 * cfg.d_model * cfg.vocab_size
    layers = zip(cfg.repeats, mixers_of(cfg), feed_forwards_of(cfg), strict=True)
    forward = sum(
        n * (mix.flops_per_token(cfg) + ffn.flops_per_token(cfg)) for n, mix, ffn in layers
    )
    return _TRAIN * (head + forward)


def key_flops_per_token(cfg: ModelConfig, mean_context: float) -> float:
    """What grows with the keys that a token sees, training, all layers; 0 without such layers.

    mean_context: keys that a query sees, on average; (n + 1) / 2 for documents of n tokens.
    """
    layers = zip(cfg.repeats, mixers_of(cfg), strict=True)
    forward = sum(n * mixer.flops_per_key(cfg) for n, mixer in layers)
    return _TRAIN * forward * mean_context
