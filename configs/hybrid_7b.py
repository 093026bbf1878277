"""Three KDA layers to one of attention, 7B parameters, on 256 v7x chips: rows of 1,048,576 tokens.

    python train.py --config configs/hybrid_7b.py --config.data.source=jsonl \
        --config.data.path=DOCUMENTS --config.data.tokenizer=tokenizer.json
    python train.py --config configs/hybrid_7b.py --plan tpu7x:4x8x8

Memory, estimated step time and compile time: docs/measurements.md, "Plans of the shipped configs".
"""

from configs.sizes import sized


def get_config():
    """32 layers of width 4096; a step takes 16 rows of 1048576 tokens."""
    return sized(
        "7b",
        hybrid=True,
        fsdp=16,
        context=32,
        sequence_length=1_048_576,
    )
