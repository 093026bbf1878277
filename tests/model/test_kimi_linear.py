"""Each layer against transformers' `kimi_linear`, from tests/golden/kimi_linear.npz."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.config import ModelConfig
from model.decoder import init_carry, plan_rows
from model.mixers import kda
from model.params import spread_params
from tests.compiling import fast_jit
from tests.model_cases import compiled, make_mesh, worst_error
from tests.tolerances import MODEL_FLOAT32, MODEL_FLOAT32_GRADIENT

CONFIG = ModelConfig(
    vocab_size=61,
    d_model=32,
    pattern="kda",
    num_repeats=2,
    d_ff=48,
    kda_heads=2,
    key_dim=16,
    value_dim=16,
    gate_rank=16,
    compute_dtype="float32",
    norm_eps=1e-5,
    carry=False,
)
LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "decay_a": "self_attn.forget_gate.f_a_proj",
    "decay_b": "self_attn.forget_gate.f_b_proj",
    "beta": "self_attn.b_proj",
    "output_gate_a": "self_attn.g_a_proj",
    "output_gate_b": "self_attn.g_b_proj",
    "output": "self_attn.o_proj",
}


@pytest.fixture(scope="module")
def golden():
    with np.load(pathlib.Path(__file__).parents[1] / "golden" / "kimi_linear.npz") as arrays:
        return dict(arrays)


def to_ours(golden: dict, kind: str) -> dict:
    """Their weights ("w:") or gradients ("g:") in our layout: matrices are (input, output)."""

    def layer(number: int) -> dict:
        def get(name: str) -> np.ndarray:
            return golden[f"{kind}model.layers.{number}.{name}"]

        mixer = {ours: get(theirs + ".weight").T for ours, theirs in LINEARS.items()}
        taps = np.split(get("self_attn.conv1d.weight")[:, 0].T, 3, axis=1)
        mixer |= dict(zip(("q_conv", "k_conv", "v_conv"), taps))
        mixer["a_log"] = get("self_attn.forget_gate.A_log").reshape(CONFIG.kda_heads)
        mixer["dt_bias"] = get("self_attn.forget_gate.dt_bias").reshape(CONFIG.kda_heads, -1)
        mixer["output_norm"] = get("self_attn.o_norm.weight")
        ffn = {name: get(f"mlp.{name}_proj.weight").T for name in ("gate", "up", "down")}
        norms = {
            "mixer_norm": get("input_layernorm.weight"),
            "ffn_norm": get("post_attention_layernorm.weight"),
        }
        return {"mixer": mixer, "ffn": ffn, **norms}

    def padded(table: np.ndarray) -> np.ndarray:
        return np.pad(table, ((0, CONFIG.padded_vocab_size - len(table)), (0, 0)))

    return {
        "embedding": padded(golden[kind + "model.embed_tokens.weight"]),
        "blocks": (jax.tree.map(lambda *layers: np.stack(layers), layer(0), layer(1)),),
        "final_norm": golden[kind + "model.norm.weight"],
        "head": padded(golden[kind + "lm_head.weight"]).T,
    }


@pytest.mark.parametrize("context", [1, 2])
def test_whole_model_has_their_logits_loss_and_gradients(golden, context):
    tokens = golden["tokens"]
    batch = {
        "tokens": tokens,
        "targets": golden["targets"],
        "segment_ids": np.ones_like(tokens),
        "loss_weights": np.ones(tokens.shape, np.float32),
        "continues": np.zeros(len(tokens), bool),
    }
    ours = compiled(CONFIG, context=context)(
        to_ours(golden, "w:"), init_carry(CONFIG, 2), batch, z_weight=0.0
    )
    assert worst_error(ours["logits"][:, -20:], golden["logits"])[0] < MODEL_FLOAT32
    assert worst_error(ours["loss"], golden["loss"])[0] < MODEL_FLOAT32
    error, name = worst_error(ours["d_params"], to_ours(golden, "g:"))
    assert error < MODEL_FLOAT32_GRADIENT, name


def mixer_of(golden: dict, cfg: ModelConfig):
    """x [B, T, D] -> the output of the first layer's mixer."""
    mesh = make_mesh()
    stacked = jax.tree.map(lambda x: x[:1], to_ours(golden, "w:")["blocks"][0]["mixer"])
    plan = plan_rows(jnp.ones((2, 70), jnp.int32), jnp.zeros(2, bool), mesh)

    def run(x: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda x: x[0], spread_params(stacked, kda.param_specs(cfg), mesh))
        return kda.forward(params, cfg, x, plan, {}, None, mesh)[0]

    return run


def test_mixer_has_their_output_and_input_gradient(golden):
    @fast_jit
    def run(x):
        out, pull = jax.vjp(mixer_of(golden, CONFIG), x)
        return out, pull(jnp.asarray(golden["mixer_d_out"]))[0]

    out, d_in = run(golden["mixer_in"])
    assert worst_error(out, golden["mixer_out"])[0] < MODEL_FLOAT32
    assert worst_error(d_in, golden["mixer_d_in"])[0] < MODEL_FLOAT32_GRADIENT


def test_comparison_sees_a_wrong_gate(golden):
    """The bounded gate is another function; golden values blind to it would prove little."""
    other = dataclasses.replace(CONFIG, decay_gate="bounded")
    out = fast_jit(mixer_of(golden, other))(golden["mixer_in"])
    assert worst_error(out, golden["mixer_out"])[0] > 0.01
