"""Makes bailing_hybrid.npz: `bailing_hybrid` of transformers, a KDA layer and an MLA layer.

    python3.12 -m venv /tmp/hf && /tmp/hf/bin/pip install torch==2.13.0 transformers==5.24.0
    /tmp/hf/bin/python tests/golden/make_bailing_hybrid.py

KDA has full-rank gates and the bounded decay; MLA has rotary positions and an output gate, and
experts after it. As make_kimi_linear.py, whose float64 code and weights it uses. "w:" is a weight,
"g:" the loss's gradient with respect to it; two rows of 40 tokens.
"""

import pathlib

import numpy as np
import torch
import transformers
from make_kimi_linear import in_float64, make_weights
from transformers.models.bailing_hybrid import BailingHybridConfig, modeling_bailing_hybrid

FILE = pathlib.Path(__file__).parent / "bailing_hybrid.npz"


def make_model(random: np.random.Generator) -> torch.nn.Module:
    config = BailingHybridConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=6,
        v_head_dim=10,
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
        n_group=1,
        topk_group=1,
        num_local_experts=6,
        num_experts_per_tok=3,
        n_shared_experts=2,
        moe_intermediate_size=14,
        routed_scaling_factor=1.7,
        rope_parameters={"rope_type": "default", "rope_theta": 50.0},
        pad_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = in_float64(modeling_bailing_hybrid).BailingHybridForCausalLM(config).double()
    make_weights(model, random)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.copy_(torch.tensor(0.3 * random.normal(size=bias.shape).astype(np.float32)))
    return model


def main() -> None:
    random = np.random.default_rng(2)
    model = make_model(random)
    tokens = random.integers(0, 61, (2, 40))
    targets = np.roll(tokens, -1, axis=1)
    logits = model(input_ids=torch.tensor(tokens), use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
    loss.backward()
    assert logits.dtype == torch.float64

    arrays = {"logits": logits.detach(), "loss": loss.detach()}
    for name, weight in model.named_parameters():
        arrays |= {f"w:{name}": weight.detach(), f"g:{name}": weight.grad}
    arrays |= {f"w:{name}": buffer for name, buffer in model.named_buffers() if "score" in name}
    stored = {name: np.asarray(array, np.float32) for name, array in arrays.items()}
    stored |= {"tokens": tokens.astype(np.int32), "targets": targets.astype(np.int32)}
    np.savez_compressed(FILE, **stored)
    size = FILE.stat().st_size
    print(f"transformers {transformers.__version__}, loss {loss.item():.6f}, {size} bytes")


if __name__ == "__main__":
    main()
