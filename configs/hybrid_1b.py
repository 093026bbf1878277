"""Three KDA layers to one of attention, 1.1B parameters, on 16 v6e chips: rows of 32,768 tokens.

    python train.py --config configs/hybrid_1b.py --config.data.source=jsonl \
        --config.data.path=DOCUMENTS --config.data.tokenizer=tokenizer.json
    python train.py --config configs/hybrid_1b.py --plan v6e:4x4

Memory, estimated step time and compile time: docs/measurements.md, "Plans of the shipped configs".
"""

from configs.sizes import sized


def get_config():
    """20 layers of width 2048; a step takes 4 rows of 32768 tokens."""
    return sized(
        "1b",
        hybrid=True,
        fsdp=4,
        context=4,
        sequence_length=32_768,
    )
