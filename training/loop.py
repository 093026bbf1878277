"""The loop. It never waits for the step that it has just dispatched, only for the one before."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax

from data.batch import Batch
from training.goodput import Goodput
from training.metrics import Writers
from training.profiler import Profiler
from training.report import Meter
from training.signals import Signals
from training.state import TrainState
from training.step import Metrics


class Saver(Protocol):
    """What the loop needs of checkpoints: made by train.py, which knows what else is saved."""

    def save(self, step: int, state: TrainState, score: float | None) -> None:
        """Starts saving a step; the state may be given up when this returns."""

    def check(self) -> None:
        """Raises if a save has failed."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """When things happen, in steps; 0: never (evaluation) or at the end only (checkpoints)."""

    steps: int
    log_every: int
    eval_every: int
    save_every: int


@dataclasses.dataclass
class Job:
    """Everything the loop turns. `votes` are the arrays for "go on" and "stop" (see step.py)."""

    plan: Plan
    state: TrainState
    start: int
    step: Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]
    votes: tuple[jax.Array, jax.Array]
    batches: Iterator[Batch]
    more: Callable[[], bool]  # whether `batches` has another one
    evaluate: Callable[[Any, Callable[[], None]], dict[str, float]]  # see Evaluator.__call__
    saver: Saver
    meter: Meter
    writers: Writers
    goodput: Goodput
    profiler: Profiler
    signals: Signals


@dataclasses.dataclass
class _Flying:
    """A step that was dispatched and not reported yet."""

    step: int
    metrics: Metrics
    data_wait: float  # seconds
    numbers: dict[str, Any] | None = None  # of the finished step, on the host


def run(job: Job) -> tuple[int, str]:
    """Trains to the plan's end. Returns the last step and why it was the last: "done", "data"
    (there was no more) or "signal". That step is saved; the save may still be under way.
    """
    step, why, flying = job.start, "", None
    job.goodput.switch("training")
    job.meter.start()
    while not why:
        if step >= job.plan.steps or _told_alone(job):
            why = "done" if step >= job.plan.steps else "signal"
            break
        batch, data_wait = _next_batch(job)
        if batch is None:
            why = "data"
            break
        step += 1
        job.profiler.before(step, asked=job.signals.take_profile())
        wish = job.votes[job.signals.stop is not None]
        with job.profiler.named(step):
            job.state, metrics = job.step(job.state, batch, wish)
        told = _finish(job, flying)  # the step before, while this one runs
        flying = _Flying(step, metrics, data_wait)
        _end_profile(job, flying)
        # All processes stop at one step: this vote is read in all at once, here or behind the next
        # dispatch, whatever a process does for itself, such as a trace.
        if told or _due(job.plan, step):
            last = step >= job.plan.steps or (not told and _data_ends(job))
            told = _finish(job, flying, last=last) or told
            flying = None
            why = "signal" if told else ""
        job.saver.check()
    _finish(job, flying, last=why == "data")
    _save(job, step)
    job.profiler.stop()
    return step, why


def _told_alone(job: Job) -> bool:
    """A single process need not wait for the others' votes."""
    return jax.process_count() == 1 and job.signals.stop is not None


def _next_batch(job: Job) -> tuple[Batch | None, float]:
    """The next batch, or None at the data's end, and the seconds waited for it."""
    began = time.perf_counter()
    with job.goodput.during("data"):
        batch = next(job.batches, None)
    return batch, time.perf_counter() - began


def _every(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _due(plan: Plan, step: int) -> bool:
    """Whether something happens between this step and the next that needs its result."""
    return step >= plan.steps or _every(step, plan.eval_every) or _every(step, plan.save_every)


def _data_ends(job: Job) -> bool:
    """Whether no batch follows the newest step's."""
    with job.goodput.during("data"):
        return not job.more()


def _wait(job: Job, flying: _Flying) -> dict[str, Any]:
    """Waits for a step; its numbers."""
    if flying.numbers is None:
        flying.numbers = job.meter.finish(flying.step, flying.metrics, flying.data_wait)
    return flying.numbers


def _end_profile(job: Job, flying: _Flying) -> None:
    """Ends a trace whose last step this is; the time that takes is no step's."""
    if job.profiler.ends_with(flying.step):
        _wait(job, flying)
        job.profiler.stop()
        job.meter.start()


def _finish(job: Job, flying: _Flying | None, *, last: bool = False) -> bool:
    """Waits for a step, reports it, and evaluates and saves where that is due, and at the `last`.

    Returns whether the processes agreed to stop.
    """
    if flying is None:
        return False
    plan, step = job.plan, flying.step
    numbers = _wait(job, flying)
    score = None
    evaluates = plan.eval_every > 0 and (last or _every(step, plan.eval_every))
    values = {}
    if evaluates:
        # Who tells a run to stop may soon kill it: the state is safe before a long evaluation ends,
        # at the price that this step has no score to be kept as the best by.
        if numbers["stop"]:
            _save(job, step)
        values = job.evaluate(job.state.params, lambda: _save_if_told(job, step))
        score = values["eval/loss"]
    if evaluates or last or _every(step, plan.log_every):
        values = job.meter.report(numbers) | values | job.goodput.metrics()
        job.writers.write(step, values)
        job.goodput.write()
    if last or _every(step, plan.save_every):
        _save(job, step, score)
    if last or _due(plan, step):
        job.meter.start()
    return bool(numbers["stop"])


def _save_if_told(job: Job, step: int) -> None:
    if _told_alone(job):
        _save(job, step)


def _save(job: Job, step: int, score: float | None = None) -> None:
    with job.goodput.during("checkpoint"):
        job.saver.save(step, job.state, score)
