"""Whole runs of train.py: what a user sees, what is on disk, and how a run ends."""

import ctypes
import os
import resource
import signal
import stat
import time

import jax
import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.trainer import Running, learning, reports, steps_on_disk, take_port, train
from training.descriptions import DESCRIPTIONS
from training.signals import ECHO_SECONDS

pytestmark = pytest.mark.timeout(1200)  # each run has its own limit

# Logged only if the peak is known, the device reports its memory, or the option is set.
SELDOM = {"perf/mfu", "memory/peak_bytes_per_device", "learning/z_loss"}
MIXTURE = {"data/share_N", "data/epoch_N"}  # logged once per source of config.data.mixture
NAMES = {name for name in DESCRIPTIONS if not name.startswith("eval/")} - SELDOM - MIXTURE


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of the smoke config from start to end, on a context axis of four: (folder, output)."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, train(folder, "--config.mesh.context=4")


def test_the_loss_falls_and_validation_stands_beside_gzip(whole):
    folder, done = whole
    losses = [values["learning/loss"] for values in reports(folder).values()]
    assert losses[0] > 5 and losses[-1] < 4.6, losses
    assert not done.stderr, "nothing but numbers: no warning of libtpu or of anything else"
    assert "step 20/20" in done.stdout and "gzip -9 on the same" in done.stdout
    assert "step 20 is saved" in done.stdout


def test_every_name_is_reported_at_every_step(whole):
    found = reports(whole[0])
    assert list(found) == list(range(1, 21))
    for values in found.values():
        names = {name for name in values if "/" in name and not name.startswith("eval/")}
        assert names == NAMES, "what is logged is described, and the reverse"
    assert found[20].keys() - found[19].keys() == {n for n in DESCRIPTIONS if "eval/" in n}
    assert found[20]["learning/tokens_seen"] == 20 * 2 * 128
    assert [step for step, values in found.items() if "eval/bits_per_byte" in values] == [10, 20]


def test_speed_is_that_of_completed_steps(whole):
    """Tokens per second and step time are of the same steps, without compilation. test_loop.py has
    reliable clocks and tests that no training time is omitted."""
    for values in reports(whole[0]).values():
        tokens = values["perf/tokens_per_second"] * values["perf/step_time_seconds"]
        assert tokens == pytest.approx(2 * 128, rel=1e-6)
    time = sum(values["perf/step_time_seconds"] for values in reports(whole[0]).values())
    goodput = reports(whole[0])[20]
    busy = goodput["goodput/training_seconds"] + goodput["goodput/data_seconds"]
    assert 0 < time <= busy * (1 + 1e-9)


def test_tensorboard_reads_the_same_numbers(whole):
    reader = EventAccumulator(str(whole[0]), size_guidance={"scalars": 0})
    reader.Reload()
    for name in ("learning/loss", "eval/loss", "perf/tokens_per_second"):
        events = {event.step: event.value for event in reader.Scalars(name)}
        expected = {s: v[name] for s, v in reports(whole[0]).items() if name in v}
        assert events == pytest.approx(expected, rel=1e-6)
    texts = reader.Tags()["tensors"]
    assert "config/text_summary" in texts and "parameters/text_summary" in texts


def test_checkpoints_are_kept_as_asked(whole):
    assert steps_on_disk(whole[0]) == [10, 20]


def test_the_same_command_again_has_nothing_to_do(whole):
    before = learning(whole[0])
    done = train(whole[0], "--config.mesh.context=4")
    assert "nothing to train" in done.stdout and learning(whole[0]) == before


def test_every_last_step_is_saved(tmp_path):
    """Step 7 of 7 with an interval of 5 is on disk, and so are its reported values."""
    train(tmp_path, "--config.train.steps=7", "--config.checkpoint.every=5")
    assert steps_on_disk(tmp_path) == [5, 7] and list(reports(tmp_path)) == list(range(1, 8))


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path):
    arguments = ["--config.optimizer.learning_rate=1e30", "--config.optimizer.warmup_steps=2"]
    done = train(tmp_path, "--config.checkpoint.every=1", *arguments, code=1)
    assert done.stderr.startswith("error: step ") and "not finite" in done.stderr
    step = int(done.stderr.split()[2].rstrip(":"))
    assert steps_on_disk(tmp_path)[-1] == step - 1 and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_skipping_steps_that_are_not_finite_is_an_option(tmp_path):
    arguments = ["--config.optimizer.learning_rate=1e30", "--config.optimizer.warmup_steps=2"]
    train(tmp_path, "--config.train.skip_nonfinite", "--config.eval.every=0", *arguments)
    last = reports(tmp_path)[20]
    assert last["learning/loss"] is None and last["learning/steps_skipped"] > 10


# However long this machine takes between two signals that are meant as one.
LONG_ECHO = "from training import signals; signals.ECHO_SECONDS = 900"


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_told_to_stop_saves_one_step_and_says_how_to_go_on(tmp_path, number):
    run = Running(tmp_path, "--config.train.steps=100000", "--config.eval.every=0", first=LONG_ECHO)
    run.until("step 5/")
    run.signal(number)
    run.signal(number)  # as make and shells do, that pass on what their group got as well
    text = run.end(0)
    last = max(reports(tmp_path))
    assert steps_on_disk(tmp_path)[-1] == last >= 5
    assert (
        f"stopped by {number.name}; step {last} is saved" in text and "resumes from there" in text
    )


# A compilation that does not end; JAX is imported early and has to know its devices.
ENDLESS_COMPILATION = """
import os, time
os.environ["JAX_PLATFORMS"] = "cpu"
from training import run
run._compile_step = lambda *_: (print("compiling", flush=True), time.sleep(900))
"""


def stopped_within(run: Running, seconds: float, number: int = signal.SIGTERM) -> str:
    """Sends one signal; the run must end in order, in a time that only a hang reaches on a busy
    machine (an idle one needs 1 to 6 s). Returns its lines."""
    began = time.monotonic()
    run.signal(number)
    text = run.end(0)
    assert time.monotonic() - began < seconds, text
    return text


def test_told_to_stop_during_compilation(tmp_path):
    run = Running(tmp_path, first=ENDLESS_COMPILATION)
    run.until("compiling")
    assert "stopped by SIGTERM before the first step" in stopped_within(run, 60)
    assert steps_on_disk(tmp_path) == []


def test_told_to_stop_while_waiting_for_the_coordinator(tmp_path):
    port = f"--coordinator=localhost:{take_port()}"
    waits = 'print("waiting", flush=True)'
    two = ["--config.mesh.context=2", port, "--processes=2", "--process_id=1"]
    run = Running(tmp_path, *two, first=waits)
    run.until("waiting")
    time.sleep(3)  # it imports JAX and asks for the coordinator, which never comes
    assert "stopped by SIGTERM before the first step" in stopped_within(run, 60)


def test_told_to_stop_while_waiting_for_data(tmp_path):
    """A data worker is suspended, as one whose file system hangs."""
    run = Running(
        tmp_path, "--config.data.workers=1", "--config.train.steps=100000", "--config.eval.every=0"
    )
    run.until("step 3/")
    children = psutil.Process(run.process.pid).children()
    worker = next(child for child in children if "spawn_main" in " ".join(child.cmdline()))
    worker.suspend()
    time.sleep(5)  # what was made ahead is used up
    text = stopped_within(run, 120)
    last = max(reports(tmp_path))
    assert f"stopped by SIGTERM; step {last} is saved" in text
    assert steps_on_disk(tmp_path)[-1] == last >= 3


@pytest.mark.parametrize(
    ("number", "waits"),
    [
        ("1", "--process_id from 0 on"),
        pytest.param("0", "all 2 processes did not meet", marks=pytest.mark.slow),
    ],
)
def test_a_process_whose_peers_never_come_is_one_line(tmp_path, number, waits):
    """Process 1 without the coordinator; process 0, which is the coordinator, without the other."""
    address = f"localhost:{take_port()}"
    two = ["--config.mesh.context=2", f"--coordinator={address}", "--processes=2"]
    done = train(tmp_path, *two, f"--process_id={number}", "--start_timeout=2", code=1)
    assert done.stderr.startswith(f"error: --coordinator={address}: all 2 processes did not meet")
    assert waits in done.stderr and done.stderr.count("\n") == 1, done.stderr


# Storage that hangs from step 4 on: before anything of the step is written, or in the background.
HUNG_SAVE = """
import os, time
os.environ["JAX_PLATFORMS"] = "cpu"
from checkpoints.store import Store
save = Store.save
def hung(store, step, *rest):
    if step == 4:
        print("hangs", flush=True)
        Store.{place} = lambda *_: time.sleep(900)
    (Store if step == 4 else type("", (), {{"save": save}})).save(store, step, *rest)
Store.save = hung
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["save", "wait"])
def test_told_to_stop_while_a_save_hangs(tmp_path, place):
    hang = HUNG_SAVE.format(place=place)
    if place == "wait":
        hang = hang.replace("(Store if step == 4 else", "(Store if False else")
    arguments = ["--config.checkpoint.every=2", "--config.eval.every=0"]
    run = Running(tmp_path, *arguments, first=hang)
    run.until("hangs")
    run.signal(signal.SIGTERM)
    began = time.monotonic()
    text = run.end(1)
    assert time.monotonic() - began < 300, "8 s after the request; the save would hang for 900 s"
    last = text.splitlines()[-1]
    assert last.startswith("stopped by SIGTERM while a checkpoint was being saved, which is given")
    assert "resumes from step 2" in last and "step 4 is saved" not in text
    assert 2 in steps_on_disk(tmp_path)


def test_told_to_stop_twice_ends_at_once(tmp_path):
    """During an evaluation of half of all text, which takes many minutes."""
    run = Running(
        tmp_path,
        "--config.eval.every=2",
        "--config.eval.batches=0",
        "--config.data.eval_fraction=0.5",
    )
    run.until("step 1/")  # said when step 2 is under way, after which it evaluates
    run.signal(signal.SIGTERM)
    run.until("stopping after the step")
    run.wait_for(tmp_path / "checkpoints" / "2")
    time.sleep(2 * ECHO_SECONDS)
    run.signal(signal.SIGTERM)
    assert "ending immediately" in run.end(128 + signal.SIGTERM)
    assert steps_on_disk(tmp_path) == [2], "saved when told, before the evaluation's end"


def test_a_profile_is_written_by_option_and_on_a_signal(tmp_path):
    run = Running(
        tmp_path,
        "--config.train.steps=100000",
        "--config.eval.every=0",
        "--config.checkpoint.every=0",
        "--config.profile.start=3",
        "--config.profile.steps=2",
    )
    run.until("profile of 2 steps")
    run.signal(signal.SIGUSR1)
    run.until("profile of 2 steps")
    run.signal(signal.SIGTERM)
    run.end(0)
    traces = sorted((tmp_path / "plugins" / "profile").glob("*/*.xplane.pb"))
    steps = [traced_steps(trace) for trace in traces]
    assert len(steps) == 2 and steps[0] == [3, 4] and steps[1][1] == steps[1][0] + 1, steps
    assert [trace.parent.name for trace in traces] == [f"step_{first:08d}" for first, _ in steps]


def traced_steps(trace) -> list[int]:
    """The steps named in a trace."""
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    return sorted(dict(event.stats)["step_num"] for event in events if event.name == "train")


def small_files():
    """Limits files of the process to 64 KiB, which affects a save as a full disk does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))


# Such a process cannot keep its programs and says so, in a line beside the one that is tested.
NO_CACHE = "--config.train.compilation_cache="


@pytest.mark.slow
def test_a_save_that_fails_in_the_background_ends_the_run(tmp_path):
    arguments = ["--config.train.steps=100000", "--config.checkpoint.every=5", NO_CACHE]
    train(tmp_path, "--config.train.steps=3", "--config.checkpoint.every=0")
    done = train(tmp_path, *arguments, code=1, preexec_fn=small_files)
    assert done.stderr.startswith("error: ") and "saving step 5 failed" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert steps_on_disk(tmp_path) == [3] and max(reports(tmp_path)) < 15


def test_a_disk_that_is_full_for_reports_is_one_line(tmp_path):
    (tmp_path / "goodput.json.part").symlink_to("/dev/full")
    done = train(tmp_path, code=1)
    assert "No space left on device; the steps saved before" in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


def test_a_folder_in_use_is_left_alone(tmp_path):
    run = Running(tmp_path, "--config.train.steps=100000", "--config.eval.every=0")
    run.until("step 2/")
    done = train(tmp_path, code=1)
    assert done.stderr.count("\n") == 1 and "another run is using it" in done.stderr, done.stderr
    run.signal(signal.SIGTERM)
    run.end(0)
    assert len(steps_on_disk(tmp_path)) >= 1


def test_two_runs_with_one_checkpoint_folder_are_refused(tmp_path):
    shared = f"--config.checkpoint.directory={tmp_path / 'shared'}"
    run = Running(tmp_path / "one", shared, "--config.train.steps=100000", "--config.eval.every=0")
    run.until(" parameters")
    done = train(tmp_path / "two", shared, code=1)
    assert done.stderr.startswith("error: config.checkpoint.directory=")
    assert "another run is using it" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    run.signal(signal.SIGTERM)
    run.end(0)


def test_too_little_memory_is_one_line(tmp_path):
    done = train(tmp_path, "--config.model.d_ff=2000000000", code=1)
    assert "a device's memory is too small" in done.stderr and "grad_accum_steps" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def minding_permissions():
    """Root may write anywhere: drops that capability (CAP_DAC_OVERRIDE) for child processes."""
    PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1  # linux/prctl.h, linux/capability.h
    if os.getuid() == 0 and ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0):
        raise OSError("cannot drop the capability")


def test_a_folder_without_permission_is_one_line(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    done = train(folder, NO_CACHE, code=1, preexec_fn=minding_permissions)
    assert "cannot write there" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_reader_that_goes_away_is_one_line(tmp_path):
    run = Running(tmp_path, "--config.train.steps=100000", "--config.eval.every=0", separate=True)
    run.until(" parameters")
    run.process.stdout.close()
    assert run.process.wait() == 1
    text = run.process.stderr.read()
    assert text.startswith("error: stdout: ") and text.count("\n") == 1, text


@pytest.mark.parametrize("closed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_closed_streams_do_not_matter(tmp_path, closed):
    train(tmp_path, "--config.train.steps=2", preexec_fn=lambda: os.close(closed))
    assert steps_on_disk(tmp_path) == [2] and list(reports(tmp_path)) == [1, 2]


@pytest.mark.slow
def test_arrays_that_are_gone_are_one_line(tmp_path):
    train(tmp_path, "--config.train.steps=2")
    files = (tmp_path / "checkpoints" / "2" / "state").rglob("*")
    max(files, key=lambda file: file.stat().st_size).unlink()
    done = train(tmp_path, "--config.train.steps=3", code=1)
    assert "2: damaged" in done.stderr and done.stderr.count("\n") == 1, done.stderr
