"""KDA, 1.1B parameters, on 16 v6e chips: rows of 131,072 tokens.

    python train.py --config configs/kda_1b.py --config.data.source=jsonl \
        --config.data.path=DOCUMENTS --config.data.tokenizer=tokenizer.json
    python train.py --config configs/kda_1b.py --plan v6e:4x4

Compiled on 2026-12-01: 1,079M parameters, 7.5 GB per device, estimated 1.41 s per step (MFU 16 %);
docs/measurements.md, "Plans of the shipped configs".
"""

from configs.sizes import sized


def get_config():
    """18 layers of width 2048; a step takes 4 rows of 131072 tokens."""
    return sized(
        "1b",
        hybrid=False,
        fsdp=4,
        context=4,
        sequence_length=131_072,
    )
