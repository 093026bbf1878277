"""The training loop: it dispatches a step and waits for the one before, never for the newest."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

import jax

from data.batch import Batch
from errors import DataError
from model.axes import Arrays as Params
from training.goodput import Goodput
from training.metrics import Writers
from training.profiler import Profiler
from training.report import Meter, Numbers
from training.signals import Signals
from training.state import TrainState
from training.step import NO_DATA, Metrics, Votes

_POLL_SECONDS = 0.5
PATIENCE_SECONDS = 8.0  # how long a process that was asked to stop waits for the others


class Saver(Protocol):
    """What the loop needs of checkpoints: made by run.py, which knows what else is saved."""

    def save(self, step: int, state: TrainState, score: float | None) -> None:
        """Starts saving a step; the state may be given up when this returns."""

    def check(self) -> None:
        """Raises if a save has failed."""

    def finish(self) -> None:
        """Waits for the save; raises if it has failed."""


StopReason = Literal["done", "data", "signal"]  # the steps are done, no more data, a signal


@dataclasses.dataclass(frozen=True)
class Cadence:
    """When things happen, in steps; 0: never (evaluation) or at the end only (checkpoints)."""

    steps: int
    log_every: int
    eval_every: int
    save_every: int

    def evaluates(self, step: int) -> bool:
        return _every(step, self.eval_every)

    def saves(self, step: int) -> bool:
        return _every(step, self.save_every)

    def logs(self, step: int) -> bool:
        return _every(step, self.log_every)

    def interrupts(self, step: int) -> bool:
        """Whether something after this step needs its result before the next is dispatched."""
        return step >= self.steps or self.evaluates(step) or self.saves(step)


@dataclasses.dataclass
class InFlightStep:
    """A step that was dispatched and not reported yet."""

    step: int
    metrics: Metrics
    data_wait: float  # seconds
    data: dict[str, float]  # how far the training documents were read, with this step
    numbers: Numbers | None = None  # of the finished step, on the host
    reported: bool = False


@dataclasses.dataclass
class TrainLoop:
    """The state and everything that a step needs, is measured by, or is reported to.

    Attributes:
        ready: waits up to the given seconds for the next batch; whether it, or the end, is there.
        error_ahead: see `Loader.error_ahead`; called only if there are several processes.
        more: whether `batches` has another one. progress: values to log of what was read.
        evaluate: see `Evaluator.__call__`. evaluate_first: also before the first step.
    """

    cadence: Cadence
    state: TrainState
    start: int
    step: Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]
    votes: Votes
    batches: Iterator[Batch]
    ready: Callable[[float], bool]
    error_ahead: Callable[[float], tuple[bool, BaseException | None]]
    more: Callable[[], bool]
    progress: Callable[[], dict[str, float]]
    evaluate: Callable[[Params, Callable[[], None]], dict[str, float]]
    saver: Saver
    meter: Meter
    writers: Writers
    goodput: Goodput
    profiler: Profiler
    signals: Signals
    evaluate_first: bool = False
    _longest_wait: float = 0.0  # seconds, for a step
    _newest: InFlightStep | None = None  # dispatched
    _data_error: DataError | None = None  # of a batch that has not been asked for yet
    _all_know: bool = False  # that a process has no more data: all end together

    def run(self) -> tuple[int, StopReason]:
        """Trains to the end. Returns the last step and why it was the last. That step is saved; the
        save may still be running.

        Raises:
            DataError: no batch can be made any more. The last step has been saved, unless it is
                that of the first two batches of one of several processes.
        """
        try:
            return self._run()
        except DataError:
            # If the others do not know of it, they are already in the next step and cannot save.
            if self._newest and (self._all_know or jax.process_count() == 1):
                self._report(self._newest, {})
                self._save(self._newest.step)
                self.saver.finish()
            raise

    def _run(self) -> tuple[int, StopReason]:
        step, in_flight = self.start, None
        stop_reason: StopReason | None = None
        self.goodput.switch("training")
        self.signals.started()
        if self.evaluate_first:
            self._report_first()
        self.meter.start()
        while stop_reason is None:
            if step >= self.cadence.steps or self._stops_alone():
                stop_reason = "done" if step >= self.cadence.steps else "signal"
                break
            batch, data_wait = self._next_batch()
            if batch is None:
                stop_reason = "signal" if self._stops_alone() else "data"
                break
            step += 1
            dispatched = self._dispatch(step, batch, data_wait)
            agreed = self._finish(in_flight)  # the step before, while this one runs
            self._end_without_data(agreed)
            in_flight = dispatched
            self._end_profile(in_flight)
            # All processes must stop at the same step, so every process reads this vote here,
            # whatever else it does by itself, such as a trace.
            if agreed or self.cadence.interrupts(step):
                last = step >= self.cadence.steps or (not agreed and self._data_ends())
                agreed = self._finish(in_flight, last=last) or agreed
                self._end_without_data(agreed)
                in_flight = None
                stop_reason = "signal" if agreed else None
            self.saver.check()
        self._finish(in_flight, last=stop_reason == "data")
        self._save(step)
        self.profiler.stop()
        return step, stop_reason

    def _dispatch(self, step: int, batch: Batch, data_wait: float) -> InFlightStep:
        self.profiler.before(step, asked=self.signals.take_profile())
        vote = self._vote()
        with self.profiler.named(step):
            self.state, metrics = self.step(self.state, batch, vote)
        self._newest = InFlightStep(step, metrics, data_wait, self.progress())
        return self._newest

    def _vote(self) -> jax.Array:
        if jax.process_count() > 1 and self._data_error is None:
            self._data_error = self._await_error_ahead()
        if self._data_error:
            return self.votes.no_data
        return self.votes.stop if self.signals.stop else self.votes.proceed

    def _await_error_ahead(self) -> DataError | None:
        known, error = self.error_ahead(0.0)
        if not known:
            with self.signals.waiting("while waiting for data", PATIENCE_SECONDS):
                while not known:
                    known, error = self.error_ahead(_POLL_SECONDS)
        return error if isinstance(error, DataError) else None

    def _end_without_data(self, agreed: int) -> None:
        """Raises DataError, in all processes, if one of them will have no further batch."""
        if agreed >= NO_DATA:
            self._all_know = True
            raise self._data_error or DataError(
                f"process {agreed - NO_DATA} can no longer read its documents, as its own line "
                f"says; step {self._newest.step if self._newest else self.start} is saved"
            )

    def _stops_alone(self) -> bool:
        """A single process need not wait for the others' votes."""
        return jax.process_count() == 1 and self.signals.stop is not None

    def _next_batch(self) -> tuple[Batch | None, float]:
        """The next batch and the seconds waited for it; None instead of a batch at the end of the
        data, or if a signal ends the wait."""
        began = time.perf_counter()
        with self.goodput.during("data"):
            batch = next(self.batches, None) if self._data_ready() else None
        return batch, time.perf_counter() - began

    def _data_ready(self) -> bool:
        """Waits for the next batch or the end of the data; False if a signal ended the wait."""
        if self.ready(0.0):
            return True
        # Several processes cannot agree to save here, since the others may be in the next step.
        patience = math.inf if jax.process_count() == 1 else PATIENCE_SECONDS
        with self.signals.waiting("while waiting for data", patience):
            while not self.ready(_POLL_SECONDS):
                if self._stops_alone():
                    return False
        return True

    def _data_ends(self) -> bool:
        """Whether no batch follows the newest step's."""
        with self.goodput.during("data"):
            return self._data_ready() and not self.more()

    def _wait(self, in_flight: InFlightStep) -> Numbers:
        """Waits for a step; its numbers."""
        if in_flight.numbers is None:
            began = time.perf_counter()
            with self._waiting_for_step():
                in_flight.numbers = self.meter.finish(
                    in_flight.step, in_flight.metrics, in_flight.data_wait
                )
            self._longest_wait = max(self._longest_wait, time.perf_counter() - began)
        return in_flight.numbers

    def _waiting_for_step(self) -> contextlib.AbstractContextManager[None]:
        """A single process's step always ends; one of several may wait for a stuck process."""
        if jax.process_count() == 1:
            return contextlib.nullcontext()
        return self.signals.waiting(
            "while waiting for a step of all processes", PATIENCE_SECONDS + 2 * self._longest_wait
        )

    def _end_profile(self, in_flight: InFlightStep) -> None:
        """Ends a trace after its last step; the time this takes is not counted as a step's."""
        if self.profiler.ends_with(in_flight.step):
            self._wait(in_flight)
            self.profiler.stop()
            self.meter.start()

    def _finish(self, in_flight: InFlightStep | None, *, last: bool = False) -> int:
        """Waits for a step, reports it, and evaluates and saves where that is due, and at the last.

        Returns what the processes agreed on with it: 0, or one of their `Votes`.
        """
        if in_flight is None:
            return 0
        step, stops = in_flight.step, int(self._wait(in_flight)["stop"])
        values: dict[str, float] = {}
        if self.cadence.eval_every > 0 and (last or self.cadence.evaluates(step)):
            values = self._evaluate(step, stops)
        score = values.get("eval/loss")
        if values or last or self.cadence.logs(step):
            self._report(in_flight, values)
        if last or self.cadence.saves(step):
            self._save(step, score)
        if last or self.cadence.interrupts(step):
            self.meter.start()
        return stops

    def _report(self, in_flight: InFlightStep, values: dict[str, float]) -> None:
        """Writes what is known of a step, once."""
        if not in_flight.reported:
            self._wait(in_flight)
            learning = self.meter.report() | in_flight.data
            with self.signals.waiting("while reports were being written", PATIENCE_SECONDS):
                self.writers.write(in_flight.step, learning | values | self.goodput.metrics())
                self.goodput.write()
            in_flight.reported = True

    def _report_first(self) -> None:
        """Evaluates the parameters that training starts from; the values are those of that step."""
        values = self._evaluate(self.start, 0)
        with self.signals.waiting("while reports were being written", PATIENCE_SECONDS):
            self.writers.write(self.start, values | self.goodput.metrics())

    def _evaluate(self, step: int, stops: int) -> dict[str, float]:
        # SIGKILL may follow SIGTERM, so save before evaluating. The price: this step is saved
        # without a score, so it cannot be kept as the best.
        if stops:
            self._save(step)
        try:
            return self.evaluate(self.state.params, lambda: self._save_if_stopping(step))
        except DataError:
            self._all_know = True  # the evaluator tells all processes
            raise

    def _save_if_stopping(self, step: int) -> None:
        if self._stops_alone():
            self._save(step)
            self.saver.finish()  # the process may be killed while the evaluation waits

    def _save(self, step: int, score: float | None = None) -> None:
        with self.goodput.during("checkpoint"):
            self.saver.save(step, self.state, score)


def _every(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
