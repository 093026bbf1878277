"""Three KDA layers to one of attention, 400M parameters, on 16 v6e chips: rows of 65,536 tokens.

    python train.py --config configs/hybrid_400m.py --config.data.source=jsonl \
        --config.data.path=DOCUMENTS --config.data.tokenizer=tokenizer.json
    python train.py --config configs/hybrid_400m.py --plan v6e:4x4

Memory, estimated step time and compile time: docs/measurements.md, "Plans of the shipped configs".
"""

from configs import base


def get_config():
    """24 layers of width 1024; a step takes 4 rows of 65536 tokens."""
    config = base.get_config()
    with config.unlocked():
        config.mesh.fsdp = 4
        config.mesh.context = 4
        config.train.steps = 100_000
        config.data.global_batch_size = 4
        config.data.sequence_length = 65536
        config.model.vocab_size = 32768
        config.model.d_model = 1024
        config.model.pattern = "kda,kda,kda,attention"
        config.model.num_repeats = 6
        config.model.d_ff = 2816
        config.model.kda_heads = 8
        config.model.attention_heads = 8
        config.model.attention_kv_heads = 2
        config.optimizer.learning_rate = 1e-3
        config.optimizer.warmup_steps = 2000
        config.eval.every = 2000
        config.eval.batches = 16
        config.checkpoint.every = 1000
    return config
