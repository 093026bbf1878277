"""Small models, meshes and batches for the tests of model/, and functions that compare results."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model.axes import MESH_AXES
from model.config import ModelConfig
from model.decoder import carry_shardings, forward, init_carry
from model.loss import logits, loss_sums
from model.params import param_shardings, param_specs
from tests.compiling import fast_jit

VOCABULARY = 61

# Width 32, two heads of K 8 and V 16: every size differs from the others, so that no mix-up passes.
KDA = ModelConfig(
    vocab_size=VOCABULARY,
    d_model=32,
    pattern="kda",
    num_repeats=2,
    d_ff=48,
    kda_heads=2,
    key_dim=8,
    value_dim=16,
    gate_rank=4,
    attention_heads=4,
    attention_kv_heads=2,
    attention_head_dim=8,
    attention_block=16,
    compute_dtype="float32",
    loss_chunk=24,
)
MIXED = dataclasses.replace(KDA, pattern="kda, attention", learned_initial_state=True)


def make_mesh(
    data: int = 1, fsdp: int = 1, expert: int = 1, context: int = 1, tensor: int = 1
) -> jax.sharding.Mesh:
    """A mesh on the first CPU devices."""
    shape = (data, fsdp, expert, context, tensor)
    kinds = (jax.sharding.AxisType.Auto,) * len(shape)
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, MESH_AXES, axis_types=kinds, devices=devices)


def make_params(cfg: ModelConfig, seed: int = 0, slow: bool = False) -> dict[str, Any]:
    """Parameters away from their initial values: nothing is zero, and every layer matters.

    slow: decays of about 1e-3 per token, so that anything that should be forgotten would show.
    """
    random = np.random.default_rng(seed)

    def draw(path, spec):
        name = jax.tree_util.keystr(path)
        x = random.normal(size=spec.shape)
        if spec.cast:
            x = x / np.sqrt(spec.shape[-2])
        elif "norm" in name:
            x = 1 + 0.2 * x
        elif "dt_bias" in name:
            x = 0.1 * x - (7.0 if slow else 3.0)
        elif "state" in name or "conv" in name or "a_log" in name:
            x = 0.3 * x
        return jnp.asarray(x, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, param_specs(cfg))


def make_batch(segment_ids: np.ndarray, seed: int = 0) -> dict[str, jax.Array]:
    """Random tokens and targets; weight 1 at real tokens; no row continues."""
    random = np.random.default_rng(seed)
    shape = segment_ids.shape
    return {
        "tokens": jnp.asarray(random.integers(0, VOCABULARY, shape), jnp.int32),
        "targets": jnp.asarray(random.integers(0, VOCABULARY, shape), jnp.int32),
        "segment_ids": jnp.asarray(segment_ids, jnp.int32),
        "loss_weights": jnp.asarray(segment_ids != 0, jnp.float32),
        "continues": jnp.zeros(shape[0], bool),
    }


def row(*pieces: tuple[int, int]) -> np.ndarray:
    """One row of segment ids from (id, length) pieces."""
    return np.concatenate([np.full(length, number) for number, length in pieces])


def random_carry(cfg: ModelConfig, rows: int, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)

    def draw(x):
        return jnp.asarray(0.5 * random.normal(size=x.shape), x.dtype)

    return jax.tree.map(draw, init_carry(cfg, rows))


@functools.cache
def compiled(cfg: ModelConfig, **mesh_sizes: int):
    """jitted (params, carry, batch) -> ((loss, aux), gradients of params and carry) on a mesh.

    The loss is (nll + z_weight z) / weight + carry_weight * a sum over the new carry; the values
    returned are the loss, hidden, logits, sums, the new carry, d_params and d_carry.
    """
    mesh = make_mesh(**mesh_sizes)

    def loss(params, carry, batch, z_weight, carry_weight):
        arrays = batch["tokens"], batch["segment_ids"], batch["continues"], carry
        hidden, end, _ = forward(params, cfg, *arrays, mesh, batch.get("positions"))
        sums = loss_sums(params, cfg, hidden, batch["targets"], batch["loss_weights"], mesh)
        value = (sums.nll + z_weight * sums.z) / jnp.maximum(jnp.sum(batch["loss_weights"]), 1.0)
        value += carry_weight * sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(end))
        aux = {"hidden": hidden, "sums": sums, "carry": end}
        return value, aux | {"logits": logits(params, cfg, hidden, mesh)}

    step = fast_jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    def run(params, carry, batch, z_weight: float = 0.01, carry_weight: float = 0.0):
        params = jax.device_put(params, param_shardings(cfg, mesh))
        carry = jax.device_put(carry, carry_shardings(cfg, mesh))
        (value, aux), grads = step(params, carry, batch, z_weight, carry_weight)
        return jax.tree.map(
            np.asarray, {"loss": value, **aux, "d_params": grads[0], "d_carry": grads[1]}
        )

    return run


def worst_error(found: Any, expected: Any) -> tuple[float, str]:
    """The largest RMS(found - expected) / RMS(expected) over two trees' leaves, and its name."""
    errors = [(0.0, "nothing")]

    def compare(path, a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, jax.tree_util.keystr(path)
        if not np.array_equal(a, b):
            size = np.sqrt(np.mean(b**2))
            error = np.sqrt(np.mean((a - b) ** 2)) / max(size, 1e-30)
            errors.append((error if np.isfinite(error) else np.inf, jax.tree_util.keystr(path)))

    jax.tree_util.tree_map_with_path(compare, found, expected)
    return max(errors)
