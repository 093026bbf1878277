"""KDA, 1.1B parameters, on 16 v6e chips: rows of 131,072 tokens.

    python train.py --config configs/kda_1b.py --config.data.source=jsonl \
        --config.data.path=DOCUMENTS --config.data.tokenizer=tokenizer.json
    python train.py --config configs/kda_1b.py --plan v6e:4x4

Memory, estimated step time and compile time: docs/measurements.md, "Plans of the shipped configs".
"""

from configs import base


def get_config():
    """18 layers of width 2048; a step takes 4 rows of 131072 tokens."""
    config = base.get_config()
    with config.unlocked():
        config.mesh.fsdp = 4
        config.mesh.context = 4
        config.train.steps = 100_000
        config.data.global_batch_size = 4
        config.data.sequence_length = 131072
        config.model.vocab_size = 32768
        config.model.d_model = 2048
        config.model.pattern = "kda"
        config.model.num_repeats = 18
        config.model.d_ff = 5632
        config.model.kda_heads = 16
        config.optimizer.learning_rate = 6e-4
        config.optimizer.warmup_steps = 2000
        config.eval.every = 2000
        config.eval.batches = 16
        config.checkpoint.every = 1000
    return config
