"""Three KDA layers to one of attention, 400M parameters, on 16 v6e chips: rows of 65,536 tokens.

    python train.py --config configs/hybrid_400m.py --config.data.source=jsonl \
        --config.data.path=DOCUMENTS --config.data.tokenizer=tokenizer.json
    python train.py --config configs/hybrid_400m.py --plan v6e:4x4

Memory, estimated step time and compile time: docs/measurements.md, "Plans of the shipped configs".
"""

from configs.sizes import sized


def get_config():
    """24 layers of width 1024; a step takes 4 rows of 65536 tokens."""
    return sized(
        "400m",
        hybrid=True,
        fsdp=4,
        context=4,
        sequence_length=65_536,
    )
