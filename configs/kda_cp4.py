"""The main config: KDA over a 4-way context axis; it also runs on one machine's CPU.

    python train.py --config configs/kda_cp4.py

Heads have K = V = 128, which the TPU kernels require, so the same file is meant for four TPU
devices (four chips; on v7x, the four cores of two). On two CPU cores it takes six minutes and ends
at about 2.27 bits per byte of validation text (docs/measurements.md).
"""

from configs import base


def get_config():
    """Four layers of width 256; two rows of 1024 tokens per step, each split over four devices."""
    config = base.get_config()
    with config.unlocked():
        config.mesh.context = 4
        config.train.steps = 300
        config.data.global_batch_size = 2
        config.data.sequence_length = 1024
        config.model.d_model = 256
        config.model.num_repeats = 4
        config.model.d_ff = 512
        config.model.kda_heads = 2
        config.optimizer.name = "muon"
        config.optimizer.learning_rate = 3e-3
        config.optimizer.schedule_steps = 300
        config.optimizer.warmup_steps = 20
        config.eval.every = 100
        config.eval.batches = 16
        config.checkpoint.every = 100
    return config
