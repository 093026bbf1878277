"""A mixer is its module and one registry line: a toy one, registered here, trains and reports.

It multiplies each channel by a gain, counts the tokens of its streams in its carry, and reports
two scalars: one of its parameters, one of the batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from data.batch import Batch
from model.axes import ROWS, TENSOR, MeshNeed, vector
from model.checks import check_mesh
from model.flops import key_flops_per_token, train_flops_per_token
from model.mixers.registry import MIXERS, mixers_of
from options import OptionError
from tests.model_cases import KDA, VOCABULARY, make_mesh, make_params, row
from tests.tolerances import MODEL_FLOAT32
from training.options import OptimizerOptions, TrainOptions
from training.state import state_shapes
from training.step import make_train_step, make_votes
from training.tunables import tunables_of

TOY = dataclasses.replace(KDA, pattern="toy, toy", num_repeats=2)
SIZES = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1}
RATE = 0.05
TUNABLES = tunables_of(OptimizerOptions(schedule_steps=1000), z_loss=0.0)
LENGTH = 16


class Toy:
    """Implements the whole protocol without reusing any existing mixer."""

    def param_specs(self, cfg):
        return {"gain": vector((cfg.d_model,), ("whole",), lambda key, shape: jnp.ones(shape))}

    def init_carry(self, cfg, rows):
        return {"seen": jnp.zeros(rows, jnp.float32)}

    def carry_specs(self, cfg):
        return {"seen": PartitionSpec(ROWS)}

    def forward(self, params, cfg, x, plan, carry, entry, mesh):
        (gain,) = params["gain"]  # one rank's copy
        real = plan.segments.valid.astype(jnp.float32)
        metrics = {"gain": jnp.mean(gain), "real": jnp.mean(real)}
        return x * gain.astype(x.dtype), {"seen": real.sum(1)[None]}, {}, metrics

    def new_carry(self, cfg, plan, carry, ends):
        return {"seen": carry["seen"] + ends["seen"]}

    def reads_positions(self, cfg):
        return False

    def flops_per_token(self, cfg):
        return 7.0

    def flops_per_key(self, cfg):
        return 5.0

    def mesh_needs(self, cfg):
        return [MeshNeed(TENSOR, "key_dim", cfg.key_dim)]


@pytest.fixture(autouse=True, scope="module")
def compile_fast():
    """Compilation dominates here: these tests compare values, not speed."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(MIXERS, "toy", Toy())


def batch_of(segment_ids: np.ndarray) -> Batch:
    """Random tokens of [W, B, T] segment ids; no row continues."""
    random = np.random.default_rng(0)
    weights = (segment_ids != 0).astype(np.float32)
    number = random.integers(0, VOCABULARY, (2, *segment_ids.shape)).astype(np.int32)
    return Batch(
        tokens=number[0],
        targets=number[1],
        segment_ids=segment_ids.astype(np.int32),
        positions=np.zeros(segment_ids.shape, np.int32),
        loss_weights=weights,
        target_bytes=weights.astype(np.int32),
        continues=np.zeros(segment_ids.shape[:2], bool),
    )


def train(cfg, batch: Batch, steps: int, options: TrainOptions = TrainOptions()):  # noqa: B008
    """The parameters before each step, the metrics of each, and the state at the end."""
    mesh, optimizer = make_mesh(), optax.sgd(RATE)
    shapes = state_shapes(cfg, mesh, optimizer, batch.tokens.shape[1], 2)
    step = make_train_step(options, cfg, mesh, lambda _: optimizer, shapes)
    state = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
    state = state._replace(params=make_params(cfg))
    state = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), state, shapes)
    before, metrics = [], []
    for _ in range(steps):
        before.append(jax.device_get(state.params))
        state, reported = step(
            state, jax.tree.map(jnp.asarray, batch), make_votes(mesh)[0], TUNABLES
        )
        metrics.append(jax.device_get(reported))
    return before, metrics, jax.device_get(state)


# [W, B, T]: of the first window all tokens are real, of the second 8 + 0 of 32.
FULL = np.stack([row((1, LENGTH)), row((1, 6), (2, 10))])
SPARSE = np.stack([row((1, 8), (0, 8)), row((0, LENGTH))])


@pytest.mark.parametrize("scan_layers", [True, False])
def test_a_toy_mixer_trains_and_reports_under_the_number_of_its_layer(scan_layers):
    cfg = dataclasses.replace(TOY, scan_layers=scan_layers)
    before, metrics, state = train(cfg, batch_of(FULL[None]), 5)
    for params, reported in zip(before, metrics):
        for position, block in enumerate(params["blocks"]):
            for repeat, gain in enumerate(block["mixer"]["gain"].mean(axis=1)):
                found = reported.pop(f"layer_{2 * repeat + position:02d}/gain")
                np.testing.assert_allclose(found, gain, rtol=MODEL_FLOAT32, atol=1e-7)
        left = {name for name in reported if "/" in name}
        assert left == {f"layer_{n:02d}/real" for n in range(4)}
    losses = [float(reported["loss"]) for reported in metrics]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.01, losses
    for old, new, carry in zip(before[0]["blocks"], state.params["blocks"], state.carry["blocks"]):
        moved = np.abs(new["mixer"]["gain"] - old["mixer"]["gain"])
        assert moved.max(axis=1).min() > 1e-5, "a layer's gain got no gradient"
        np.testing.assert_array_equal(carry["seen"], np.full((2, 2), 5.0 * LENGTH))


@pytest.mark.parametrize("parts", [1, 2])
def test_metrics_are_means_over_windows_and_parts(parts):
    batch = batch_of(np.stack([FULL, SPARSE]))
    _, (metrics,), state = train(TOY, batch, 1, TrainOptions(grad_accum_steps=parts))
    assert {float(metrics[f"layer_{n:02d}/real"]) for n in range(4)} == {(32 + 8) / 64}
    for carry in state.carry["blocks"]:
        np.testing.assert_array_equal(carry["seen"], [[24.0, 16.0]] * 2)


def test_layers_without_metrics_add_none():
    mesh, batch = make_mesh(), batch_of(FULL[None])
    shapes = state_shapes(KDA, mesh, optax.sgd(RATE), 2, 2)
    step = make_train_step(TrainOptions(), KDA, mesh, lambda _: optax.sgd(RATE), shapes)
    _, metrics = jax.eval_shape(step, shapes, batch, make_votes(mesh)[0], TUNABLES)
    assert "loss" in metrics and not [name for name in metrics if "/" in name]


def test_flops_and_mesh_are_what_the_mixer_declares():
    alone = dataclasses.replace(TOY, pattern="toy")
    twice = dataclasses.replace(TOY, pattern="toy, toy")
    swiglu = 2 * 3 * KDA.d_model * KDA.d_ff
    added = train_flops_per_token(twice) - train_flops_per_token(alone)
    assert added == 3 * 2 * (swiglu + 7.0)
    assert key_flops_per_token(twice, 10.0) == 3 * 2 * 2 * 5.0 * 10.0
    message = r"config.mesh.tensor=16: needs a divisor of config.model.key_dim \(8\)"
    wide = dataclasses.replace(alone, d_ff=64)
    with pytest.raises(OptionError, match=message):
        check_mesh(wide, SIZES | {"tensor": 16})
    check_mesh(wide, SIZES | {"tensor": 8})


def test_a_name_that_nobody_registered_is_refused():
    with pytest.raises(OptionError, match=r"pattern='kda, mamba': needs names of kda"):
        mixers_of(dataclasses.replace(KDA, pattern="kda, mamba"))
