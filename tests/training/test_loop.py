"""The loop alone, with stand-ins for everything that it calls."""

import contextlib
import itertools

import pytest

from errors import DataError
from tests.model_cases import KDA
from tests.training.step_numbers import numbers
from training import loop
from training.goodput import Goodput
from training.report import Meter, Progress
from training.step import NO_DATA, Votes


class Stub:
    """Records the calls, in the order of the whole run."""

    def __init__(self, steps=100, log=1, evals=0, saves=0, batches=100, trace_ends=None, vote=None):
        self.events = []
        self.trace_ends, self.vote, self.left = trace_ends, vote, batches
        self.told_in_batch, self.stuck_after = None, None
        note = self.events.append
        meter, writers, profiler, saver, signals = (type("", (), {})() for _ in range(5))
        meter.start = lambda: note("idle")
        self.error_ahead, self.fails_at, self.votes = None, None, {}
        meter.finish = lambda step, metrics, wait: {"stop": self.votes.get(step, step == self.vote)}
        meter.report = lambda: {}
        writers.write = lambda step, values: note(("report", step, "eval/loss" in values))
        profiler.before = lambda step, asked: None
        profiler.named = lambda step: contextlib.nullcontext()
        profiler.ends_with = lambda step: step == self.trace_ends
        profiler.stop = lambda: note("trace")
        saver.save = lambda step, state, score: note(("save", step, score))
        saver.check = lambda: None
        saver.finish = lambda: note(("finish",))
        signals.stop, signals.take_profile = None, lambda: False
        signals.started = lambda: None
        signals.waiting = lambda what, seconds: contextlib.nullcontext()
        counter = itertools.count(1)

        def step(state, batch, vote):
            number = next(counter)
            note(("step", number))
            if vote >= NO_DATA or number == self.fails_at:
                self.votes[number] = max(vote, NO_DATA + (number == self.fails_at))
            return type("", (), {"params": None})(), {}

        self.loop = loop.TrainLoop(
            cadence=loop.Cadence(steps, log, evals, saves),
            state=None,
            start=0,
            step=step,
            votes=Votes(0, 1, NO_DATA),
            batches=self._batches(),
            error_ahead=lambda seconds: (True, self.error_ahead),
            ready=lambda seconds: self.stuck_after is None or self.left > self.stuck_after,
            more=lambda: self.left > 0,
            progress=lambda: {"learning/epoch": 0.5},
            evaluate=self._evaluate,
            saver=saver,
            meter=meter,
            writers=writers,
            goodput=Goodput(),
            profiler=profiler,
            signals=signals,
        )

    def _evaluate(self, params, between):
        for batch in range(3):
            if batch == self.told_in_batch:
                self.loop.signals.stop = "SIGTERM"
            between()
            self.events.append(("evaluated", batch))
        return {"eval/loss": 0.5}

    def _batches(self):
        while self.left:
            self.left -= 1
            yield object()

    def of(self, kind):
        return [event for event in self.events if event[0] == kind]


@pytest.mark.parametrize("saves", [0, 1, 7])
@pytest.mark.parametrize("log", [1, 50])
def test_the_last_step_is_evaluated_and_saved_with_its_score_where_the_data_ends(saves, log):
    stub = Stub(log=log, evals=50, saves=saves, batches=7)
    assert stub.loop.run() == (7, "data")
    assert [event for event in stub.of("report") if event[2]] == [("report", 7, True)]
    assert next(event for event in stub.of("save") if event[1] == 7) == ("save", 7, 0.5)
    steps = [event[1] for event in stub.of("report")]
    assert steps == (list(range(1, 8)) if log == 1 else [7])


@pytest.mark.parametrize("saves", [0, 7])
@pytest.mark.parametrize("trace_ends", [None, 6, 7, 8])
def test_processes_stop_at_one_step_whatever_one_of_them_traces(monkeypatch, saves, trace_ends):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    stub = Stub(saves=saves, trace_ends=trace_ends, vote=7)
    assert stub.loop.run() == (7 if saves else 8, "signal")


def test_a_vote_to_stop_just_before_the_end_leaves_the_last_evaluation_in_place():
    stub = Stub(steps=9, evals=50, vote=8)
    assert stub.loop.run()[0] == 9
    assert stub.of("report")[-1] == ("report", 9, True) and stub.of("save")[0] == ("save", 9, 0.5)


def test_the_time_of_ending_a_trace_is_no_steps():
    stub = Stub(steps=9, trace_ends=5)
    stub.loop.run()
    at = stub.events.index("trace")
    assert stub.events[at - 1] != "idle" and stub.events[at + 1] == "idle"
    assert stub.of("step") == [("step", n) for n in range(1, 10)]


def test_step_times_are_all_of_training_and_of_waiting_for_data(monkeypatch):
    """With a simulated clock: the time of evaluations and saves is in no step's time."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stub, times = Stub(steps=20, evals=10, saves=5), []
    job = stub.loop
    goodput, step, evaluate, batches = job.goodput, job.step, job.evaluate, job.batches
    job.meter = meter = Meter(256, KDA, None, Progress(), skip_nonfinite=False)
    finish = meter.finish

    def takes(seconds, result=None):
        now[0] += seconds
        return result

    def evaluated(*args):
        with goodput.during("evaluation"):
            return takes(100, evaluate(*args))

    meter.finish = lambda *args: finish(*args, *takes(3, ()))
    job.step = lambda *args: takes(2, (step(*args)[0], numbers(tokens=256)))
    job.batches = (takes(1, batch) for batch in batches)
    job.evaluate = evaluated
    job.saver.save = lambda *args: takes(50)
    job.writers.write = lambda step, values: times.append(values["perf/step_time_seconds"])
    job.run()
    seconds = goodput.seconds()
    assert len(times) == 20 and sum(times) == 120
    assert (seconds["training"], seconds["data"]) == (100, 20)
    assert seconds["evaluation"] == 200 and seconds["checkpoint"] == 250


def test_told_to_stop_in_an_evaluation_saves_first_and_goes_on_with_it():
    stub = Stub(evals=3)
    stub.told_in_batch = 1
    assert stub.loop.run() == (3, "signal")
    at = [stub.events.index(("evaluated", n)) for n in range(3)]
    first = stub.events.index(("save", 3, None))
    assert stub.events[first + 1] == ("finish",), "on disk before the evaluation continues"
    assert at[0] < first < at[1] and stub.of("report")[-1] == ("report", 3, True)


def test_a_vote_to_stop_saves_before_a_due_evaluation():
    stub = Stub(evals=3, vote=3)
    assert stub.loop.run() == (3, "signal")
    assert stub.events.index(("save", 3, None)) < stub.events.index(("evaluated", 0))


def test_told_to_stop_while_waiting_for_data_the_last_step_is_saved():
    """Of ten batches five arrive; the others never do."""
    stub = Stub(batches=10)
    stub.stuck_after = 5
    polls = itertools.count()
    ready = stub.loop.ready

    def told_in_the_third_poll(seconds):
        if not ready(seconds) and next(polls) == 2:
            stub.loop.signals.stop = "SIGTERM"
        return ready(seconds)

    stub.loop.ready = told_in_the_third_poll
    assert stub.loop.run() == (5, "signal")
    assert stub.of("report")[-1][1] == 5 and stub.of("save")[-1][1] == 5


def test_a_request_to_stop_can_end_a_wait_for_reports_to_be_written():
    """As on a network file system that hangs."""
    stub, active, seen = Stub(steps=2), [], []

    @contextlib.contextmanager
    def waiting(what, seconds):
        active.append((what, seconds))
        yield
        active.pop()

    stub.loop.signals.waiting = waiting
    stub.loop.writers.write = lambda step, values: seen.extend(active)
    stub.loop.run()
    assert seen == [("while reports were being written", loop.PATIENCE_SECONDS)] * 2


@pytest.mark.parametrize(("log", "saves"), [(1, 0), (50, 0), (1, 6), (50, 6)])
@pytest.mark.parametrize("processes", [1, 2])
def test_data_that_fail_leave_the_last_step_reported_and_saved(monkeypatch, log, saves, processes):
    """Once each, whether or not it was due; not where other processes do not know of it."""
    stub = Stub(log=log, saves=saves)

    def batches():
        yield from [object()] * 6
        raise DataError("a file has changed")

    stub.loop.batches = batches()
    monkeypatch.setattr("jax.process_count", lambda: processes)
    with pytest.raises(DataError, match="a file has changed"):
        stub.loop.run()
    assert len(stub.of("step")) == 6
    if processes == 1:
        assert stub.of("report")[-1] == ("report", 6, False)
        assert stub.events[-2:] == [("save", 6, None), ("finish",)]
    else:
        assert len(stub.of("save")) == (saves == 6) and not stub.of("finish")
    steps = [event[1] for event in stub.of("report")]
    assert len(steps) == len(set(steps))


@pytest.mark.parametrize(("ours", "saves"), [(True, 0), (False, 0), (True, 1), (False, 1)])
def test_all_processes_save_the_same_step_where_the_data_of_one_fail(monkeypatch, ours, saves):
    """The one that fails says so with step 5, when batch 6 is there and batch 7 will not come; it
    is heard after step 6 was dispatched, or before where something is due after step 5."""
    stub = Stub(saves=saves)
    error = DataError("a file has changed")

    def error_ahead(seconds):
        return True, error if ours and len(stub.of("step")) == 4 else None

    stub.loop.error_ahead = error_ahead
    stub.fails_at = None if ours else 5  # in the other process, number 1
    monkeypatch.setattr("jax.process_count", lambda: 2)
    says = "a file has changed" if ours else "process 1 can no longer read .* step [56] is saved"
    with pytest.raises(DataError, match=says):
        stub.loop.run()
    last = 5 if saves else 6
    assert len(stub.of("step")) == last
    assert stub.of("report")[-1] == ("report", last, False)
    assert stub.events[-2:] == [("save", last, None), ("finish",)]


def test_data_that_fail_at_once_leave_nothing_to_save():
    stub = Stub()

    def batches():
        raise DataError("a file has changed")
        yield

    stub.loop.batches = batches()
    with pytest.raises(DataError):
        stub.loop.run()
    assert not stub.of("save")
