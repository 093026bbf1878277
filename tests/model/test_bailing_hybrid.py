"""Full-rank and bounded KDA gates, rotated and gated latent attention, and experts, against
transformers' `bailing_hybrid`, from tests/golden/bailing_hybrid.npz."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import numpy as np
import pytest

from model.config import ModelConfig
from model.decoder import init_carry
from tests.model_cases import compiled, worst_error
from tests.tolerances import MODEL_FLOAT32, MODEL_FLOAT32_GRADIENT

CFG = ModelConfig(
    vocab_size=61,
    d_model=32,
    pattern="kda, mla",
    num_repeats=1,
    ffn="swiglu, experts",
    d_ff=48,
    num_experts=6,
    experts_per_token=3,
    expert_d_ff=14,
    shared_experts=2,
    router_scale=1.7,
    kda_heads=4,
    key_dim=16,
    value_dim=16,
    gate_rank=0,
    decay_gate="bounded",
    mla_heads=4,
    mla_kv_rank=20,
    mla_nope_dim=12,
    mla_rope_dim=6,
    mla_value_dim=10,
    mla_rotation_base=50.0,
    mla_output_gate=True,
    attention_block=16,
    compute_dtype="float32",
    norm_eps=1e-6,
    carry=False,
)
LINEARS = (
    {
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "decay": "forget_gate.f_proj",
        "beta": "b_proj",
        "output_gate": "g_proj",
        "output": "o_proj",
    },
    {
        "q": "q_proj",
        "kv_down": "kv_a_proj_with_mqa",
        "kv_up": "kv_b_proj",
        "output_gate": "g_proj",
        "output": "o_proj",
    },
)
HALVES = [0, 2, 4, 1, 3, 5]  # they rotate channels 2i and 2i + 1, we i and i + 3


@functools.cache
def golden() -> dict[str, np.ndarray]:
    with np.load(pathlib.Path(__file__).parents[1] / "golden" / "bailing_hybrid.npz") as arrays:
        return dict(arrays)


def in_halves(matrix: np.ndarray, first: int) -> np.ndarray:
    """[D, H, channels] with the rotated channels, from `first` on, in our order."""
    own, rotated = matrix[..., :first], matrix[..., first:]
    return np.concatenate([own, rotated[..., HALVES]], axis=-1)


def mixer_of(get: Callable, layer: int) -> dict[str, np.ndarray]:
    params = {ours: get(f"self_attn.{theirs}.weight").T for ours, theirs in LINEARS[layer].items()}
    if layer == 0:
        taps = np.split(get("self_attn.conv1d.weight")[:, 0].T, 3, axis=1)
        params |= dict(zip(("q_conv", "k_conv", "v_conv"), taps))
        params["a_log"] = get("self_attn.forget_gate.A_log").reshape(4)
        params["dt_bias"] = get("self_attn.forget_gate.dt_bias").reshape(4, 16)
        return params | {"output_norm": get("self_attn.o_norm.weight")}
    params["q"] = in_halves(params["q"].reshape(32, 4, 18), 12).reshape(32, -1)
    params["kv_down"] = in_halves(params["kv_down"], 20)
    return params | {"kv_norm": get("self_attn.kv_a_layernorm.weight")}


def ffn_of(get: Callable, layer: int, gradients: bool) -> dict:
    def swiglu(prefix: str) -> dict[str, np.ndarray]:
        return {name: get(f"{prefix}.{name}_proj.weight").T for name in ("gate", "up", "down")}

    if layer == 0:
        return swiglu("mlp")
    both = get("mlp.experts.gate_up_proj").swapaxes(1, 2)
    bias = np.zeros(6, np.float32) if gradients else get("mlp.gate.e_score_correction_bias")
    return {
        "router": get("mlp.gate.weight").T,
        "router_bias": bias,
        "gate": both[..., :14],
        "up": both[..., 14:],
        "down": get("mlp.experts.down_proj").swapaxes(1, 2),
        "shared": swiglu("mlp.shared_experts"),
    }


def to_ours(kind: str) -> dict:
    """Their weights ("w:") or gradients ("g:") in our layout: matrices are (input, output)."""

    def block(number: int) -> dict:
        def get(name: str) -> np.ndarray:
            return golden()[f"{kind}model.layers.{number}.{name}"]

        layer = {
            "mixer": mixer_of(get, number),
            "ffn": ffn_of(get, number, kind == "g:"),
            "mixer_norm": get("input_layernorm.weight"),
            "ffn_norm": get("post_attention_layernorm.weight"),
        }
        return jax.tree.map(lambda x: x[None], layer)

    def padded(table: np.ndarray) -> np.ndarray:
        return np.pad(table, ((0, CFG.padded_vocab_size - len(table)), (0, 0)))

    return {
        "embedding": padded(golden()[kind + "model.embed_tokens.weight"]),
        "blocks": (block(0), block(1)),
        "final_norm": golden()[kind + "model.norm.weight"],
        "head": padded(golden()[kind + "lm_head.weight"]).T,
    }


def run(cfg: ModelConfig, **mesh_sizes: int) -> dict:
    tokens = golden()["tokens"]
    batch = {
        "tokens": tokens,
        "targets": golden()["targets"],
        "segment_ids": np.ones_like(tokens),
        "loss_weights": np.ones(tokens.shape, np.float32),
        "continues": np.zeros(len(tokens), bool),
        "positions": np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1)),
    }
    return compiled(cfg, **mesh_sizes)(to_ours("w:"), init_carry(cfg, 2), batch, z_weight=0.0)


@pytest.mark.parametrize(
    "mesh_sizes",
    [
        {},
        pytest.param({"expert": 2, "context": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"context": 4, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_hybrid_has_their_logits_loss_and_gradients(mesh_sizes):
    ours = run(CFG, **mesh_sizes)
    assert worst_error(ours["logits"], golden()["logits"])[0] < MODEL_FLOAT32
    assert worst_error(ours["loss"], golden()["loss"])[0] < MODEL_FLOAT32
    error, name = worst_error(ours["d_params"], to_ours("g:"))
    assert error < MODEL_FLOAT32_GRADIENT, name


@pytest.mark.slow
def test_the_comparison_sees_another_rotation():
    ours = run(dataclasses.replace(CFG, mla_rotation_base=60.0))
    assert worst_error(ours["logits"], golden()["logits"])[0] > 1e-3
