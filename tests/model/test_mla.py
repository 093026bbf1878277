"""Latent attention against transformers' `kimi_linear` and against loops over tokens in float64."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.checks import check_mesh
from model.config import ModelConfig
from model.decoder import forward, init_carry, plan_rows
from model.flops import key_flops_per_token, train_flops_per_token
from model.mixers import mla
from model.mixers.registry import reads_positions
from model.params import spread_params
from options import OptionError
from tests.compiling import fast_jit
from tests.model_cases import compiled, make_mesh, make_params, row, worst_error
from tests.tolerances import MODEL_FLOAT32, MODEL_FLOAT32_GRADIENT

HYBRID = ModelConfig(
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
    kda_heads=2,
    key_dim=16,
    value_dim=16,
    gate_rank=16,
    mla_heads=4,
    mla_kv_rank=20,
    mla_nope_dim=12,
    mla_rope_dim=6,
    mla_value_dim=10,
    attention_block=16,
    compute_dtype="float32",
    carry=False,
)
ALONE = dataclasses.replace(HYBRID, pattern="mla", ffn="swiglu")
ROTATED = dataclasses.replace(ALONE, mla_rotation_base=50.0, mla_output_gate=True)
LINEARS = {
    "kda": {
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "decay_a": "forget_gate.f_a_proj",
        "decay_b": "forget_gate.f_b_proj",
        "beta": "b_proj",
        "output_gate_a": "g_a_proj",
        "output_gate_b": "g_b_proj",
        "output": "o_proj",
    },
    "mla": {
        "q": "q_proj",
        "kv_down": "kv_a_proj_with_mqa",
        "kv_up": "kv_b_proj",
        "output": "o_proj",
    },
}


@functools.cache
def golden() -> dict[str, np.ndarray]:
    with np.load(pathlib.Path(__file__).parents[1] / "golden" / "kimi_hybrid.npz") as arrays:
        return dict(arrays)


def to_ours(kind: str) -> dict:
    """Their weights ("w:") or gradients ("g:") in our layout: matrices are (input, output)."""

    def swiglu(get: Callable, prefix: str) -> dict:
        return {name: get(f"{prefix}.{name}_proj.weight").T for name in ("gate", "up", "down")}

    def experts(get: Callable) -> dict:
        both = get("mlp.experts.gate_up_proj").swapaxes(1, 2)
        bias = np.zeros(HYBRID.num_experts, np.float32)  # the gradient
        return {
            "router": get("mlp.gate.weight").T,
            "router_bias": bias if kind == "g:" else get("mlp.gate.e_score_correction_bias"),
            "gate": both[..., : HYBRID.expert_d_ff],
            "up": both[..., HYBRID.expert_d_ff :],
            "down": get("mlp.experts.down_proj").swapaxes(1, 2),
            "shared": swiglu(get, "mlp.shared_experts"),
        }

    def block(number: int, mixer: str) -> dict:
        def get(name: str) -> np.ndarray:
            return golden()[f"{kind}model.layers.{number}.{name}"]

        linears = LINEARS[mixer].items()
        params = {ours: get(f"self_attn.{theirs}.weight").T for ours, theirs in linears}
        if mixer == "kda":
            taps = np.split(get("self_attn.conv1d.weight")[:, 0].T, 3, axis=1)
            params |= dict(zip(("q_conv", "k_conv", "v_conv"), taps))
            params["a_log"] = get("self_attn.forget_gate.A_log").reshape(HYBRID.kda_heads)
            params["dt_bias"] = get("self_attn.forget_gate.dt_bias").reshape(HYBRID.kda_heads, -1)
            params["output_norm"] = get("self_attn.o_norm.weight")
        else:
            params["kv_norm"] = get("self_attn.kv_a_layernorm.weight")
        layer = {
            "mixer": params,
            "ffn": experts(get) if HYBRID.ffns[number] == "experts" else swiglu(get, "mlp"),
            "mixer_norm": get("input_layernorm.weight"),
            "ffn_norm": get("post_attention_layernorm.weight"),
        }
        return jax.tree.map(lambda x: x[None], layer)

    def padded(table: np.ndarray) -> np.ndarray:
        return np.pad(table, ((0, HYBRID.padded_vocab_size - len(table)), (0, 0)))

    return {
        "embedding": padded(golden()[kind + "model.embed_tokens.weight"]),
        "blocks": tuple(block(number, mixer) for number, mixer in enumerate(HYBRID.mixers)),
        "final_norm": golden()[kind + "model.norm.weight"],
        "head": padded(golden()[kind + "lm_head.weight"]).T,
    }


@pytest.mark.parametrize(
    "mesh_sizes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"expert": 2, "context": 2, "tensor": 2},
        pytest.param({"context": 4, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"expert": 2, "context": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_hybrid_has_their_logits_loss_and_gradients(mesh_sizes):
    tokens = golden()["tokens"]
    batch = {
        "tokens": tokens,
        "targets": golden()["targets"],
        "segment_ids": np.ones_like(tokens),
        "loss_weights": np.ones(tokens.shape, np.float32),
        "continues": np.zeros(len(tokens), bool),
    }
    run = compiled(HYBRID, **mesh_sizes)
    ours = run(to_ours("w:"), init_carry(HYBRID, 2), batch, z_weight=0.0)
    assert worst_error(ours["logits"], golden()["logits"])[0] < MODEL_FLOAT32
    assert worst_error(ours["loss"], golden()["loss"])[0] < MODEL_FLOAT32
    error, name = worst_error(ours["d_params"], to_ours("g:"))
    assert error < MODEL_FLOAT32_GRADIENT, name


def by_loops(params: dict, x: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
    """The mixer in float64, a token and a head at a time; zero at padding."""
    cfg = ALONE
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    y = np.zeros(x.shape)
    for b, t in np.argwhere(segment_ids != 0):
        document = segment_ids[b, t]
        seen = [s for s in range(t + 1) if segment_ids[b, s] == document]
        down = x[b, seen].astype(np.float64) @ p["kv_down"]
        latent, shared = down[:, : cfg.mla_kv_rank], down[:, cfg.mla_kv_rank :]
        latent = latent / np.sqrt((latent**2).mean(1, keepdims=True) + 1e-6) * p["kv_norm"]
        out = []
        for h in range(cfg.mla_heads):
            query = (x[b, t].astype(np.float64) @ p["q"])[h * 18 : (h + 1) * 18]
            own = latent @ p["kv_up"][:, h * 22 : h * 22 + 12]
            score = (own @ query[:12] + shared @ query[12:]) / np.sqrt(18)
            weight = np.exp(score - score.max())
            out.append(weight @ (latent @ p["kv_up"][:, h * 22 + 12 : (h + 1) * 22]) / weight.sum())
        y[b, t] = np.concatenate(out) @ p["output"]
    return y


def plainly(params: dict, x: jax.Array, segment_ids: np.ndarray, positions: np.ndarray):
    """The rotated and gated mixer in jax.numpy: all scores at once, rotation by complex numbers."""
    cfg = ROTATED

    def turn(channels):
        """[B, T, H, 6]"""
        rates = cfg.mla_rotation_base ** (-np.arange(3) / 3)
        turns = np.exp(1j * positions[:, :, None, None] * rates).astype(np.complex64)
        turned = (channels[..., :3] + 1j * channels[..., 3:]) * turns
        return jnp.concatenate([turned.real, turned.imag], axis=-1)

    q = (x @ params["q"]).reshape(*x.shape[:2], 4, 18)
    down = x @ params["kv_down"]
    latent, shared = down[..., :20], turn(down[:, :, None, 20:])
    latent /= jnp.sqrt(jnp.mean(latent**2, axis=-1, keepdims=True) + 1e-6)
    up = (latent * params["kv_norm"] @ params["kv_up"]).reshape(*x.shape[:2], 4, 22)
    scores = jnp.einsum("bthc,bshc->bhts", q[..., :12], up[..., :12])
    scores += jnp.einsum("bthc,bsc->bhts", turn(q[..., 12:]), shared[:, :, 0])
    order = np.arange(x.shape[1])
    seen = segment_ids[:, :, None] == segment_ids[:, None]
    seen &= order[:, None] >= order
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores / np.sqrt(18), -1e30), axis=-1)
    read = jnp.einsum("bhts,bshc->bthc", weights, up[..., 12:]).reshape(*x.shape[:2], 40)
    gate = 1 / (1 + jnp.exp(-x @ params["output_gate"]))  # [B, T, 4]
    return (read * jnp.repeat(gate, 10, axis=-1)) @ params["output"]


def mix(cfg: ModelConfig, params: dict, x, segment_ids, continues, carry, **mesh_sizes):
    """(y, carry) of one layer on a mesh."""
    run = mixer_of(cfg, segment_ids, continues, **mesh_sizes)
    return jax.tree.map(np.asarray, fast_jit(run)(params, jnp.asarray(x, jnp.float32), carry))


def mixer_of(cfg: ModelConfig, segment_ids, continues, positions=None, **mesh_sizes) -> Callable:
    """(params, x, carry) -> (y, carry) of one layer on a mesh."""
    mesh = make_mesh(**mesh_sizes)
    positions = None if positions is None else jnp.asarray(positions, jnp.int32)

    def run(params, x, carry):
        plan = plan_rows(jnp.asarray(segment_ids), jnp.asarray(continues), mesh, positions)
        specs = mla.param_specs(cfg)
        layer = jax.tree.map(lambda x: x[None], params)
        layer = jax.tree.map(lambda x: x[0], spread_params(layer, specs, mesh))
        y, ends, *_ = mla.forward(layer, cfg, x, plan, carry, None, mesh)
        stacked = jax.tree.map(lambda x: x[None], (carry, ends))
        return y, jax.tree.map(lambda x: x[0], mla.new_carry(cfg, plan, *stacked))

    return run


def inputs(rows: int, length: int, cfg: ModelConfig = ALONE) -> tuple[dict, np.ndarray]:
    params = jax.tree.map(lambda x: x[0], make_params(cfg)["blocks"][0]["mixer"])
    return params, np.random.default_rng(3).normal(size=(rows, length, 32)).astype(np.float32)


@pytest.mark.parametrize("mesh_sizes", [{}, {"context": 4, "tensor": 2}])
def test_packed_documents_and_padding_are_those_of_loops_over_tokens(mesh_sizes):
    ids = np.stack([row((1, 5), (2, 17), (0, 3), (3, 15)), row((0, 4), (6, 36))])
    params, x = inputs(*ids.shape)
    y, _ = mix(ALONE, params, x, ids, [False] * 2, {}, **mesh_sizes)
    assert worst_error(y[ids != 0], by_loops(params, x, ids)[ids != 0])[0] < MODEL_FLOAT32


def test_rows_with_memory_are_one_long_row():
    """Two rows of 16 tokens, of which the second continues, and a memory of 16."""
    cfg = dataclasses.replace(ALONE, carry=True, attention_memory=16)
    ids = np.stack([row((1, 32)), row((1, 10), (2, 22))])
    params, x = inputs(*ids.shape)
    carry, parts = mla.init_carry(cfg, 2), []
    for part, continues in ((slice(0, 16), False), (slice(16, 32), True)):
        y, carry = mix(cfg, params, x[:, part], ids[:, part], [continues] * 2, carry)
        parts.append(y)
    assert carry["k"].shape == (2, 4, 16, 18)
    expected = by_loops(params, x, ids)
    assert worst_error(np.concatenate(parts, 1), expected)[0] < MODEL_FLOAT32
    alone = by_loops(params, x[:, 16:], ids[:, 16:])
    assert worst_error(alone, expected[:, 16:])[0] > 0.1, "memory would not matter here"


@pytest.mark.parametrize(
    "mesh_sizes",
    [
        {},
        pytest.param({"context": 2}, marks=pytest.mark.slow),
        pytest.param({"context": 4, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rotated_and_gated_has_the_values_and_gradients_of_plain_numpy(mesh_sizes):
    """The second row begins in the middle of its document."""
    ids = np.stack([row((1, 5), (2, 17), (0, 3), (3, 15)), row((4, 12), (6, 28))])
    positions = np.stack([np.r_[:5, :17, :3, :15], np.r_[30:42, :28]])
    params, x = inputs(*ids.shape, ROTATED)
    d_out = np.where(ids == 0, 0, np.random.default_rng(4).normal(size=ids.shape))[..., None]
    run = mixer_of(ROTATED, ids, [False] * 2, positions, **mesh_sizes)

    def values_and_gradients(run):
        def loss(params, x):
            y = run(params, x)
            return jnp.sum(y * d_out.astype(np.float32)), jnp.where(ids[..., None] == 0, 0, y)

        grads, y = fast_jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, jnp.asarray(x))
        return y, grads

    y, grads = values_and_gradients(lambda params, x: run(params, x, {})[0])
    expected = values_and_gradients(lambda params, x: plainly(params, x, ids, positions))
    assert worst_error(y, expected[0])[0] < MODEL_FLOAT32
    error, name = worst_error(grads, expected[1])
    assert error < MODEL_FLOAT32_GRADIENT, name


@pytest.mark.parametrize("context", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_carried_keys_keep_their_rotation(context):
    cfg = dataclasses.replace(ROTATED, carry=True, attention_memory=16)
    ids, positions = np.ones((1, 32), int), np.arange(100, 132)[None]
    params, x = inputs(1, 32, ROTATED)
    expected = plainly(params, x, ids, positions)

    def second_row(positions: np.ndarray) -> jax.Array:
        carry = mla.init_carry(cfg, 1)
        for part, continues in ((slice(0, 16), False), (slice(16, 32), True)):
            at = ids[:, part], [continues], positions[:, part]
            y, carry = fast_jit(mixer_of(cfg, *at, context=context))(params, x[:, part], carry)
        return y

    assert worst_error(second_row(positions), expected[:, 16:])[0] < MODEL_FLOAT32
    again = np.tile(np.arange(16), 2)[None]
    assert worst_error(second_row(again), expected[:, 16:])[0] > 0.01, "blind to positions"


def test_positions_are_asked_for_and_required():
    assert reads_positions(ROTATED) and not reads_positions(HYBRID)
    tokens = jnp.ones((1, 8), jnp.int32)
    with pytest.raises(ValueError, match="reads positions"):
        flags = jnp.zeros(1, bool)
        forward({}, ROTATED, tokens, tokens, flags, init_carry(ROTATED, 1), make_mesh())


def test_flops_by_hand():
    cfg = ModelConfig(vocab_size=258, pattern="mla", num_repeats=1)
    matrices = 256 * (2 * 192) + 256 * (512 + 64) + 512 * 2 * (128 + 128) + 2 * 128 * 256
    ffn, head = 3 * 256 * 768, 256 * 258
    assert train_flops_per_token(cfg) == 3 * 2 * (matrices + ffn + head)
    assert key_flops_per_token(cfg, 100.0) == 3 * 2 * 2 * (192 + 128) * 100.0


def test_what_cannot_work_is_refused():
    with pytest.raises(OptionError, match=r"config.model.mla_value_dim=19: needs at most .*\(18\)"):
        dataclasses.replace(ALONE, mla_value_dim=19)
    with pytest.raises(OptionError, match=r"config\.model\.mla_rope_dim=5: needs an even number"):
        dataclasses.replace(ROTATED, mla_rope_dim=5)
    with pytest.raises(OptionError, match=r"config\.model\.mla_rotation_base=0\.5: needs 0"):
        dataclasses.replace(ROTATED, mla_rotation_base=0.5)
    sizes = {"data": 1, "fsdp": 1, "context": 1, "tensor": 3}
    with pytest.raises(OptionError, match=r"config.mesh.tensor=3: .*mla_heads \(4\)"):
        check_mesh(ALONE, sizes)
