"""Shapes shared by the configs of real sizes: heads of 128, widths of 1024 to 4096.

Each of these configs is one call of `sized` plus its specific options.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from configs import base


class Size(NamedTuple):
    """A decoder's width, layers and peak learning rate. Feed-forward layers have 2.75 columns per
    channel, KDA and attention one head of 128 per 128 channels; attention has a quarter as many
    heads of keys and values."""

    d_model: int
    kda_layers: int  # of a pure KDA model
    hybrid_layers: int  # of one with attention in every fourth layer
    learning_rate: float


SIZES = {
    "400m": Size(1024, kda_layers=24, hybrid_layers=24, learning_rate=1e-3),
    "1b": Size(2048, kda_layers=18, hybrid_layers=20, learning_rate=6e-4),
    "7b": Size(4096, kda_layers=32, hybrid_layers=32, learning_rate=3e-4),
}


def sized(name: str, hybrid: bool, fsdp: int, context: int, sequence_length: int) -> ConfigDict:
    """A config of one size, with one row of `sequence_length` tokens per fsdp rank.

    Args:
        name: a key of SIZES. hybrid: every fourth layer is attention.
    """
    size, config = SIZES[name], base.get_config()
    with config.unlocked():
        config.mesh.update(fsdp=fsdp, context=context)
        config.train.steps = 100_000
        config.data.update(global_batch_size=fsdp, sequence_length=sequence_length)
        config.model.update(
            vocab_size=32768,
            d_model=size.d_model,
            pattern="kda",
            num_repeats=size.kda_layers,
            d_ff=size.d_model * 11 // 4,
            kda_heads=size.d_model // 128,
        )
        config.optimizer.update(learning_rate=size.learning_rate, warmup_steps=2000)
        config.eval.update(every=2000, batches=16)
        config.checkpoint.every = 1000
        if hybrid:
            _add_attention(config, size)
    return config


def _add_attention(config: ConfigDict, size: Size) -> None:
    heads = size.d_model // 128
    config.model.update(
        pattern="kda,kda,kda,attention",
        num_repeats=size.hybrid_layers // 4,
        attention_heads=heads,
        attention_kv_heads=heads // 4,
    )
