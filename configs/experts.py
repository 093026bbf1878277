"""A mixture of experts on one machine's CPU: 8 experts on two devices, 2 per token.

    python train.py --config configs/experts.py

A hundred steps of a small hybrid whose first layer is dense. `layer_01/expert_load`, the experts'
maximum of tokens divided by the mean, falls as the biases adapt (docs/measurements.md).
"""

from configs import base


def get_config():
    """Three layers of width 64; a step takes four rows of 128 tokens."""
    config = base.get_config()
    with config.unlocked():
        config.mesh.expert = 2
        config.train.steps = 100
        config.data.sequence_length = 128
        config.data.global_batch_size = 4
        config.model.d_model = 64
        config.model.prefix = "kda"
        config.model.pattern = "attention"
        config.model.num_repeats = 2
        config.model.ffn = "swiglu,experts"
        config.model.d_ff = 128
        config.model.num_experts = 8
        config.model.experts_per_token = 2
        config.model.expert_d_ff = 64
        config.model.router_bias_rate = 1e-2
        config.model.kda_heads = 2
        config.model.key_dim = 16
        config.model.value_dim = 16
        config.model.gate_rank = 16
        config.model.attention_head_dim = 32
        config.model.compute_dtype = "float32"
        config.optimizer.learning_rate = 3e-3
        config.optimizer.warmup_steps = 10
        config.eval.every = 100
        config.eval.batches = 4
        config.checkpoint.every = 50
        config.log.every = 5
    return config
