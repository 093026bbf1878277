"""One run: build -> restore -> compile -> loop."""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from ml_collections import ConfigDict

from checkpoints.manager import CheckpointError, Manager
from data.batch import Batch
from model.mixers.registry import reads_positions
from training import devices, evaluation, restore
from training.build import Parts, build, describe
from training.evaluate import Evaluator
from training.lock import lock
from training.loop import PATIENCE_SECONDS, Cadence, TrainLoop
from training.metrics import Writers
from training.options import TrainOptions
from training.profiler import Profiler
from training.progress import elapsed
from training.report import Meter, NonFiniteError, compiled_peak_bytes
from training.signals import Signals
from training.state import TrainState, flatten
from training.step import Metrics, Votes, batch_shapes, make_train_step, make_votes
from training.tunables import Tunables, place

SAVE_SECONDS = PATIENCE_SECONDS
SLOWEST_SAVE = 20e6  # bytes per second


@dataclasses.dataclass(frozen=True)
class Saver:
    """Saves the state with what belongs to it: data position, config, time spent."""

    parts: Parts
    manager: Manager
    signals: Signals

    def save(self, step: int, state: TrainState, score: float | None) -> None:
        arrays, metadata = flatten(state), restore.metadata(self.parts)
        with saving(self.parts, self.signals):
            self.manager.save(step, arrays, metadata, score)

    def check(self) -> None:
        self.manager.check()

    def finish(self) -> None:
        with saving(self.parts, self.signals):
            self.manager.wait()


@contextlib.contextmanager
def saving(parts: Parts, signals: Signals) -> Iterator[None]:
    """A wait for a save. After a request to stop it has SAVE_SECONDS, and a second more for each
    SLOWEST_SAVE bytes of this process's share of the state; then the process ends in one line."""
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(parts.shapes))
    seconds = SAVE_SECONDS + size / jax.process_count() / SLOWEST_SAVE
    what = f"while a checkpoint was being saved, which is given up after {seconds:.0f} s"
    with signals.waiting(what, seconds):
        yield


def evaluate(config: ConfigDict, workdir: str, source: str, json_path: str) -> None:
    """Evaluates saved parameters; see evaluation.py. json_path: "" writes none."""
    primary = jax.process_index() == 0
    values = evaluation.evaluate(config, workdir, source, print if primary else lambda line: None)
    evaluation.write_json(json_path, values)


def run(config: ConfigDict, workdir: str, init_from: str, signals: Signals) -> None:
    """Trains to the end of the options' steps or of the data, or until a signal."""
    primary = jax.process_index() == 0

    def log(line: str) -> None:
        if primary:
            print(line, flush=True)

    parts = build(config, workdir)
    with contextlib.ExitStack() as stack:
        stack.callback(parts.loader.close)
        if primary:  # it alone writes to the folder itself
            stack.enter_context(lock(workdir, "--workdir"))
            # Another run may save into this folder from another workdir.
            folder = restore.checkpoint_folder(config.checkpoint.directory, workdir)
            if "://" not in folder and os.path.realpath(folder) != os.path.realpath(workdir):
                stack.enter_context(lock(folder, "config.checkpoint.directory", needed=False))
        log(describe(parts))
        _restore_and_train(parts, init_from, signals, log)


def _restore_and_train(
    parts: Parts, init_from: str, signals: Signals, log: Callable[[str], None]
) -> None:
    """Resumes or begins, trains the steps that are left, and waits for the last save."""
    manager, steps = restore.open_checkpoints(parts, log), parts.config.train.steps
    try:
        state, start = restore.first_state(parts, manager, init_from, log)
        if start < steps:
            _train(parts, manager, state, start, signals, evaluate_first=bool(init_from))
        else:
            log(
                f"step {start} of config.train.steps={steps} is done: nothing to train; try more "
                "steps, or another --workdir to start a new run"
            )
        with saving(parts, signals):
            manager.close()
    except Exception as error:
        # An earlier step's save may be under way. Where another process has died it cannot end.
        if isinstance(error, NonFiniteError) or jax.process_count() == 1:
            with contextlib.suppress(CheckpointError), saving(parts, signals):
                manager.close()
        raise


def _train(
    parts: Parts,
    manager: Manager,
    state: TrainState,
    start: int,
    signals: Signals,
    *,
    evaluate_first: bool,
) -> None:
    """Trains from step `start`, saves, and logs the results.

    evaluate_first: the parameters were given, so at step 0 they are evaluated before it.
    """
    steps = parts.config.train.steps
    writers = Writers(parts.workdir, start, steps, primary=jax.process_index() == 0)
    writers.hyperparameters(start, _flat(parts.config))
    writers.text(start, "config", f"```\n{parts.config}\n```")
    writers.text(start, "parameters", describe(parts))
    try:
        loop = make_loop(parts, manager, state, start, signals, writers)
        loop.evaluate_first = evaluate_first and start == 0 and parts.config.eval.every > 0
        step, stop_reason = loop.run()
        with parts.goodput.during("checkpoint"):
            loop.saver.finish()
        parts.goodput.write()
        _conclude(parts, step, stop_reason, signals, loop.evaluate, writers.log)
    finally:
        writers.close()


def _flat(config: ConfigDict) -> dict[str, int | float | str]:
    """{"train.steps": 20, ...}"""
    return {
        f"{group}.{name}": x for group, options in config.items() for name, x in options.items()
    }


def make_loop(
    parts: Parts,
    manager: Manager | None,
    state: TrainState,
    start: int,
    signals: Signals,
    writers: Writers,
) -> TrainLoop:
    """Compiles the step and ties the loop's pieces together. manager: None where nothing saves."""
    config, data = parts.config, parts.config.data
    step = _compile_step(parts, writers)
    evaluator = _make_evaluator(parts, signals)
    if config.eval.every:  # here, where a signal may end the wait
        evaluator.compile(parts.shapes.params, _batch_shapes(parts, windows=1))
    devices.wait_for_all("compiled")
    slots = data.global_batch_size * data.sequence_length * config.train.tbptt_windows
    return TrainLoop(
        cadence=Cadence(
            config.train.steps, config.log.every, config.eval.every, config.checkpoint.every
        ),
        state=state,
        start=start,
        step=step,
        votes=step.votes,
        batches=iter(parts.loader),
        ready=parts.loader.ready,
        error_ahead=parts.loader.error_ahead,
        more=parts.loader.has_more,
        progress=parts.loader.progress,
        evaluate=evaluator,
        saver=Saver(parts, manager, signals) if manager else NoSaver(),
        meter=Meter(
            slots,
            parts.model,
            compiled_peak_bytes(step.compiled),
            parts.progress,
            skip_nonfinite=config.train.skip_nonfinite,
        ),
        writers=writers,
        goodput=parts.goodput,
        profiler=Profiler(parts.workdir, config.profile.start, config.profile.steps, writers.log),
        signals=signals,
    )


class NoSaver:
    """For a loop without checkpoints."""

    def save(self, step: int, state: TrainState, score: float | None) -> None:
        pass

    def check(self) -> None:
        pass

    def finish(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """compiled: of `make_train_step`; it has no public type. votes: of this process. tunables: on
    the mesh."""

    compiled: Any
    votes: Votes
    tunables: Tunables

    def __call__(
        self, state: TrainState, batch: Batch, vote: jax.Array
    ) -> tuple[TrainState, Metrics]:
        done: tuple[TrainState, Metrics] = self.compiled(state, batch, vote, self.tunables)
        return done


def _make_evaluator(parts: Parts, signals: Signals) -> Evaluator:
    data = parts.config.data
    what = "while an evaluation was waiting for documents"
    return Evaluator(
        parts.model,
        parts.mesh,
        parts.validation,
        data.global_batch_size,
        parts.goodput,
        reads_bytes=data.tokenizer == "bytes",
        waiting=lambda: signals.waiting(what, PATIENCE_SECONDS),
    )


def _compile_step(parts: Parts, writers: Writers) -> CompiledStep:
    config = parts.config
    options = TrainOptions(**config.train)
    step = make_train_step(options, parts.model, parts.mesh, parts.make_optimizer, parts.shapes)
    votes, tunables = make_votes(parts.mesh), place(parts.tunables, parts.mesh)
    batch = _batch_shapes(parts, config.train.tbptt_windows)
    began = time.monotonic()
    with parts.goodput.during("compilation"), elapsed("compiling", writers.log):
        compiled = step.lower(parts.shapes, batch, votes[0], tunables).compile()
    writers.log(f"compiled in {time.monotonic() - began:.1f} s")
    return CompiledStep(compiled, votes, tunables)


def _batch_shapes(parts: Parts, windows: int) -> Batch:
    data = parts.config.data
    return batch_shapes(
        parts.mesh,
        windows,
        data.global_batch_size,
        data.sequence_length,
        positions=reads_positions(parts.model),
    )


def _conclude(
    parts: Parts,
    step: int,
    stop_reason: str,
    signals: Signals,
    evaluator: Callable[..., dict[str, float]],
    log: Callable[[str], None],
) -> None:
    """The lines at a run's end."""
    folder = restore.checkpoint_folder(parts.config.checkpoint.directory, parts.workdir)
    log(parts.loader.summary())
    if isinstance(evaluator, Evaluator) and evaluator.last and evaluator.gzip:
        bits, size = evaluator.gzip
        log(
            f"validation: {evaluator.last['eval/bits_per_byte']:.4f} bits/byte; "
            f"gzip -9 on the same {size:,} bytes: {bits:.4f}"
        )
    if stop_reason == "data":
        log(f"the data ended (config.data.epochs={parts.config.data.epochs})")
    stopped = stop_reason == "signal"
    reason = f"stopped by {signals.stop or 'a signal to another process'}; " if stopped else ""
    on = "; the same command resumes from there" if stopped else ""
    log(f"{reason}step {step} is saved in {folder}{on}")
