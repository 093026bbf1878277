"""Floating-point operations for training a token; a multiply-add counts as two.

These are model FLOPs: those of the mathematics, without the repetitions of rematerialisation. The
backward of a product is two products of the same size, so training is three times the forward.
"""

from model.config import ModelConfig
from model.ffn.registry import feed_forwards_of
from model.mixers.registry import mixers_of

_TRAIN = 3  # FLOPs of forward and backward, divided by those of the forward


def train_flops_per_token(cfg: ModelConfig) -> float:
    """FLOPs that are the same for every token: those that layers declare, and the head's.

    The embedding is read, not multiplied; the vocabulary's padding is not counted.
    """
    head = 2.0 * cfg.d_model * cfg.vocab_size
    layers = zip(cfg.repeats, mixers_of(cfg), feed_forwards_of(cfg), strict=True)
    forward = sum(
        n * (mix.flops_per_token(cfg) + ffn.flops_per_token(cfg)) for n, mix, ffn in layers
    )
    return _TRAIN * (head + forward)


def key_flops_per_token(cfg: ModelConfig, mean_context: float) -> float:
    """Training FLOPs per token that grow with the keys it sees, of all layers; 0 without such
    layers.

    mean_context: keys that a query sees, on average; (n + 1) / 2 for documents of n tokens.
    """
    layers = zip(cfg.repeats, mixers_of(cfg), strict=True)
    forward = sum(n * mixer.flops_per_key(cfg) for n, mixer in layers)
    return _TRAIN * forward * mean_context
