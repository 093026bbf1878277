"""Mixture of experts against a loop over tokens in float64, and across meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.checks import check_mesh
from model.decoder import init_carry, plan_rows
from model.ffn import experts
from model.flops import train_flops_per_token
from model.params import spread_params, use_matrices
from options import OptionError
from tests.compiling import fast_jit
from tests.model_cases import KDA, compiled, make_batch, make_mesh, make_params, row, worst_error
from tests.tolerances import MODEL_FLOAT32, MODEL_FLOAT32_GRADIENT

CFG = dataclasses.replace(
    KDA,
    pattern="attention",
    num_repeats=1,
    ffn="experts",
    num_experts=8,
    experts_per_token=3,
    expert_d_ff=12,
    shared_experts=2,
    router_scale=1.7,
)
IDS = np.stack([
    row((1, 5), (2, 9), (0, 2)), row((0, 3), (3, 13)), row((4, 16)), row((0, 16)),
])  # fmt: skip
MESHES = [{}, {"expert": 2, "context": 2, "tensor": 2}, {"expert": 4, "tensor": 2}]


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu_by_hand(x, p, d_y):
    """(y, d_x, gradients) of one token x [D]."""
    gate, up = x @ p["gate"], x @ p["up"]
    hidden = silu(gate) * up
    d_hidden = p["down"] @ d_y
    s = 1 / (1 + np.exp(-gate))
    d_up, d_gate = d_hidden * silu(gate), d_hidden * up * s * (1 + gate * (1 - s))
    d_p = {"gate": np.outer(x, d_gate), "up": np.outer(x, d_up), "down": np.outer(hidden, d_y)}
    return hidden @ p["down"], p["gate"] @ d_gate + p["up"] @ d_up, d_p


def by_loop(params, x, ids, d_y):
    """{"y", "d_x", "d_params", "counts"} in float64, a token and an expert at a time."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    grads = jax.tree.map(np.zeros_like, p)
    y, d_x, counts = np.zeros(x.shape), np.zeros(x.shape), np.zeros(CFG.num_experts)
    for b, t in np.ndindex(ids.shape):
        token, cotangent = x[b, t].astype(np.float64), d_y[b, t].astype(np.float64)
        shared, d_token, d_shared = swiglu_by_hand(token, p["shared"], cotangent)
        y[b, t] += shared
        d_x[b, t] += d_token
        grads["shared"] = {name: grads["shared"][name] + d_shared[name] for name in d_shared}
        if ids[b, t] == 0:
            continue
        score = 1 / (1 + np.exp(-(token @ p["router"])))
        chosen = np.argsort(-(score + p["router_bias"]))[: CFG.experts_per_token]
        weight = CFG.router_scale * score[chosen] / score[chosen].sum()
        d_weight = np.zeros(len(chosen))
        for place, e in enumerate(chosen):
            expert = {name: p[name][e] for name in ("gate", "up", "down")}
            out, d_token, d_expert = swiglu_by_hand(token, expert, weight[place] * cotangent)
            y[b, t] += weight[place] * out
            d_x[b, t] += d_token
            d_weight[place] = cotangent @ out
            counts[e] += 1
            for name, gradient in d_expert.items():
                grads[name][e] += gradient
        total = score[chosen].sum()
        d_score = CFG.router_scale * (d_weight / total - (d_weight @ score[chosen]) / total**2)
        d_logit = np.zeros(CFG.num_experts)
        d_logit[chosen] = d_score * score[chosen] * (1 - score[chosen])
        grads["router"] += np.outer(token, d_logit)
        d_x[b, t] += p["router"] @ d_logit
    return {"y": y, "d_x": d_x, "d_params": grads, "counts": counts}


@functools.cache
def layer(**mesh_sizes: int):
    """jitted (params, x, d_y) -> the layer's values, gradients and metrics on a mesh."""
    mesh = make_mesh(**mesh_sizes)

    def run(params, x, d_y):
        plan = plan_rows(jnp.asarray(IDS), jnp.zeros(len(IDS), bool), mesh)
        specs = experts.param_specs(CFG)

        def apply(params, x):
            spread = spread_params(jax.tree.map(lambda a: a[None], params), specs, mesh)
            used = use_matrices(jax.tree.map(lambda a: a[0], spread), specs, CFG, mesh)
            return experts.forward(used, CFG, x, plan, mesh)

        y, pull, metrics = jax.vjp(apply, params, x, has_aux=True)
        d_params, d_x = pull(d_y)
        return {"y": y, "d_x": d_x, "d_params": d_params, "metrics": metrics}

    return fast_jit(run)


def inputs(bias: float):
    """Parameters whose biases reorder the experts; a large one sends every token to the first."""
    params = jax.tree.map(lambda x: x[0], make_params(CFG)["blocks"][0]["ffn"])
    random = np.random.default_rng(5)
    params["router_bias"] = jnp.asarray(0.2 * random.normal(size=8), jnp.float32)
    params["router_bias"] = params["router_bias"].at[:3].add(bias)
    x, d_y = random.normal(size=(2, *IDS.shape, CFG.d_model)).astype(np.float32)
    return params, x, d_y


@pytest.mark.parametrize("bias", [0.0, 10.0], ids=["spread", "all to three experts"])
@pytest.mark.parametrize("mesh_sizes", MESHES, ids=str)
def test_values_gradients_and_counts_are_those_of_a_loop_over_tokens(mesh_sizes, bias):
    params, x, d_y = inputs(bias)
    found = layer(**mesh_sizes)(params, jnp.asarray(x), jnp.asarray(d_y))
    expected = by_loop(params, x, IDS, d_y)
    assert worst_error(found["y"], expected["y"])[0] < MODEL_FLOAT32
    gradients = {name: found[name] for name in ("d_x", "d_params")}
    error, name = worst_error(gradients, {name: expected[name] for name in gradients})
    assert error < MODEL_FLOAT32_GRADIENT, name
    assert not found["d_params"]["router_bias"].any()
    counts = found["metrics"]["expert_tokens"].sum(axis=0)
    np.testing.assert_array_equal(counts, expected["counts"])
    assert counts.sum() == CFG.experts_per_token * np.count_nonzero(IDS)
    if bias:
        assert (counts[:3] == np.count_nonzero(IDS)).all()
    assert found["metrics"]["dropped_tokens"].sum() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh_sizes",
    [MESHES[1], {"fsdp": 2, "expert": 2}, {"data": 2, "context": 4}],
    ids=str,
)
def test_a_model_has_the_same_loss_and_gradients_on_every_mesh(mesh_sizes):
    cfg = dataclasses.replace(CFG, prefix="attention", ffn="swiglu, experts", num_repeats=2)
    params, batch = make_params(cfg), make_batch(IDS)
    alone, found = (
        compiled(cfg, **sizes)(params, init_carry(cfg, len(IDS)), batch)
        for sizes in ({}, mesh_sizes)
    )
    assert worst_error(found["loss"], alone["loss"])[0] < MODEL_FLOAT32
    error, name = worst_error(found["d_params"], alone["d_params"])
    assert error < MODEL_FLOAT32_GRADIENT, name


def test_a_step_moves_biases_towards_equal_counts():
    counts = jnp.asarray([[4.0, 0, 2, 2, 2, 2, 2, 2], [1, 1, 1, 1, 3, 3, 3, 3]])
    params = {"router_bias": jnp.full((2, 8), 0.5), "gate": jnp.zeros(3)}
    cfg = dataclasses.replace(CFG, router_bias_rate=0.25)
    changed, metrics = experts.after_step(params, cfg, {"expert_tokens": counts})
    moved = [[-1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, -1, -1, -1, -1]]
    np.testing.assert_array_equal(changed["router_bias"], 0.5 + 0.25 * np.asarray(moved))
    np.testing.assert_array_equal(metrics["expert_load"], [2.0, 1.5])
    assert changed["gate"] is params["gate"]


def test_flops_count_active_experts():
    dense = dataclasses.replace(CFG, ffn="swiglu", d_ff=12 * (3 + 2))
    router = 3 * 2 * CFG.d_model * CFG.num_experts
    assert train_flops_per_token(CFG) == train_flops_per_token(dense) + router


def test_what_cannot_work_is_refused():
    with pytest.raises(
        OptionError, match=r"experts_per_token=9: needs at most .*num_experts \(8\)"
    ):
        dataclasses.replace(CFG, experts_per_token=9)
    sizes = {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
    with pytest.raises(OptionError, match=r"config.mesh.expert=3: .*num_experts \(8\)"):
        check_mesh(CFG, sizes | {"expert": 3})
    with pytest.raises(OptionError, match=r"config.mesh.tensor=8: .*expert_d_ff \(12\)"):
        check_mesh(
            dataclasses.replace(CFG, attention_heads=8, attention_kv_heads=8), sizes | {"tensor": 8}
        )
    with pytest.raises(OptionError, match=r"config.model.ffn='swiglu,moe': needs one name"):
        check_mesh(dataclasses.replace(CFG, prefix="kda", ffn="swiglu,moe"), sizes)
