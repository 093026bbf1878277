"""Options of the KDA mixer against the recurrence in float64, with every head spelled out.

Value heads that share q and k are heads with copies of them; a gate of full rank is one product;
beta is twice the sigmoid; the bounded decay is lower_bound sigmoid(exp(a_log) (x + dt_bias)).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.kda.reference import recurrence
from model.config import ModelConfig
from model.decoder import plan_rows
from model.mixers import kda
from model.params import spread_params
from options import OptionError
from tests.compiling import fast_jit
from tests.model_cases import KDA, make_mesh, make_params, worst_error
from tests.tolerances import MODEL_FLOAT32, MODEL_FLOAT32_GRADIENT

T = 72  # more than a chunk, and no multiple of one
PLAIN = dataclasses.replace(KDA, carry=False)
GROUPED = dataclasses.replace(PLAIN, kda_value_heads=6)
FULL_RANK = dataclasses.replace(PLAIN, gate_rank=0)
REVERSING = dataclasses.replace(PLAIN, negative_eigenvalues=True)
ALL = dataclasses.replace(
    PLAIN,
    kda_value_heads=4,
    gate_rank=0,
    negative_eigenvalues=True,
    decay_gate="bounded",
    gate_lower_bound=-2.0,
)


def inputs(cfg: ModelConfig) -> tuple[dict, jax.Array, jax.Array]:
    """One layer's parameters, x and the cotangent of y, both [B, T, D]."""
    params = jax.tree.map(lambda x: x[0], make_params(cfg)["blocks"][0]["mixer"])
    x, d_y = np.random.default_rng(5).normal(size=(2, 2, T, cfg.d_model)).astype(np.float32)
    return params, x, d_y


def plain(cfg: ModelConfig, p: dict, x: jax.Array) -> jax.Array:
    """The layer of one document a row, token by token and head by head, in x's dtype."""
    heads, values = cfg.kda_heads, cfg.kda_value_heads or cfg.kda_heads

    def stream(name: str) -> jax.Array:
        taps, y = p[f"{name}_conv"], x @ p[name]
        past = jnp.pad(y, ((0, 0), (len(taps) - 1, 0), (0, 0)))
        return jax.nn.silu(sum(taps[j] * past[:, j : j + T] for j in range(len(taps))))

    def split(y: jax.Array, count: int) -> jax.Array:  # [B, T, channels] -> [B, H, T, d]
        return jnp.moveaxis(y.reshape(*y.shape[:2], count, -1), 2, 1)

    def gate(name: str) -> jax.Array:
        return x @ p[name] if cfg.gate_rank == 0 else x @ p[f"{name}_a"] @ p[f"{name}_b"]

    copies = [h // (values // heads) for h in range(values)]  # the head of q and k of each
    beta = jax.nn.sigmoid(x @ p["beta"]) * (2 if cfg.negative_eigenvalues else 1)
    out, _, _ = recurrence(
        split(stream("q"), heads)[:, copies],
        split(stream("k"), heads)[:, copies],
        split(stream("v"), values),
        split(gate("decay"), values),
        jnp.moveaxis(beta, 2, 1),
        jnp.zeros(x.shape[:2], int),
        a_log=p["a_log"],
        dt_bias=p["dt_bias"],
        lower_bound=cfg.gate_lower_bound if cfg.decay_gate == "bounded" else None,
        l2norm=True,
        scale=cfg.key_dim**-0.5,
        dtype=x.dtype,
    )
    out = jnp.moveaxis(out, 1, 2)
    mean = jnp.mean(out**2, -1, keepdims=True)
    out = out / jnp.sqrt(mean + cfg.norm_eps) * p["output_norm"]
    out = out * jax.nn.sigmoid(gate("output_gate").reshape(out.shape))
    return out.reshape(*x.shape[:2], -1) @ p["output"]


def expected(cfg: ModelConfig):
    """(y, gradients of the parameters and of x) in float64."""
    with jax.enable_x64(True):
        params, x, d_y = jax.tree.map(lambda a: jnp.asarray(a, "float64"), inputs(cfg))
        y, pull = jax.vjp(lambda p, x: plain(cfg, p, x), params, x)
        return jax.tree.map(np.asarray, (y, pull(d_y)))


def found(cfg: ModelConfig, **mesh_sizes: int):
    """The same by the mixer on a mesh."""
    mesh = make_mesh(**mesh_sizes)
    params, x, d_y = inputs(cfg)

    def layer(params, x):
        plan = plan_rows(jnp.ones(x.shape[:2], jnp.int32), jnp.zeros(len(x), bool), mesh)
        stacked = jax.tree.map(lambda a: a[None], params)
        spread = jax.tree.map(lambda a: a[0], spread_params(stacked, kda.param_specs(cfg), mesh))
        return kda.forward(spread, cfg, x, plan, {}, None, mesh)[0]

    @fast_jit
    def run(params, x, d_y):
        y, pull = jax.vjp(layer, params, x)
        return y, pull(d_y)

    return jax.tree.map(np.asarray, run(params, x, d_y))


@pytest.mark.parametrize(
    ("cfg", "mesh_sizes"),
    [
        *(pytest.param(x, {}, marks=pytest.mark.slow) for x in (GROUPED, FULL_RANK, REVERSING)),
        (ALL, {"context": 2, "tensor": 2}),
    ],
    ids=["grouped", "full rank", "reversing", "all"],
)
def test_values_and_gradients_are_the_recurrences(cfg, mesh_sizes):
    (y, gradients), (wanted, wanted_gradients) = found(cfg, **mesh_sizes), expected(cfg)
    assert worst_error(y, wanted)[0] < MODEL_FLOAT32
    error, name = worst_error(gradients, wanted_gradients)
    assert error < MODEL_FLOAT32_GRADIENT, name


@pytest.mark.parametrize("cfg", [REVERSING, ALL], ids=["reversing", "bounded"])
def test_the_comparison_sees_an_option_that_is_not_read(cfg):
    other = dataclasses.replace(cfg, negative_eigenvalues=not cfg.negative_eigenvalues)
    assert worst_error(expected(cfg)[0], expected(other)[0])[0] > 1e-2


def test_value_heads_are_a_multiple():
    with pytest.raises(OptionError, match=r"kda_value_heads=3: needs 0 or a multiple .* \(2\)"):
        dataclasses.replace(KDA, kda_value_heads=3)
