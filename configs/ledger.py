"""A model that remembers: the ledger task of benchmarks/ledger.py, with carried state.

    python train.py --config configs/ledger.py

Two KDA layers of width 128 read three million tokens of generated documents of eight rows
(docs/data.md), on one CPU core. 91 % of the answers are right after 300 steps, 99.8 % at the end
(docs/evidence.md).
"""

from configs import base


def get_config():
    """Rows of 256 tokens, eight per document; 2,048 tokens per step."""
    config = base.get_config()
    with config.unlocked():
        config.train.steps = 1500
        config.data.source = "ledger"
        config.data.task_length = 2048
        config.data.sequence_length = 256
        config.data.global_batch_size = 8
        config.model.d_model = 128
        config.model.num_repeats = 2
        config.model.d_ff = 128
        config.model.kda_heads = 2
        config.model.key_dim = 64
        config.model.value_dim = 64
        config.model.gate_rank = 64
        config.model.compute_dtype = "float32"
        config.model.remat = "none"
        config.optimizer.name = "muon"
        config.optimizer.learning_rate = 1e-2
        config.optimizer.schedule_steps = 1500
        config.optimizer.warmup_steps = 50
        config.optimizer.weight_decay = 0.01
        config.eval.every = 100
        config.eval.batches = 16
        config.checkpoint.every = 0
        config.log.every = 10
    return config
