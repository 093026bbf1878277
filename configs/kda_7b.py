"""KDA, 7B parameters, on 64 v7x chips (128 devices): rows of 131,072 tokens.

    python train.py --config configs/kda_7b.py --config.data.source=jsonl \
        --config.data.path=DOCUMENTS --config.data.tokenizer=tokenizer.json
    python train.py --config configs/kda_7b.py --plan tpu7x:4x4x4

Memory, estimated step time and compile time: docs/measurements.md, "Plans of the shipped configs".
"""

from configs import base


def get_config():
    """32 layers of width 4096; a step takes 16 rows of 131072 tokens."""
    config = base.get_config()
    with config.unlocked():
        config.mesh.fsdp = 16
        config.mesh.context = 8
        config.train.steps = 100_000
        config.data.global_batch_size = 16
        config.data.sequence_length = 131072
        config.model.vocab_size = 32768
        config.model.d_model = 4096
        config.model.pattern = "kda"
        config.model.num_repeats = 32
        config.model.d_ff = 11264
        config.model.kda_heads = 32
        config.optimizer.learning_rate = 3e-4
        config.optimizer.warmup_steps = 2000
        config.eval.every = 2000
        config.eval.batches = 16
        config.checkpoint.every = 1000
    return config
