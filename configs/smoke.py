"""A run of seconds on one CPU core, for tests and for a first check that everything works.

    python train.py --config configs/smoke.py

Twenty steps of a two-layer model on one device; the loss falls from 5.6 to about 4 nats per byte.
"""

from configs import base


def get_config():
    """A tiny model and short rows, through the same code as a large run."""
    config = base.get_config()
    with config.unlocked():
        config.train.steps = 20
        config.data.sequence_length = 128
        config.data.global_batch_size = 2
        config.model.d_model = 64
        config.model.num_repeats = 2
        config.model.d_ff = 128
        config.model.kda_heads = 2
        config.model.key_dim = 16
        config.model.value_dim = 16
        config.model.gate_rank = 16
        config.model.compute_dtype = "float32"
        config.optimizer.learning_rate = 3e-3
        config.optimizer.schedule_steps = 20
        config.optimizer.warmup_steps = 5
        config.eval.every = 10
        config.eval.batches = 4
        config.checkpoint.every = 10
    return config
