"""Checkpoints in a bucket: behaviour without a counterpart in a local folder, and whole runs.

test_manager.py tests what holds for both.
"""

import contextlib
import signal
import threading
import time

import pytest
from orbax.checkpoint._src.futures.future import _SignalingThread

from checkpoints.lease import STALE_SECONDS, Lease
from checkpoints.manager import CheckpointError, Manager
from checkpoints.retention import Retention
from tests.checkpoints.test_manager import KEEP, arrays, same, want
from tests.fake_gcs import Hold, refuse
from tests.trainer import LIMIT, Running, digests_of, learning, reports, train


@pytest.fixture
def place(bucket):
    return f"gs://{bucket}/run"


@pytest.fixture
def lines():
    return []


def saved(place, lines, *steps: int) -> Manager:
    manager = Manager(place, KEEP, lines.append)
    for step in steps:
        manager.save(step, arrays(seed=step), {"position": step})
    manager.wait()
    return manager


def wait_for_writers(manager):
    """A save that failed in one thread continues in others; a run that ends takes them along."""
    for thread in threading.enumerate():
        if isinstance(thread, _SignalingThread):
            threading.Thread.join(thread, 60)  # its own would raise what it failed with
            assert not thread.is_alive(), thread
    with contextlib.suppress(CheckpointError):  # of a second one that failed
        manager.wait()
    manager.close()  # which waits for what is written beside: when the step was begun and ended


def test_a_bucket_that_does_not_exist_is_one_line(gcs):
    with pytest.raises(CheckpointError, match=r"^gs://none/run: there is no such bucket") as caught:
        Manager("gs://none/run", KEEP, print)
    assert "\n" not in str(caught.value) and "none" not in gcs.buckets


@pytest.mark.parametrize("name", ["a#b", "a\tb", "a\nb", "a[1]b", "a?b"])
def test_names_that_would_be_read_as_other_ones_are_refused(gcs, bucket, name):
    with pytest.raises(CheckpointError, match="misread"):
        Manager(f"gs://{bucket}/{name}", KEEP, print)
    assert not gcs.buckets[bucket]


@pytest.mark.parametrize(
    ("method", "pattern"),
    [
        (".*", ""),  # nothing is allowed
        ("POST", ""),  # reading alone
        ("DELETE", ""),  # writing, but nothing can be tidied away
        ("GET", "^$"),  # objects, but not the list of them, nor the bucket itself
    ],
)
def test_a_bucket_without_permission_is_one_line(gcs, place, method, pattern):
    gcs.fault = refuse(method, pattern)
    with pytest.raises(CheckpointError, match=rf"^{place}: cannot write there \(.*told to refuse"):
        Manager(place, KEEP, print)


@pytest.mark.usefixtures("impatient_orbax")
@pytest.mark.parametrize("at", ["/2/state/d/", "/2/record/metadata", "/2/commit_success"])
def test_a_refused_save_is_one_line_and_made_up_for(gcs, place, lines, at):
    manager = saved(place, lines, 1)
    gcs.fault = refuse("POST", at)
    with pytest.raises(CheckpointError, match=rf"^{place}: saving step 2 failed \(.*") as caught:
        manager.save(2, arrays(seed=2), {})
        manager.wait()
    assert "\n" not in str(caught.value) and gcs.fault.seen
    wait_for_writers(manager)
    gcs.fault = lambda request: None
    manager = Manager(place, KEEP, lines.append)
    assert len(lines) == 1 and f"{place}/2: its save was interrupted" in lines[0]
    assert not gcs.names(place.split("/")[2], "run/2/")
    restored = manager.restore_latest(want(arrays()), "stop")
    assert restored.step == 1 and same(restored.arrays, arrays(seed=1))
    manager.save(2, arrays(seed=2), {})
    manager.wait()
    assert same(manager.restore(2, want(arrays())).arrays, arrays(seed=2))


@pytest.mark.parametrize("at", ["/1/state/d/", "/1/record/metadata", "/1/commit_success"])
def test_a_service_that_is_away_for_a_moment_is_waited_for(gcs, place, lines, at):
    gcs.fault = refuse("POST", at, 503, times=1)
    manager = saved(place, lines, 1)
    assert len(gcs.fault.seen) > 1
    assert same(manager.restore(1, want(arrays())).arrays, arrays(seed=1))


@pytest.mark.parametrize("at", ["/2/record/metadata", "/2/state/d/", "/2/state/manifest"])
def test_a_step_that_cannot_be_reached_is_not_passed_over(gcs, place, lines, at):
    """It may be complete: continuing from the previous step would lose work."""
    manager = saved(place, lines, 1, 2)
    gcs.fault = refuse("GET", at)
    with pytest.raises(CheckpointError, match=rf"^{place}/2: cannot be read \(.*try again"):
        manager.restore_latest(want(arrays()), "skip")
    assert not lines and gcs.fault.seen


def test_an_older_step_goes_only_when_the_newer_one_is_whole(gcs, place, lines):
    events = []

    def note(request):
        if request.method == "DELETE" or request.name.endswith("commit_success.txt"):
            events.append((request.method, request.name))

    gcs.fault = note
    manager = Manager(place, Retention(last=1), lines.append)
    for step in (1, 2, 3):
        manager.save(step, arrays(), {})
    manager.wait()
    assert manager.steps() == [3]
    wholes = [events.index(("POST", f"run/{step}/commit_success.txt")) for step in (1, 2, 3)]
    for step, whole, next_whole in zip((1, 2), wholes, wholes[1:]):
        gone = [i for i, (what, name) in enumerate(events) if what == "DELETE" and i > whole]
        mine = [i for i in gone if events[i][1].startswith(f"run/{step}/")]
        assert mine and min(mine) > next_whole


def test_what_another_process_writes_is_seen(gcs, place, lines):
    manager, bucket = saved(place, lines, 1, 2), place.split("/")[2]
    assert manager.steps() == [1, 2]
    for name in gcs.names(bucket, "run/2/"):
        gcs.put(bucket, name.replace("/2/", "/3/"), gcs.content(bucket, name))
    del gcs.buckets[bucket]["run/2/commit_success.txt"]
    assert manager.steps() == [1, 3]
    assert Manager(place, None, lines.append).steps() == [1, 3]


def test_a_step_whose_tidying_was_interrupted_is_tidied(gcs, place, lines):
    """Some of its objects are already deleted, but not its commit mark."""
    bucket, best = place.split("/")[2], Retention(last=1, best=1)
    manager = Manager(place, best, lines.append)
    for step, score in ((1, 0.1), (2, 0.2)):
        manager.save(step, arrays(seed=step), {}, score)
    manager.wait()
    for name in gcs.names(bucket, "run/1/state"):
        del gcs.buckets[bucket][name]
    manager = Manager(place, best, lines.append)
    assert manager.restore_latest(want(arrays()), "stop").step == 2
    manager.save(3, arrays(), {}, 0.3)
    manager.wait()
    assert manager.steps() == [2, 3] and not lines


MESH = "--config.mesh.context=2"
WHOLE_RUN = pytest.mark.timeout(1200)


def marked(gcs, place: str) -> list[int]:
    """The steps with a commit mark, as the server has them."""
    names = gcs.names(place.split("/")[2], "run/")
    return sorted(
        int(name.split("/")[1])
        for name in names
        if name.count("/") == 2 and name.endswith("/commit_success.txt")
    )


@WHOLE_RUN
@pytest.mark.slow
def test_a_run_killed_in_a_save_to_a_bucket_loses_nothing(gcs, place, tmp_path):
    """kill -9 where all of step 10 but its commit mark is written; then to the end."""
    arguments = [MESH, "--config.checkpoint.every=5", f"--config.checkpoint.directory={place}"]
    gcs.fault = hold = Hold("run/10/commit_success.txt")
    run = Running(tmp_path / "bucket", *arguments)
    run.until("step 10/")
    assert hold.reached.wait(LIMIT)
    run.signal(signal.SIGKILL)
    run.end(-signal.SIGKILL)
    hold.go_on.set()
    gcs.fault = lambda request: None
    assert marked(gcs, place) == [5] and gcs.names(place.split("/")[2], "run/10/record/metadata")
    done = train(tmp_path / "bucket", *arguments)
    assert f"skipped {place}/10: its save was interrupted" in done.stdout
    assert f"resumed from step 5 of {place}" in done.stdout
    assert f"step 20 is saved in {place}" in done.stdout
    train(tmp_path / "local", MESH, "--config.checkpoint.every=5")
    assert learning(tmp_path / "bucket") == learning(tmp_path / "local")
    manager = Manager(place)
    assert manager.steps() == marked(gcs, place) == [15, 20]
    assert manager.record(20)["digests"] == digests_of(tmp_path / "local", 20)
    assert not (tmp_path / "bucket" / "checkpoints").exists()


@WHOLE_RUN
@pytest.mark.slow
def test_a_run_that_is_stopped_refused_and_sent_away_loses_nothing(gcs, place, tmp_path):
    """SIGTERM; a save that is refused; a service that is away when it starts; then to the end."""
    arguments = [MESH, "--config.checkpoint.every=5", f"--config.checkpoint.directory={place}"]
    gcs.fault = hold = Hold("run/5/commit_success.txt")  # so that it cannot come beyond step 10
    run = Running(tmp_path / "bucket", *arguments)
    run.until("step 7/")
    run.signal(signal.SIGTERM)
    run.until("stopping after the step")
    gcs.fault = lambda request: None
    hold.go_on.set()
    assert f"is saved in {place}; the same command resumes from there" in run.end(0)
    before = marked(gcs, place)
    gcs.fault = refuse("POST", "^run/15/state/")
    done = train(tmp_path / "bucket", *arguments, code=1)
    assert f"{place}: saving step 15 failed (" in done.stderr and "told to refuse" in done.stderr
    assert one_line(done.stderr) and set(marked(gcs, place)) - {10} <= set(before)
    gcs.fault = refuse("GET", "/record/metadata$")
    done = train(tmp_path / "bucket", *arguments, code=1)
    assert "cannot be read (" in done.stderr and one_line(done.stderr)
    gcs.fault = lambda request: None
    train(tmp_path / "bucket", *arguments)
    train(tmp_path / "local", MESH, "--config.checkpoint.every=5")
    assert learning(tmp_path / "bucket") == learning(tmp_path / "local")


@WHOLE_RUN
def test_a_run_ends_before_it_compiles_where_it_could_not_save(gcs, place, tmp_path):
    done = train(tmp_path, "--config.checkpoint.directory=gs://none/run", code=1)
    assert "gs://none/run: there is no such bucket" in done.stderr and one_line(done.stderr)
    assert "compiled" not in done.stdout
    gcs.fault = refuse("POST", "")
    done = train(tmp_path, f"--config.checkpoint.directory={place}", code=1)
    assert f"{place}: cannot write there (told to refuse)" in done.stderr and one_line(done.stderr)
    assert "compiled" not in done.stdout


@WHOLE_RUN
@pytest.mark.slow
def test_another_run_begins_with_the_parameters_in_a_bucket(place, tmp_path):
    train(tmp_path / "first", MESH, f"--config.checkpoint.directory={place}")
    done = train(tmp_path / "second", MESH, f"--init_from={place}", "--config.train.steps=2")
    assert f"parameters from step 20 of {place}" in done.stdout
    first, second = (reports(tmp_path / run)[1]["learning/loss"] for run in ("first", "second"))
    assert second < first - 0.5


def one_line(text: str) -> bool:
    """Except for TensorStore's lines about the test's credentials."""
    return len([line for line in text.splitlines() if "GOOGLE_AUTH_TOKEN" not in line]) == 1


def test_a_second_run_in_the_same_place_is_refused_and_harms_nothing(place, lines):
    first = Manager(place, KEEP, lines.append, owner="host:/a")
    first.save(1, arrays(seed=1), {})
    with pytest.raises(CheckpointError, match=rf"^{place}: host:/a is saving there"):
        Manager(place, KEEP, lines.append, owner="host:/b")
    first.close()
    second = Manager(place, KEEP, lines.append, owner="host:/b")
    assert same(second.restore_latest(want(arrays()), "stop").arrays, arrays(seed=1))
    second.close()


def stop_renewing(lease):
    lease._ended.set()
    lease._thread.join(30)


def age(gcs, place, seconds):
    gcs.updated[place.split("/")[2], "run/.lease"] -= seconds


def test_a_run_that_died_is_followed_by_itself_at_once_and_by_others_later(gcs, place):
    stop_renewing(Lease(place, "host:/a"))
    stop_renewing(Lease(place, "host:/a"))
    age(gcs, place, STALE_SECONDS - 60)
    with pytest.raises(CheckpointError, match="host:/a is saving there"):
        Lease(place, "host:/b")
    age(gcs, place, 120)
    Lease(place, "host:/b").release()
    Lease(place, "host:/c").release()


@pytest.mark.parametrize("seconds", [-86_400, 86_400])
def test_clocks_of_hosts_do_not_decide_whose_lease_it_is(gcs, place, monkeypatch, seconds):
    """The hosts' clocks are a day off the storage service's."""
    monkeypatch.setattr(gcs, "clock", lambda: time.time() + seconds)
    first = Lease(place, "host:/a")
    with pytest.raises(CheckpointError, match="host:/a is saving there"):
        Lease(place, "host:/b")
    stop_renewing(first)
    age(gcs, place, STALE_SECONDS + 60)
    Lease(place, "host:/b").release()


def test_a_run_whose_lease_was_taken_over_saves_no_more(gcs, place, lines):
    """It was suspended for longer than the lease lasts, and has not renewed it since."""
    first = Manager(place, KEEP, lines.append, owner="host:/a")
    first.save(1, arrays(seed=1), {})
    first.wait()
    age(gcs, place, STALE_SECONDS + 60)
    second = Manager(place, KEEP, lines.append, owner="host:/b")
    with pytest.raises(CheckpointError, match="host:/b is saving there"):
        first.save(2, arrays(seed=2), {})
    first.close()
    second.save(2, arrays(seed=2), {})
    second.close()
    assert Manager(place).steps() == [1, 2]


def test_a_renewal_whose_answer_was_lost_is_still_ours(gcs, place):
    lease = Lease(place, "host:/a")
    bucket = place.split("/")[2]
    gcs.put(bucket, "run/.lease", gcs.content(bucket, "run/.lease"))  # a new generation
    lease.check()
    lease.release()
    assert not gcs.names(bucket, "run/.lease")


def test_of_two_that_start_at_one_moment_one_gets_the_lease(place, monkeypatch):
    """Both read that there is no lease before either writes one."""
    read, both = Lease._read, threading.Barrier(2)

    def together(self):
        found = read(self)
        if found.generation == 0:
            both.wait(30)
        return found

    monkeypatch.setattr(Lease, "_read", together)
    got, refused = [], []

    def start(owner):
        try:
            got.append(Lease(place, owner))
        except CheckpointError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start, args=(owner,)) for owner in ("h:/a", "h:/b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(got) == len(refused) == 1, (got, refused)
    got[0].release()
