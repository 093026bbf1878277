"""The small layers against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from model.ffn.swiglu import swiglu
from model.layers import gated_rms_norm, matmul, rms_norm, vary
from tests.model_cases import make_mesh, worst_error
from tests.tolerances import MODEL_FLOAT32

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(2, 5, 24)).astype(np.float32)
GAIN = RANDOM.uniform(0.5, 2, 24).astype(np.float32)
EPS = 0.3  # large, so that where it is added shows


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def normalised(x, gain):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * gain


def test_rms_norm():
    assert worst_error(rms_norm(X, GAIN, EPS), normalised(X, GAIN))[0] < MODEL_FLOAT32


def test_gated_rms_norm():
    gate = RANDOM.normal(size=X.shape).astype(np.float32)
    expected = normalised(X, GAIN) * sigmoid(gate)
    assert worst_error(gated_rms_norm(X, gate, GAIN, EPS), expected)[0] < MODEL_FLOAT32


def test_norms_of_bf16_are_computed_in_float32():
    """Squares of bf16 summed in bf16 would be off by percents over 4096 channels."""
    x = jnp.asarray(RANDOM.normal(size=(1, 4096)) + 3, jnp.bfloat16)
    found = rms_norm(x, jnp.ones(4096), 1e-5)
    assert found.dtype == jnp.bfloat16
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    assert np.abs(np.asarray(found, np.float64) / expected - 1).max() <= 2**-8  # one rounding


def test_swiglu():
    shapes = {"gate": (24, 36), "up": (24, 36), "down": (36, 24)}
    params = {name: RANDOM.normal(size=s).astype(np.float32) for name, s in shapes.items()}
    gate, up = (X.astype(np.float64) @ params[name] for name in ("gate", "up"))
    expected = (gate * sigmoid(gate) * up) @ params["down"]
    assert worst_error(swiglu(X, params), expected)[0] < MODEL_FLOAT32


def test_matmul_of_bf16_can_keep_its_float32_sums():
    x = jnp.asarray(X, jnp.bfloat16)
    weight = jnp.asarray(RANDOM.normal(size=(24, 7)), jnp.bfloat16)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    kept = matmul(x, weight, out_dtype=jnp.float32)
    assert kept.dtype == jnp.float32 and worst_error(kept, expected)[0] < MODEL_FLOAT32
    assert matmul(x, weight).dtype == jnp.bfloat16


def test_gradient_of_matmul():
    weight = RANDOM.normal(size=(24, 7)).astype(np.float32)
    d_out = RANDOM.normal(size=(2, 5, 7)).astype(np.float32)
    for x, cotangent in ((X, d_out), (X[0], d_out[0])):
        d_x, d_weight = jax.vjp(matmul, x, weight)[1](cotangent)
        assert worst_error(d_x, cotangent.astype(np.float64) @ weight.T)[0] < MODEL_FLOAT32
        expected = x.reshape(-1, 24).T.astype(np.float64) @ cotangent.reshape(-1, 7)
        assert worst_error(d_weight, expected)[0] < MODEL_FLOAT32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_float32_ask_for_float32_on_every_device(dtype):
    jaxpr = str(jax.make_jaxpr(matmul)(X.astype(dtype), jnp.ones((24, 3), dtype)))
    assert ("HIGHEST" in jaxpr) == (dtype == "float32")


def test_vary_sums_a_shared_parameters_gradient_over_ranks():
    mesh = make_mesh(data=2, context=2)

    def local(weight, x):
        weight = vary(weight, ("data", "context"))
        assert vary(weight, ("data",)) is weight
        return jnp.sum(weight * x, keepdims=True)

    spec = P(("data", "context"))
    island = jax.shard_map(local, mesh=mesh, in_specs=(P(), spec), out_specs=spec)
    gradient = jax.jit(jax.grad(lambda w, x: island(w, x).sum()))(2.0, jnp.arange(8.0))
    assert gradient == 28.0
