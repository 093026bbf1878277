"""KDA, 7B parameters, on 64 v7x chips (128 devices): rows of 131,072 tokens.

    python train.py --config configs/kda_7b.py --config.data.source=jsonl \
        --config.data.path=DOCUMENTS --config.data.tokenizer=tokenizer.json
    python train.py --config configs/kda_7b.py --plan tpu7x:4x4x4

Memory, estimated step time and compile time: docs/measurements.md, "Plans of the shipped configs".
"""

from configs.sizes import sized


def get_config():
    """32 layers of width 4096; a step takes 16 rows of 131072 tokens."""
    return sized(
        "7b",
        hybrid=False,
        fsdp=16,
        context=8,
        sequence_length=131_072,
    )
