"""Floating-point operations that training a token needs; a multiply-add counts as two.

Model FLOPs: what the mathematics needs, not what rematerialisation repeats. The backward of a
product is two products of its size, so training is three times the forward.
"""

import math

import jax

from model.config import ModelConfig
from model.sharding import block_specs

CHUNK = 64  # tokens a chunk of KDA's chunked form
_TRAIN = 3  # forward and backward over forward


def train_flops_per_token(cfg: ModelConfig) -> float:
    """Everything but attention's scores and their values: the same for every token.

    6 a weight of every matrix (the embedding is read, not multiplied), plus convolutions and
    KDA. KDA's count does not depend on row length, packing or ranks.
    """
    forward = 2.0 * cfg.d_model * cfg.vocab_size  # the head, without the vocabulary's padding
    for mixer in cfg.pattern:
        matrices = [spec for spec in jax.tree.leaves(block_specs(cfg, mixer)) if spec.cast]
        layer = 2.0 * sum(math.prod(spec.shape) for spec in matrices)
        if mixer == "kda":
            channels = cfg.kda_heads * (2 * cfg.key_dim + cfg.value_dim)
            layer += 2.0 * cfg.conv_kernel_size * channels + kda_flops_per_token(cfg)
        forward += cfg.num_repeats * layer
    return _TRAIN * forward


def kda_flops_per_token(cfg: ModelConfig) -> float:
    """Forward of one layer's chunked KDA, all heads, with C = 64 tokens a chunk.

    A token and head: 6 K V for the state (p S, q S, S'), 4 C K for L and Aqk, 4 C V for A and Aqk
    times values, 2/3 C^2 for the inverse of I + L.
    """
    k, v, c = cfg.key_dim, cfg.value_dim, CHUNK
    return cfg.kda_heads * (6.0 * k * v + 4.0 * c * (k + v) + 2.0 / 3.0 * c * c)


def attention_flops_per_token(cfg: ModelConfig, mean_context: float) -> float:
    """Scores and their values of all attention layers, training, a token.

    mean_context: keys that a query sees, on average; (n + 1) / 2 for documents of n tokens.
    """
    layers = cfg.num_repeats * cfg.pattern.count("attention")
    forward = 4.0 * cfg.attention_heads * cfg.attention_head_dim * mean_context
    return _TRAIN * layers * forward
