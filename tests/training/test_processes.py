"""Several processes that train together, on one machine: the context axis crosses them."""

import random
import re
import signal
import time

import psutil
import pytest

from checkpoints.manager import Manager
from tests.fake_gcs import Hold
from tests.tolerances import RESUMED_ON_ANOTHER_MESH
from tests.trainer import (
    LIMIT,
    Running,
    digests_of,
    learning,
    reports,
    steps_on_disk,
    take_port,
    train,
)

pytestmark = pytest.mark.timeout(1200)  # each run has its own limit

MESH = ["--config.mesh.context=4", "--config.eval.batches=2"]


# What a process prints while all is well, XLA's alarm about slow compilation included.
PROGRESS = re.compile(
    r"step |.* parameters on |compiled in |compiling |resumed from |skipped |validation"
    r"|E\d{4} .*slow_operation_alarm|The operation took|\*{8}|\[Compiling|$"
    r"|I\d{4} .*GOOGLE_AUTH_TOKEN_FOR_TESTING"  # how these tests reach a bucket of their own
)


def start(workdir, *arguments: str) -> list[Running]:
    """Two processes of two CPU devices each."""
    both = [*MESH, f"--coordinator=localhost:{take_port()}", "--processes=2"]
    return [Running(workdir, *both, f"--process_id={i}", *arguments) for i in range(2)]


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path):
    """Losses, validation, one set of reports and one checkpoint, from which one process resumes."""
    both = start(tmp_path / "two", "--config.train.steps=12")
    texts = [run.end(0) for run in both]
    assert "step 12/12" in texts[0] and not texts[1], "only the first one reports"
    assert "Gloo" not in texts[0]
    train(tmp_path / "one", *MESH, "--config.train.steps=12")
    one, two = learning(tmp_path / "one"), learning(tmp_path / "two")
    assert one.keys() == two.keys()
    for step, values in one.items():
        assert two[step] == pytest.approx(values, rel=RESUMED_ON_ANOTHER_MESH), step
    done = train(tmp_path / "two", *MESH, "--config.train.steps=14")
    assert "resumed from step 12" in done.stdout and steps_on_disk(tmp_path / "two")[-1] == 14


@pytest.mark.slow
def test_one_process_is_told_to_stop_and_both_save_the_same_step(tmp_path):
    both = start(tmp_path, "--config.train.steps=100000", "--config.eval.every=0")
    both[0].until("step 5/")
    both[1].signal(signal.SIGTERM)
    text = both[0].end(0)
    both[1].end(0)
    last = max(reports(tmp_path))
    assert "stopped by a signal to another process" in text
    assert steps_on_disk(tmp_path)[-1] == last < 100000


# Where process 0 ends, JAX ends the others, whatever they were about to say.
LAST_TO_LEAVE = """
leave = train.process.leave
train.process.leave = lambda code: (sys.stdin.read(), leave(code))
"""


def test_processes_that_do_not_share_a_folder_are_told_so(tmp_path):
    both = [*MESH, f"--coordinator=localhost:{take_port()}", "--processes=2"]
    last = Running(tmp_path / "0", *both, "--process_id=0", first=LAST_TO_LEAVE)
    other = Running(tmp_path / "1", *both, "--process_id=1")
    said = other.end(1)
    last.process.stdin.close()
    for text in (said, last.end(1)):
        assert "process 1 does not see the folder of process 0" in text
    assert not any(path.name == ".shared" for path in tmp_path.rglob("*"))


def kill(both: list[Running], victim: int) -> None:
    """Kills one process; the other must end with one line, soon."""
    both[victim].signal(signal.SIGKILL)
    began = time.monotonic()
    other = both[1 - victim]
    for _ in other._read():
        pass
    assert other.process.wait() == 1, other.text
    assert time.monotonic() - began < 120, "8 to 13 s after the last heartbeat, alone and not"
    said = [line for line in other.lines if not PROGRESS.match(line)]
    assert len(said) == 1 and said[0].startswith(f"error: process {1 - victim}: "), other.text
    assert f"process {victim} " in said[0] and "the same command" in said[0], said
    both[victim].end(-signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_makes_the_other_stop(tmp_path, victim):
    both = start(tmp_path, "--config.train.steps=100000", "--config.eval.every=0")
    both[0].until("step 5/")
    kill(both, victim)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_data_that_fail_in_one_process_end_both_with_the_same_step_saved(tmp_path, victim):
    """A data worker of one process is killed."""
    arguments = ["--config.train.steps=100000", "--config.eval.every=0", "--config.data.workers=1"]
    both = start(tmp_path, *arguments)
    both[0].until("step 5/")
    children = psutil.Process(both[victim].process.pid).children()
    next(c for c in children if "spawn_main" in " ".join(c.cmdline())).kill()
    texts = [run.end(1).splitlines()[-1] for run in both]
    last = max(reports(tmp_path))
    assert steps_on_disk(tmp_path)[-1] == last >= 5
    assert texts[victim].startswith("error: config.data.workers: worker 0 of 1 has ended"), texts
    assert f"process {victim} can no longer read its documents" in texts[1 - victim], texts
    assert f"step {last} is saved" in texts[1 - victim], texts


BEFORE_EVALUATION = """
start = train.train
def hooked(*arguments):
    from training import loop  # imports JAX, whose devices are chosen now
    evaluate = loop.TrainLoop._evaluate
    def before(self, step, stops):
        if step == {step}:
            {do}
        return evaluate(self, step, stops)
    loop.TrainLoop._evaluate = before
    start(*arguments)
train.train = hooked
"""


@pytest.mark.slow
def test_evaluation_data_that_fail_in_one_process_end_both(tmp_path):
    """Before the evaluation of step 6 the documents of process 1 disappear."""
    for folder in ("0", "1", "train"):
        (tmp_path / folder).mkdir()
        for number in range(20):
            (tmp_path / folder / f"{number}.txt").write_text(f"{number} words. " * 100)
    arguments = [*MESH, f"--coordinator=localhost:{take_port()}", "--processes=2"]
    arguments += ["--config.eval.every=6", "--config.train.steps=100000"]
    arguments += ["--config.data.source=text", f"--config.data.path={tmp_path / 'train'}"]
    gone = f"import shutil; shutil.rmtree({str(tmp_path / '1')!r})"
    both = [
        Running(
            tmp_path / "run",
            *arguments,
            f"--process_id={number}",
            f"--config.data.eval_path={tmp_path / str(number)}",
            first=BEFORE_EVALUATION.format(step=6, do=gone if number else "pass"),
        )
        for number in range(2)
    ]
    texts = [run.end(1).splitlines()[-1] for run in both]
    assert "process 1 can no longer read its documents for evaluation" in texts[0], texts
    assert texts[1].startswith("error: config.data.eval_path"), texts
    assert steps_on_disk(tmp_path / "run")[-1] == 6


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_one_of_two_killed_while_they_save_nothing_is_lost(tmp_path):
    """Ten kills of either process, nearly always during a save, since each step is saved."""
    arguments = ["--config.train.steps=60", "--config.checkpoint.every=1", "--config.eval.every=0"]
    arguments += ["--config.log.every=1"]
    for run in start(tmp_path / "whole", *arguments):
        run.end(0)
    chance = random.Random(2)
    for victim in [0, 1] * 5:
        both = start(tmp_path / "killed", *arguments)
        for _ in range(
            chance.randint(3, 4)
        ):  # by the third the save of this start's first is whole
            both[0].until("  loss ")
        time.sleep(chance.uniform(0.0, 0.3))
        kill(both, victim)
    assert steps_on_disk(tmp_path / "killed")[-1] >= 5, "starts continue from saves"
    for run in start(tmp_path / "killed", *arguments):
        run.end(0)
    assert learning(tmp_path / "killed") == learning(tmp_path / "whole")
    assert digests_of(tmp_path / "killed", 60) == digests_of(tmp_path / "whole", 60)


@pytest.mark.slow
def test_two_processes_save_to_a_bucket(gcs, bucket, tmp_path):
    """One of them is killed while they save; then both continue to the end."""
    place = f"gs://{bucket}/run"
    arguments = ["--config.train.steps=12", "--config.checkpoint.every=3"]
    for run in start(tmp_path / "local", *arguments):
        run.end(0)
    arguments += [f"--config.checkpoint.directory={place}"]
    gcs.fault = hold = Hold("run/6/commit_success.txt")
    both = start(tmp_path / "bucket", *arguments)
    both[0].until("step 6/")
    assert hold.reached.wait(LIMIT)
    kill(both, 1)
    hold.go_on.set()
    gcs.fault = lambda request: None
    both = start(tmp_path / "bucket", *arguments)
    texts = [run.end(0) for run in both]
    assert f"skipped {place}/6: its save was interrupted" in texts[0]
    assert f"resumed from step 3 of {place}" in texts[0]
    assert learning(tmp_path / "bucket") == learning(tmp_path / "local")
    assert Manager(place).record(12)["digests"] == digests_of(tmp_path / "local", 12)
