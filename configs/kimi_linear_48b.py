"""Kimi Linear 48B: KDA and latent attention with experts, 3B active parameters, on 64 v7x chips.

    python train.py --config configs/kimi_linear_48b.py --config.data.source=jsonl \
        --config.data.path=DOCUMENTS --config.data.tokenizer=tokenizer.json
    python train.py --config configs/kimi_linear_48b.py --plan tpu7x:4x4x4
"""

from configs import base


def get_config():
    """27 layers of width 2304, the first one dense; a step takes 32 rows of 16384 tokens."""
    config = base.get_config()
    with config.unlocked():
        config.mesh.fsdp = 4
        config.mesh.expert = 8
        config.mesh.context = 4
        config.train.steps = 100_000
        config.data.global_batch_size = 32
        config.data.sequence_length = 16384
        config.model.vocab_size = 163840
        config.model.d_model = 2304
        # Latent attention in every fourth layer and in the last one.
        config.model.prefix = "kda"
        config.model.pattern = "kda,kda,mla,kda"
        config.model.num_repeats = 6
        config.model.suffix = "kda,mla"
        config.model.ffn = "swiglu" + 6 * ",experts"
        config.model.d_ff = 9216
        config.model.num_experts = 256
        config.model.experts_per_token = 8
        config.model.expert_d_ff = 1024
        config.model.shared_experts = 1
        config.model.router_scale = 2.446
        config.model.kda_heads = 32
        config.model.mla_heads = 32
        config.optimizer.name = "muon"
        config.optimizer.learning_rate = 3e-4
        config.optimizer.warmup_steps = 2000
        config.eval.every = 2000
        config.eval.batches = 16
        config.checkpoint.every = 1000
    return config
