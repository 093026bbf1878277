"""The compiled step: one global mean whatever the cut, gradients through windows, skipped steps.

The optimizer is plain gradient descent with rate 1, so a step's change of the parameters is the
gradient that the trainer computed.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from data.batch import Batch
from data.loader import make_loader
from data.options import DataConfig
from model.decoder import forward, init_carry
from tests.model_cases import KDA, VOCABULARY, make_mesh, make_params, row
from tests.tolerances import MODEL_FLOAT32, MODEL_FLOAT32_GRADIENT
from training.options import OptimizerOptions, TrainOptions
from training.report import eval_values
from training.state import empty_carry, flatten, state_shapes
from training.step import make_eval_step, make_train_step, make_votes
from training.tunables import tunables_of

SGD = optax.sgd(1.0)
RATE_OF_ONE = OptimizerOptions(
    learning_rate=1.0, min_lr_ratio=1.0, warmup_steps=0, schedule_steps=1
)
ONE = dataclasses.replace(KDA, num_repeats=1)
PLAIN = TrainOptions()
Z_LOSS = TrainOptions(z_loss=0.01)
SKIPPING = TrainOptions(skip_nonfinite=True, spike_deviations=3.0)
WINDOW = 4  # losses that the spike rule looks back on


@pytest.fixture(autouse=True, scope="module")
def compile_fast():
    """Compilation dominates here: these tests compare values, not speed."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def stepper(cfg, options: TrainOptions, rows: int, **mesh_sizes):
    mesh = make_mesh(**mesh_sizes)
    shapes = state_shapes(cfg, mesh, SGD, rows, WINDOW)
    step = make_train_step(options, cfg, mesh, lambda _: SGD, shapes)
    return mesh, shapes, step


def start(cfg, shapes, params=None, **fields):
    """A state with parameters off their initial values; the rest begins with zeros, or as given."""
    state = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
    state = state._replace(params=make_params(cfg) if params is None else params, **fields)
    return jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), state, shapes)


def batch_of(segment_ids: np.ndarray, seed: int = 0) -> Batch:
    """Random tokens of [W, B, T] segment ids; no row continues; three bytes a target."""
    random = np.random.default_rng(seed)
    shape = segment_ids.shape
    weights = (segment_ids != 0).astype(np.float32)
    return Batch(
        tokens=random.integers(0, VOCABULARY, shape).astype(np.int32),
        targets=random.integers(0, VOCABULARY, shape).astype(np.int32),
        segment_ids=segment_ids.astype(np.int32),
        positions=None,
        loss_weights=weights,
        target_bytes=3 * weights.astype(np.int32),
        continues=np.zeros(shape[:2], bool),
    )


def run(cfg, batch: Batch, options=PLAIN, vote=0, state=None, params=None, **mesh_sizes):
    """(metrics, gradient by name, new state) of one step. The state given is used up."""
    rows = batch.tokens.shape[1]
    mesh, shapes, step = stepper(cfg, options, rows, **mesh_sizes)
    state = start(cfg, shapes, params) if state is None else state
    before = jax.device_get(flatten(state.params))
    batch = jax.tree.map(jnp.asarray, batch)
    tunables = tunables_of(RATE_OF_ONE, options.z_loss)
    state, metrics = step(state, batch, make_votes(mesh)[vote], tunables)
    after = jax.device_get(flatten(state.params))
    return jax.device_get(metrics), {n: before[n] - after[n] for n in before}, state


def assert_close(found: dict, expected: dict, tolerance: float):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = np.sqrt(np.mean((found[name] - value) ** 2) / max(np.mean(value**2), 1e-30))
        assert error < tolerance, f"{name}: {error:.1e}"


# Rows that hold very different numbers of real tokens, one none at all: means of means differ.
UNEVEN = np.stack([row((1, 64)), row((1, 9), (0, 55)), row((1, 20), (2, 44)), row((0, 64))])[None]


@pytest.mark.parametrize(
    ("accumulation", "mesh_sizes"),
    [
        (4, {}),
        pytest.param(2, {"data": 2, "context": 2}, marks=pytest.mark.slow),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(1, {"data": 2, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param(1, {"context": 4, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_one_global_mean_whatever_the_mesh_and_the_accumulation(accumulation, mesh_sizes):
    expected, gradient, _ = run(ONE, batch_of(UNEVEN), Z_LOSS)
    options = dataclasses.replace(Z_LOSS, grad_accum_steps=accumulation)
    found, found_gradient, _ = run(ONE, batch_of(UNEVEN), options, **mesh_sizes)
    for name in ("loss", "z_loss", "bits_per_byte", "grad_norm"):
        np.testing.assert_allclose(found[name], expected[name], rtol=MODEL_FLOAT32, err_msg=name)
    assert found["tokens"] == expected["tokens"] == 64 + 9 + 64
    assert_close(found_gradient, gradient, MODEL_FLOAT32_GRADIENT)


def test_reported_numbers_are_what_they_say():
    metrics, gradient, _ = run(ONE, batch_of(UNEVEN), Z_LOSS)
    norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in gradient.values()))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=MODEL_FLOAT32)
    # Three bytes per target: bits per byte follow from nats per token.
    bits = metrics["loss"] / np.log(2) / 3
    np.testing.assert_allclose(metrics["bits_per_byte"], bits, rtol=MODEL_FLOAT32)
    assert metrics["learning_rate"] == 1.0 and metrics["finite"] and metrics["stop"] == 0
    assert 0 <= metrics["accuracy"] <= 1


def test_a_masked_token_changes_no_gradient(tmp_path):
    """From JSONL to the gradient: with other targets where the prompt is, nothing changes."""
    lines = [json.dumps({"prompt": "p" * n, "completion": "c" * (40 - n)}) for n in range(5, 35)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    config = DataConfig(
        source="jsonl",
        path=str(tmp_path),
        eval_path=str(tmp_path),
        loss_on="completion",
        sequence_length=64,
        global_batch_size=4,
    )
    with make_loader(config, split="train", mesh=make_mesh(), seed=0) as batches:
        made = jax.device_get(next(batches))
    batch = made._replace(tokens=made.tokens % VOCABULARY, targets=made.targets % VOCABULARY)
    masked = batch.loss_weights == 0
    assert 0.2 < masked.mean() < 0.8
    others = np.where(masked, (batch.targets + 7) % VOCABULARY, batch.targets)
    (metrics, gradient, _), (same, as_before, _), (different, changed, _) = (
        run(ONE, batch._replace(targets=targets), Z_LOSS)
        for targets in (batch.targets, others, (batch.targets + 7) % VOCABULARY)
    )
    assert {k: metrics[k] == same[k] for k in metrics} == dict.fromkeys(metrics, True)
    assert all(np.array_equal(gradient[name], as_before[name]) for name in gradient)
    assert metrics["loss"] != different["loss"]
    assert any((gradient[name] != changed[name]).any() for name in gradient)


def test_one_vote_to_stop_is_heard():
    assert run(ONE, batch_of(UNEVEN), Z_LOSS, vote=1)[0]["stop"] == 1


def long_and_windows(windows: int, length: int) -> tuple[Batch, Batch]:
    """A document of five windows and a bit, then a second one: as one long row and as windows."""
    total = windows * length
    whole = np.stack([row((1, 5 * length + 7), (2, total - 5 * length - 7)), row((1, total))])
    long = batch_of(whole[None])

    def cut(x):
        return np.moveaxis(x[0].reshape(2, windows, length), 1, 0)

    names = set(long._fields) - {"continues", "positions"}
    fields = {name: cut(getattr(long, name)) for name in names}
    ids = fields["segment_ids"]
    # Numbers of segments begin at 1 in every row.
    fields["segment_ids"] = ids - ids[:, :, :1] + 1
    continues = np.ones((windows, 2), bool)
    continues[0] = False
    return long, Batch(**fields, positions=None, continues=continues)


@pytest.mark.parametrize("context", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 4])
def test_windows_of_a_step_are_one_long_row(context):
    """Loss and gradient, through the trainer's own step: state, convolution tail and remat."""
    long, windows = long_and_windows(6, 32)
    expected, gradient, ends = run(ONE, long)
    found, found_gradient, found_ends = run(ONE, windows, context=context)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=MODEL_FLOAT32)
    assert_close(found_gradient, gradient, MODEL_FLOAT32_GRADIENT)
    carries = (jax.device_get(flatten(x.carry)) for x in (found_ends, ends))
    assert_close(*carries, MODEL_FLOAT32)


@pytest.mark.slow
def test_windows_without_carry_are_not_the_long_row():
    """The check above sees the difference: rows that begin afresh give another loss."""
    long, windows = long_and_windows(6, 32)
    fresh = windows._replace(continues=np.zeros_like(windows.continues))
    apart = abs(run(ONE, fresh)[0]["loss"] / run(ONE, long)[0]["loss"] - 1)
    assert apart > 100 * MODEL_FLOAT32


def test_the_next_step_goes_on_from_the_carry():
    """Two steps of three windows each, with the same parameters, sum up to the long row."""
    long, windows = long_and_windows(6, 32)
    first, second = (jax.tree.map(lambda x, i=i: x[i : i + 3], windows) for i in (0, 3))
    params = make_params(ONE)
    one, _, state = run(ONE, first, params=params)
    _, shapes, _ = stepper(ONE, PLAIN, 2)
    state = start(ONE, shapes, params, carry=state.carry)
    two, _, _ = run(ONE, second, state=state)
    together = (one["loss"] * one["tokens"] + two["loss"] * two["tokens"]) / long.tokens.size
    np.testing.assert_allclose(together, run(ONE, long)[0]["loss"], rtol=MODEL_FLOAT32)


def broken_parameters():
    params = make_params(ONE)
    return params | {"final_norm": params["final_norm"] * jnp.nan}


def test_a_step_that_is_not_finite_is_skipped_whole():
    metrics, change, state = run(ONE, batch_of(UNEVEN), SKIPPING, params=broken_parameters())
    assert not metrics["finite"] and metrics["steps_skipped"] == 1
    assert int(state.step) == 1 and int(state.seen) == 0
    assert all(np.all(c[np.isfinite(c)] == 0) for c in change.values())
    assert all(not np.any(x) for x in jax.device_get(jax.tree.leaves(state.carry)))
    # And the next, with parameters that are whole again, is not.
    _, shapes, _ = stepper(ONE, SKIPPING, 4)
    state = start(ONE, shapes, skipped=state.skipped, step=state.step)
    metrics, change, state = run(ONE, batch_of(UNEVEN), SKIPPING, state=state)
    assert metrics["finite"] and metrics["steps_skipped"] == 1 and int(state.seen) == 1
    assert any(np.any(c) for c in change.values())
    assert any(np.any(x) for x in jax.device_get(jax.tree.leaves(state.carry)))


def test_a_step_that_is_not_finite_is_told_where_it_is_not_skipped():
    metrics, _, _ = run(ONE, batch_of(UNEVEN), Z_LOSS, params=broken_parameters())
    assert not metrics["finite"]


@pytest.mark.parametrize(
    ("recent", "seen", "skips"),
    [
        ([3.0, 3.1, 2.9, 3.0], WINDOW, True),  # the loss here is above 3.3
        ([3.0, 3.1, 2.9, 3.0], WINDOW - 1, False),  # too few losses to know what is usual
        ([6.0, 2.0, 6.0, 2.0], WINDOW, False),  # within what is usual
    ],
)
def test_a_spike_is_skipped(recent, seen, skips):
    _, shapes, _ = stepper(ONE, SKIPPING, 4)
    state = start(ONE, shapes, recent=np.float32(recent), seen=np.int32(seen))
    metrics, change, state = run(ONE, batch_of(UNEVEN), SKIPPING, state=state)
    assert 3.3 < metrics["loss"] < 8, "the cases above were chosen for such a loss"
    assert metrics["steps_skipped"] == skips
    assert any(np.any(c) for c in change.values()) != skips
    assert (
        np.asarray(state.recent)[seen % WINDOW] == metrics["loss"] and int(state.seen) == seen + 1
    )


def test_a_lasting_change_is_no_spike_for_ever():
    _, shapes, _ = stepper(ONE, SKIPPING, 4)
    recent = np.float32([2.0, 2.1, 1.9, 2.0])
    state = start(ONE, shapes, recent=recent, seen=np.int32(WINDOW))
    skipped = []
    for _ in range(WINDOW + 1):
        metrics, _, state = run(ONE, batch_of(UNEVEN), SKIPPING, state=state)
        skipped.append(int(metrics["steps_skipped"]))
    assert skipped[0] == 1 and skipped[-1] == skipped[-2] <= WINDOW


def test_evaluation_is_the_same_mean_over_all_batches():
    """Two batches of very different weight: sums over sums, with the carry going on."""
    _, windows = long_and_windows(6, 32)
    parts = [jax.tree.map(lambda x, i=i: x[i : i + 1], windows) for i in range(6)]
    parts[4] = parts[4]._replace(loss_weights=np.zeros_like(parts[4].loss_weights))
    joined = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    mesh, shapes, _ = stepper(ONE, PLAIN, 2)
    params, carry = start(ONE, shapes).params, empty_carry(ONE, mesh, 2)()
    step, sums = make_eval_step(ONE, mesh), []
    for part in parts:
        carry, numbers = step(params, carry, jax.tree.map(jnp.asarray, part))
        sums.append(numbers)
    # The step of the windows' own test, compiled once for both.
    found, expected = eval_values(sums), run(ONE, joined, context=4)[0]
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(found[f"eval/{name}"], expected[name], rtol=MODEL_FLOAT32)


def test_attention_sees_so_many_keys():
    ids = np.stack([row((1, 3), (2, 2), (0, 59)), row((1, 64))])[None]
    metrics, _, _ = run(dataclasses.replace(ONE, pattern="attention"), batch_of(ids))
    assert metrics["attended"] == (1 + 2 + 3) + (1 + 2) + 64 * 65 / 2


@pytest.mark.parametrize(
    ("accumulation", "mesh_sizes"),
    [
        (2, {"expert": 2}),
        pytest.param(1, {"fsdp": 2, "context": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_biases_of_experts_move_once_a_step_by_the_counts_of_all_tokens(accumulation, mesh_sizes):
    """Sums over parts and ranks: parts hold different rows, one of them hardly any token."""
    cfg = dataclasses.replace(
        ONE,
        pattern="attention",
        ffn="experts",
        num_experts=4,
        expert_d_ff=16,
        router_bias_rate=0.125,
    )
    options = TrainOptions(grad_accum_steps=accumulation)
    metrics, _, state = run(cfg, batch_of(UNEVEN), options, **mesh_sizes)
    params, batch = make_params(cfg), batch_of(UNEVEN)
    arrays = batch.tokens[0], batch.segment_ids[0], batch.continues[0], init_carry(cfg, 4)
    _, _, (found,) = jax.jit(forward, static_argnums=(1, 6))(params, cfg, *arrays, make_mesh())
    counts = np.asarray(found["expert_tokens"][0])
    assert counts.sum() == 2 * (64 + 9 + 64)
    before, after = params["blocks"][0]["ffn"], state.params["blocks"][0]["ffn"]
    moved = np.asarray(after["router_bias"] - before["router_bias"])[0]
    np.testing.assert_allclose(moved, 0.125 * np.sign(counts.mean() - counts), atol=1e-6)
    assert metrics["layer_00/expert_load"] == pytest.approx(counts.max() / counts.mean())
    assert metrics["layer_00/dropped_tokens"] == 0
