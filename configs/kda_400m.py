"""KDA, 400M parameters, on four v6e chips: rows of 32,768 tokens over a context axis of 4.

    python train.py --config configs/kda_400m.py --config.data.source=jsonl \
        --config.data.path=DOCUMENTS --config.data.tokenizer=tokenizer.json
    python train.py --config configs/kda_400m.py --plan v6e:2x2

Compiled on 2026-12-01: 389M parameters, 2.67 GB per device, estimated 216 ms per step (MFU 9 %);
docs/measurements.md, "Plans of the shipped configs".
"""

from configs.sizes import sized


def get_config():
    """24 layers of width 1024; a step takes one row of 32768 tokens."""
    return sized(
        "400m",
        hybrid=False,
        fsdp=1,
        context=4,
        sequence_length=32_768,
    )
