"""Resuming: bit for bit after any end, on other meshes, from other runs, or a clear refusal."""

import json
import math
import random
import shutil
import signal
import time

import pytest

from checkpoints.manager import Manager
from configs import base, smoke
from tests.tolerances import RESUMED_ON_ANOTHER_MESH
from tests.trainer import Running, digests_of, learning, reports, steps_on_disk, train
from training.resume import differences, rate_jump, with_defaults

pytestmark = pytest.mark.timeout(1200)  # each run has its own limit

# Four ranks share a row's 128 tokens; documents are longer than that, so the carry matters.
MESH = "--config.mesh.context=4"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Twenty steps without a break."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(folder, MESH)
    return folder


@pytest.fixture
def half(whole, tmp_path):
    """A copy of the whole run that can continue from step 10."""
    folder = tmp_path / "half"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "20")
    return folder


@pytest.mark.slow
def test_steps_in_two_processes_are_the_steps_of_one(whole, tmp_path):
    """7 + 13 steps: the break is inside a document, between evaluations and saves."""
    train(tmp_path, MESH, "--config.train.steps=7")
    assert steps_on_disk(tmp_path) == [7]
    done = train(tmp_path, MESH)
    assert "resumed from step 7" in done.stdout
    broken = learning(tmp_path)
    assert broken[7].pop("eval/loss") > 0  # the first part evaluated at its own end as well
    assert broken == learning(whole)


KILLED_IN_SAVE = """
import os, signal
start = train.train
def hooked(*arguments):
    from training import run  # imports JAX, whose devices are chosen now
    save = run.Saver.save
    def begin(saver, step, *rest):
        save(saver, step, *rest)
        if step == 10:
            os.kill(os.getpid(), signal.SIGKILL)
    run.Saver.save = begin
    start(*arguments)
train.train = hooked
"""


def test_killed_and_told_to_stop_no_step_is_lost_or_repeated(whole, tmp_path):
    """kill -9 as soon as a save has started; SIGTERM later; then to the end."""
    arguments = [MESH, "--config.checkpoint.every=5"]
    run = Running(tmp_path, *arguments, first=KILLED_IN_SAVE)
    run.end(-signal.SIGKILL)
    run = Running(tmp_path, *arguments)
    run.until("step 12/")
    run.signal(signal.SIGTERM)
    run.end(0)
    train(tmp_path, *arguments)
    assert learning(tmp_path) == learning(whole)


def test_goodput_goes_on(half):
    """Steps that a restart loses count as restart time; no other time is lost."""
    before = reports(half)[20]
    lived = json.loads((half / "goodput.json").read_text())
    saved = Manager(str(half / "checkpoints")).record(10)["metadata"]["goodput"]
    train(half, MESH)
    after = reports(half)[20]
    for kind in ("compilation", "evaluation", "restart"):
        name = f"goodput/{kind}_seconds"
        assert after[name] > reports(half)[10][name]
    total = [
        sum(v for k, v in values.items() if k.endswith("_seconds") and k.startswith("goodput"))
        for values in (before, after)
    ]
    assert total[1] > total[0]
    lost = sum(lived.values()) - sum(saved.values())
    assert after["goodput/restart_seconds"] > saved["restart"] + lost > lost > 0
    assert after["goodput/training_seconds"] > saved["training"]
    # Whether it is less than before depends on the machine, now slower in steps, now in starts.
    share = after["goodput/productive_share"]
    assert share == pytest.approx(after["goodput/training_seconds"] / total[1]) and 0 < share < 1


@pytest.mark.parametrize(
    "mesh",
    [
        *(pytest.param({"context": n}, marks=pytest.mark.slow) for n in (1, 2)),
        {"data": 2, "context": 2},
    ],
)
def test_goes_on_on_another_mesh(whole, half, mesh):
    train(half, *(f"--config.mesh.{axis}={ranks}" for axis, ranks in mesh.items()))
    for step, values in learning(whole).items():
        found = learning(half)[step]["learning/loss"]
        tolerance = 0 if step <= 10 else RESUMED_ON_ANOTHER_MESH
        assert found == pytest.approx(values["learning/loss"], rel=tolerance), step


@pytest.mark.slow
def test_other_rows_are_refused_or_dealt_anew(half):
    before = learning(half)
    done = train(half, MESH, "--config.data.global_batch_size=4", code=1)
    assert (
        "config.data.global_batch_size" in done.stderr and "on_data_change=continue" in done.stderr
    )
    assert done.stderr.count("\n") == 1 and learning(half) == before
    done = train(
        half, MESH, "--config.data.global_batch_size=4", "--config.data.on_data_change=continue"
    )
    assert "the carried state starts empty" in done.stdout
    assert reports(half)[11]["learning/loss"] < reports(half)[1]["learning/loss"] - 0.5


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--config.model.d_model=96", "config.model.d_model is 64 there and 96 here"),
        (
            "--config.model.decay_gate=bounded",
            "config.model.decay_gate is 'softplus' there and 'bounded' here",
        ),
        ("--config.optimizer.name=muon", "config.optimizer.name is 'adamw' there and 'muon' here"),
        (
            "--config.model.compute_dtype=bfloat16",
            "config.model.compute_dtype is 'float32' there and 'bfloat16' here",
        ),
    ],
)
def test_another_model_is_refused(half, argument, says):
    done = train(half, MESH, argument, code=1)
    assert says in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert steps_on_disk(half) == [10] and max(reports(half)) == 20


def test_a_damaged_checkpoint_stops_the_run_or_is_passed_over(whole, half):
    shutil.copytree(whole / "checkpoints" / "20", half / "checkpoints" / "20")
    data = max((half / "checkpoints" / "20").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    arguments = [MESH, "--config.train.steps=22"]
    done = train(half, *arguments, code=1)
    assert "20: damaged" in done.stderr and "skip" in done.stderr
    assert done.stderr.count("\n") == 1 and data.read_bytes() == bytes(content)
    done = train(half, *arguments, "--config.checkpoint.damaged=skip")
    assert "skipped" in done.stdout and "resumed from step 10" in done.stdout
    assert {20, 22} <= set(steps_on_disk(half))
    assert {s: v for s, v in learning(half).items() if s <= 20} == learning(whole)


@pytest.mark.slow
def test_another_runs_parameters_start_a_new_training(whole, tmp_path):
    done = train(tmp_path, MESH, f"--init_from={whole}", "--config.train.steps=3")
    assert "parameters from step 20" in done.stdout
    assert list(reports(tmp_path)) == [0, 1, 2, 3], "the parameters are evaluated first"
    assert reports(tmp_path)[0]["eval/loss"] == reports(whole)[20]["eval/loss"]
    first = reports(tmp_path)[1]["learning/loss"]
    assert first < reports(whole)[1]["learning/loss"] - 0.5
    place = whole / "checkpoints"
    done = train(tmp_path / "other", MESH, f"--init_from={place}", "--config.train.steps=1")
    assert f"parameters from step 20 of {place}" in done.stdout
    done = train(tmp_path / "none", MESH, f"--init_from={tmp_path / 'nowhere'}", code=1)
    assert (
        "--init_from=" in done.stderr and "nowhere" in done.stderr and done.stderr.count("\n") == 1
    )


LOSS = "  loss "  # in the line of each reported step, and in none before the first step


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(5400)
def test_killed_fifty_times_at_any_moment(tmp_path):
    """Faults injected: 50. Survived: 50. The final parameters equal those of an unbroken run.
    Kills are placed by steps, so that a slow machine reaches saves as well."""
    arguments = ["--config.train.steps=600", "--config.eval.every=0"]
    arguments += ["--config.checkpoint.every=7", "--config.log.every=1"]
    train(tmp_path / "whole", *arguments)
    chance, killed, resumed = random.Random(0), tmp_path / "killed", 0
    for kill in range(50):
        run = Running(killed, *arguments)
        if kill % 5 == 0:  # while it starts, restores and compiles
            time.sleep(chance.uniform(0.0, 6.0))
        else:  # while it trains and saves: at most 12 steps each, 480 in all
            for _ in range(chance.randint(1, 12)):
                run.until(LOSS)
            time.sleep(chance.uniform(0.0, 0.05))
        run.signal(signal.SIGKILL)
        run.end(-signal.SIGKILL)
        resumed += "resumed from" in run.text
    assert resumed > 25, "most starts continue from a save"
    train(killed, *arguments)
    assert learning(killed) == learning(tmp_path / "whole")
    assert digests_of(killed, 600) == digests_of(tmp_path / "whole", 600)


EACH_STEP = ["--config.train.steps=150", "--config.checkpoint.every=1", "--config.eval.every=1"]


@pytest.fixture(scope="module")
def each_step(tmp_path_factory):
    """150 steps, each of them saved and evaluated, without a break."""
    folder = tmp_path_factory.mktemp("each_step") / "run"
    train(folder, *EACH_STEP)
    return folder


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_at_any_moment(each_step, tmp_path, number):
    """Twenty times, mostly in evaluations and saves, which here follow every step; also while it
    starts, restores and compiles, when there is nothing new. The exit code is 0, and the losses at
    the end are those of a run that was never stopped."""
    chance, stopped, steps = random.Random(1), tmp_path / "stopped", [-1]
    for stop in range(20):
        run = Running(stopped, *EACH_STEP)
        # Python must have come as far as the first line of main to take a signal in order.
        run.until(" parameters on " if stop % 2 else LOSS)
        time.sleep(chance.uniform(0.0, 1.5 if stop % 2 else 0.5))
        run.signal(number)
        text = run.end(0)
        steps.append(steps_on_disk(stopped)[-1])
        starting = f"stopped by {number.name} before the first step of this start"
        saved = f"stopped by {number.name}; step {steps[-1]} is saved"
        assert starting in text or saved in text, text
        assert steps[-2] + (stop % 2 == 0) <= steps[-1] < 150
    train(stopped, *EACH_STEP)
    assert learning(stopped) == learning(each_step)


def test_differences_tell_another_model_from_other_options():
    saved = {"model": {"d_model": 64, "remat": "full"}, "train": {"steps": 10}}
    saved["optimizer"] = {"name": "adamw", "b1": 0.9}
    saved["train"]["spike_window"] = 64
    now = {"model": {"d_model": 32, "remat": "none"}, "train": {"steps": 10, "new": 1}}
    now["optimizer"] = {"name": "muon", "b1": 0.8}
    now["train"]["spike_window"] = 32
    meanings = {name: option.on_resume for name, _, option in base.all_options()}
    now["log"] = {"every": 7}  # which does not affect what is saved
    found = differences(saved, now, meanings)
    assert found.model == ["config.model.d_model is 64 there and 32 here"]
    assert found.state == [
        "config.optimizer.name is 'adamw' there and 'muon' here",
        "config.train.spike_window is 64 there and 32 here",
    ]
    assert found.other == [
        "config.model.remat is 'full' there and 'none' here",
        "config.optimizer.b1 is 0.9 there and 0.8 here",
        "config.train.new is None there and 1 here",
    ]
    older = {"model": {"d_model": 64}}  # before remat was an option
    filled = with_defaults(older, {"model": {"d_model": 1, "remat": "full"}, "log": {"every": 1}})
    assert filled == {"model": {"d_model": 64, "remat": "full"}, "log": {"every": 1}}
    assert differences(saved, saved, meanings) == type(found)([], [], [])


def extended(group: str, **changes) -> tuple[dict, dict]:
    """The smoke config, and with changes."""
    before, after = smoke.get_config(), smoke.get_config()
    after[group].update(changes)
    return before.to_dict(), after.to_dict()


def test_a_learning_rate_that_jumps_on_extension_is_named_from_and_to():
    """By hand: the cosine's last rate before the end, and the one of twice as many steps."""
    before, after = extended("train", steps=40)
    for config in (before, after):
        config["optimizer"]["schedule_steps"] = 0
    line = rate_jump(before, after, 20)

    def at(step, steps):
        return 3e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 5) / (steps - 5))) / 2)

    assert f"from {at(19, 20):.2e} at step 20 to {at(20, 40):.2e} at step 21" in line
    assert "--config.optimizer.schedule_steps=20 keeps" in line
    after["optimizer"]["schedule_steps"] = 20
    assert not rate_jump(before, after, 20), "as the line advises"


@pytest.mark.parametrize(
    ("changes", "jumps"),
    [
        ({"learning_rate": 1e-3}, True),
        ({"schedule": "wsd", "decay_steps": 5}, True),
        ({"warmup_steps": 15}, True),
        ({"weight_decay": 0.2}, False),
        ({"learning_rate": 3.001e-3}, False),
    ],
)
def test_other_options_of_the_schedule_jump_as_well(changes, jumps):
    line = rate_jump(*extended("optimizer", **changes), 10)
    assert ("set back" in line) is jumps, line


def test_a_longer_run_of_a_schedule_of_its_own_length_does_not_jump():
    assert not rate_jump(*extended("train", steps=40), 20)
