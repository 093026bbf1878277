"""Numbers that a step takes as inputs: rates of both schedules, and a sweep that compiles once."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from configs import smoke
from tests.trainer import learning, train
from training.estimate.compile import abstract_step
from training.options import OptimizerOptions
from training.tunables import rate, schedule_of

OPTIONS = OptimizerOptions(
    learning_rate=0.1, schedule_steps=100, warmup_steps=10, decay_steps=20, min_lr_ratio=0.1
)


@pytest.mark.parametrize(
    ("changes", "points"),
    [
        ({}, {0: 0.0, 5: 0.05, 10: 0.1, 55: 0.055, 100: 0.01, 5000: 0.01}),
        ({"warmup_steps": 0}, {0: 0.1, 50: 0.055, 100: 0.01}),
        ({"schedule": "wsd"}, {0: 0.0, 5: 0.05, 10: 0.1, 80: 0.1, 90: 0.055, 100: 0.01, 999: 0.01}),
        ({"schedule": "wsd", "warmup_steps": 0}, {0: 0.1, 80: 0.1, 90: 0.055}),
        ({"schedule": "wsd", "decay_steps": 90}, {10: 0.1, 55: 0.055, 100: 0.01}),
    ],
)
def test_schedules_at_their_corners(changes, points):
    schedule = schedule_of(dataclasses.replace(OPTIONS, **changes))
    found = {step: float(rate(schedule, step)) for step in points}
    assert found == pytest.approx(points, abs=1e-7)


@pytest.mark.parametrize(
    ("peak", "warmup", "steps", "final"),
    [(0.1, 10, 100, 0.1), (3e-3, 20, 300, 0.1), (1.37e-3, 13, 77, 0.07), (1.0, 1, 2, 0.0)],
)
def test_a_cosine_is_optaxs_bit_for_bit(peak, warmup, steps, final):
    options = OptimizerOptions(
        learning_rate=peak, warmup_steps=warmup, schedule_steps=steps, min_lr_ratio=final
    )
    theirs = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, final * peak)
    updates = np.arange(steps + 3, dtype=np.int32)
    found = jax.jit(jax.vmap(rate, (None, 0)))(schedule_of(options), updates)
    np.testing.assert_array_equal(found, jax.jit(jax.vmap(theirs))(updates))


SWEPT = {
    "learning_rate": 0.7,
    "clip_norm": 3.0,
    "weight_decay": 0.0,
    "min_lr_ratio": 0.3,
    "schedule": "wsd",
    "schedule_steps": 900,
    "warmup_steps": 7,
    "decay_steps": 30,
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_sweep_lowers_to_one_program(optimizer):
    def program(changes, **train_options) -> str:
        config = smoke.get_config()
        config.optimizer.update(name=optimizer, **changes)
        config.train.update(train_options)
        step, arguments, *_ = abstract_step(jax.devices()[:1], config, 258)
        return step.lower(*arguments).as_text()

    first = program({}, z_loss=0.1)
    assert program(SWEPT, z_loss=0.2, steps=77) == first
    assert program({"b1": 0.5, "muon_momentum": 0.5}, z_loss=0.1) != first


@pytest.mark.slow
def test_a_sweep_compiles_once(tmp_path):
    """Three runs in one folder of programs: the first adds all of them, and the losses differ."""
    programs = tmp_path / "programs"
    losses, kept = [], []
    for peak in (1e-3, 3e-3, 1e-2):
        train(
            tmp_path / str(peak),
            f"--config.train.compilation_cache={programs}",
            f"--config.optimizer.learning_rate={peak}",
            "--config.train.steps=5",
            "--config.eval.every=0",
        )
        losses.append(learning(tmp_path / str(peak))[5]["learning/loss"])
        kept.append(sorted(programs.iterdir()))
    assert kept[0] and kept[0] == kept[1] == kept[2]
    assert len(set(losses)) == 3
