"""Trains a model: python train.py --config configs/kda_cp4.py [--config.train.steps=20 ...]

The same command again goes on from the last checkpoint. A mistake in options or data ends with one
line on stderr and exit code 2, a failure of the run with one line and exit code 1.

JAX and what needs it are imported inside functions: a mistake is told at once, and JAX must not
start before it is said which devices to use.
"""

import contextlib
import dataclasses
import errno
import math
import os
import socket
import sys
import time
import traceback
from typing import Any

from configs import base
from configs import flags as command_line
from errors import TrainerError, UserError
from training import devices, process
from training.estimate import command
from training.signals import Signals

# What writing to an open file fails with, which does not know its name.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: list[str]) -> int:
    """Runs to the end of the training, or to a signal; returns the exit code."""
    process.open_streams()
    process.quiet_libraries()
    signals = Signals()  # first of all: a process that is starting can be told to stop as well
    try:
        config, flags = command_line.parse(argv)
        base.check(config)
    except UserError as error:
        return fail(error, error.exit_code)
    try:
        if flags.plan:
            return command.run(config, flags.plan, flags.plan_json)
        start_jax(config, flags)
        return train(config, flags, signals)
    except SystemExit:
        raise
    except TrainerError as error:
        return fail(error, error.exit_code)
    except Exception as error:
        # Of packages whose mistakes in options are not a class yet.
        mistake = str(error).startswith(("config.", "--"))
        return fail(error, 2) if isinstance(error, ValueError) and mistake else failed(error)


def fail(error: object, code: int) -> int:
    """One line on stderr."""
    print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
    return code


def failed(error: Exception) -> int:
    """A failure while running: one line where its kind is known, else the traceback."""
    from checkpoints.manager import first_line

    if isinstance(error, BrokenPipeError):
        # What is left to write goes nowhere, or the interpreter would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return fail(
            "stdout: whoever read it has gone; the steps saved before are untouched; "
            "the same command goes on, try it with > log.txt",
            1,
        )
    if isinstance(error, OSError) and (error.filename or error.errno in DISK):
        where = error.filename or "--workdir"
        return fail(
            f"{where}: {error.strerror}; the steps saved before are untouched; "
            "try freeing space, or another --workdir",
            1,
        )
    import jax

    if isinstance(error, jax.errors.JaxRuntimeError) and out_of_memory(str(error)):
        return fail(
            f"a device's memory is too small ({first_line(error)}); try "
            "config.train.grad_accum_steps, config.model.remat=full, a smaller "
            "config.data.global_batch_size, or a "
            "larger config.mesh.fsdp or config.mesh.context",
            1,
        )
    if isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
        return fail(
            f"process {jax.process_index()}: a step failed, as it does when another process has "
            f"died ({first_line(error)}); start all processes again to go on from the last "
            "checkpoint",
            1,
        )
    traceback.print_exception(error)
    return 1


def out_of_memory(text: str) -> bool:
    """Whether a failure of XLA's is about memory; it says so in one of two ways."""
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


def start_jax(config: Any, flags: Any) -> None:
    """Chooses devices, before JAX looks for any; see training/devices.py."""
    processes = devices.Processes(flags.coordinator, flags.processes, flags.process_id)
    devices.start_jax(math.prod(config.mesh.values()), config.train.compilation_cache, processes)


@dataclasses.dataclass
class Parts:
    """What a run is made of, before anything is compiled."""

    config: Any
    workdir: str
    mesh: Any  # jax.sharding.Mesh
    model: Any  # model.config.ModelConfig
    loader: Any  # data.loader.Loader of the training documents
    validation: Any  # and of the held-out ones
    optimizer: Any
    schedule: Any
    shapes: Any  # training.state.TrainState of jax.ShapeDtypeStruct
    goodput: Any


def build(config: Any, workdir: str) -> Parts:
    """Raises ValueError: one line, naming an option that cannot work with these data or devices."""
    import jax
    import psutil

    from data.loader import make_loader
    from data.options import DataConfig
    from model.checks import check_mesh
    from training.goodput import Goodput
    from training.optimizer import OptimizerConfig, make_optimizer, make_schedule
    from training.state import state_shapes

    age = time.time() - psutil.Process().create_time()
    path = os.path.join(workdir, "goodput.json") if jax.process_index() == 0 else ""
    goodput = Goodput(path, age)
    mesh = devices.make_mesh(config.mesh)
    data = DataConfig(**config.data)
    seed, windows = config.train.seed, config.train.tbptt_windows
    loader = make_loader(data, split="train", mesh=mesh, seed=seed, windows=windows)
    limit = config.eval.batches
    validation = make_loader(data, split="eval", mesh=mesh, seed=seed, max_batches=limit)
    model = model_config(config, loader.tokenizer.vocab_size)
    check_mesh(model, mesh.shape)
    options = dict(config.optimizer)
    options["schedule_steps"] = options["schedule_steps"] or config.train.steps
    optimizer = make_optimizer(OptimizerConfig(**options), model, mesh)
    shapes = state_shapes(model, mesh, optimizer, data.global_batch_size, config.train.spike_window)
    schedule = make_schedule(OptimizerConfig(**options))
    return Parts(
        config, workdir, mesh, model, loader, validation, optimizer, schedule, shapes, goodput
    )


def describe(parts: Parts) -> str:
    """What is trained on what, in one line."""
    import jax

    from model.params import param_count

    data, mesh = parts.config.data, parts.mesh.shape
    return (
        f"{param_count(parts.model):,} parameters on {jax.device_count()} x "
        f"{jax.devices()[0].device_kind} ({', '.join(f'{k} {n}' for k, n in mesh.items())}); "
        f"a step takes {data.global_batch_size} rows x {data.sequence_length} tokens"
        + (f" x {n} windows" if (n := parts.config.train.tbptt_windows) > 1 else "")
    )


def model_config(config: Any, vocab_size: int) -> Any:
    """config.model as the frozen record that the model takes."""
    import jax

    from model.config import ModelConfig
    from options import wrong

    options = dict(config.model)
    given = options.pop("vocab_size")
    if given and given < vocab_size:
        needs = f"0 or at least the tokenizer's {vocab_size} ids"
        raise wrong("config.model.vocab_size", given, needs, 0)
    if options["kda_implementation"] == "mosaic_tpu" and jax.default_backend() != "tpu":
        raise UserError(
            "config.model.kda_implementation='mosaic_tpu': needs a TPU; there is "
            f"{jax.devices()[0].device_kind}; try auto"
        )
    return ModelConfig(vocab_size=given or vocab_size, **options)


def open_checkpoints(parts: Parts, say: Any) -> Any:
    """The manager of this run's checkpoints."""
    from checkpoints.manager import Manager
    from checkpoints.retention import Retention

    options = parts.config.checkpoint
    retention = Retention(options.keep_last, options.keep_every, options.keep_best)
    owner = f"{socket.gethostname()}:{os.path.abspath(parts.workdir)}"
    return Manager(
        checkpoint_folder(options.directory, parts.workdir),
        retention,
        say,
        verify=options.verify,
        owner=owner,
    )


def checkpoint_folder(directory: str, workdir: str) -> str:
    """An absolute path, or one with a scheme such as gs:// as it is."""
    folder = directory or os.path.join(workdir, "checkpoints")
    return folder if "://" in folder else os.path.abspath(folder)


def first_state(parts: Parts, manager: Any, init_from: str, say: Any) -> tuple[Any, int]:
    """(state, steps done): from the newest checkpoint, or --init_from, or the seed."""
    from training import goodput
    from training.state import flatten, init_state, unflatten

    restored = manager.restore_latest(
        lambda facts: resume_target(parts, facts, say), parts.config.checkpoint.damaged
    )
    if restored is not None:
        manager.move_broken(restored.step)
        lived = goodput.read(os.path.join(parts.workdir, "goodput.json"))
        parts.goodput.resume(restored.facts["goodput"], lived)
        say(f"resumed from step {restored.step} of {manager.directory}")
        return unflatten(parts.shapes, filled(parts, restored.arrays)), restored.step
    train, data = parts.config.train, parts.config.data
    state = init_state(
        parts.model,
        parts.mesh,
        parts.optimizer,
        data.global_batch_size,
        train.spike_window,
        train.seed,
    )
    if init_from:
        arrays = {**flatten(state), **other_parameters(parts, init_from, say)}
        state = unflatten(state, arrays)
    return state, 0


def resume_target(parts: Parts, facts: dict[str, Any], say: Any) -> dict[str, Any]:
    """The arrays to restore. Moves the loader to the checkpoint's position.

    Raises:
        CheckpointError: of another model; or of other data, with
            config.data.on_data_change="refuse".
    """
    from checkpoints.manager import CheckpointError
    from training import resume
    from training.state import flatten

    found = resume.differences(facts["config"], parts.config.to_dict())
    advice = "try the config that wrote it, or another --workdir"
    if found.model:
        raise CheckpointError(f"the checkpoint is of another model: {found.model[0]}; {advice}")
    if found.state:
        folder = checkpoint_folder(parts.config.checkpoint.directory, parts.workdir)
        raise CheckpointError(
            f"the checkpoint's state is of another kind: {found.state[0]}; {advice}, with "
            f"--init_from={folder} to start from its parameters"
        )
    if found.other:
        say("changed since the checkpoint: " + "; ".join(found.other))
    wanted = flatten(parts.shapes)
    try:
        changed = parts.loader.restore(facts["data"])
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if not changed:
        return wanted
    say(f"{changed}; the carried state starts empty")
    return {name: array for name, array in wanted.items() if not name.startswith("carry/")}


def filled(parts: Parts, arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays, with an empty carry where none was restored."""
    from training.state import empty_carry, flatten

    if flatten(parts.shapes).keys() == arrays.keys():
        return arrays
    carry = empty_carry(parts.model, parts.mesh, parts.config.data.global_batch_size)()
    return {**arrays, **flatten({"carry": carry})}


def other_parameters(parts: Parts, workdir: str, say: Any) -> dict[str, Any]:
    """The parameters of another run's newest whole checkpoint."""
    from checkpoints.manager import CheckpointError, Manager
    from training import resume
    from training.state import flatten

    def target(facts: dict[str, Any]) -> dict[str, Any]:
        found = resume.differences(facts["config"], parts.config.to_dict())
        if found.model:
            raise CheckpointError(f"another model, {found.model[0]}")
        if facts["data"]["data"]["tokenizer"] != parts.loader.tokenizer.fingerprint:
            raise CheckpointError(
                "its tokens mean something else: config.data.tokenizer was "
                f"{facts['config']['data']['tokenizer']!r} there"
            )
        return {n: a for n, a in flatten(parts.shapes).items() if n.startswith("params/")}

    inner = checkpoint_folder("", workdir)
    folder = inner if os.path.isdir(inner) else checkpoint_folder(workdir, "")
    try:
        damaged = parts.config.checkpoint.damaged
        restored = Manager(folder, None, say).restore_latest(target, damaged)
    except CheckpointError as error:
        raise CheckpointError(f"--init_from={workdir}: {error}") from None
    if restored is None:
        raise CheckpointError(f"--init_from={workdir}: there is no checkpoint in {folder}")
    say(f"parameters from step {restored.step} of {folder}")
    return restored.arrays


@dataclasses.dataclass
class Saver:
    """Saves the state with what belongs to it: data position, config, time spent."""

    parts: Parts
    manager: Any

    def save(self, step: int, state: Any, score: float | None) -> None:
        from training.state import flatten

        facts = {
            "config": self.parts.config.to_dict(),
            "data": self.parts.loader.state(),
            "goodput": self.parts.goodput.seconds(),
        }
        self.manager.save(step, flatten(state), facts, score)

    def check(self) -> None:
        self.manager.check()


def train(config: Any, flags: Any, signals: Signals) -> int:
    """Builds, resumes, compiles, trains and saves. Returns the exit code."""
    import jax

    from training.lock import lock

    name = command_line.config_name(flags["config"].config_filename)
    workdir = flags.workdir or os.path.join("runs", name)
    primary = jax.process_index() == 0

    def say(line: str) -> None:
        if primary:
            print(line, flush=True)

    parts = build(config, workdir)
    with contextlib.ExitStack() as stack:
        stack.callback(parts.loader.close)
        if primary:  # it alone writes to the folder itself
            stack.enter_context(lock(workdir, "--workdir"))
            if (own := config.checkpoint.directory) and "://" not in own:
                stack.enter_context(lock(own, "config.checkpoint.directory", needed=False))
        say(describe(parts))
        train_from_last(parts, flags.init_from, signals, say)
    return 0


def train_from_last(parts: Parts, init_from: str, signals: Signals, say: Any) -> None:
    """Resumes or begins, runs what is left of the steps, and waits for the last save."""
    import jax

    from checkpoints.manager import CheckpointError
    from training.report import NonFiniteError

    manager, steps = open_checkpoints(parts, say), parts.config.train.steps
    try:
        state, start = first_state(parts, manager, init_from, say)
        if start < steps:
            run(parts, manager, state, start, signals)
        else:
            say(
                f"step {start} of config.train.steps={steps} is done: nothing to train; try more "
                "steps, or another --workdir to start anew"
            )
        manager.close()
    except Exception as error:
        # An earlier step's save may be under way. Where another process has died it cannot end.
        if isinstance(error, NonFiniteError) or jax.process_count() == 1:
            with contextlib.suppress(CheckpointError):
                manager.close()
        raise


def run(parts: Parts, manager: Any, state: Any, start: int, signals: Signals) -> None:
    """Trains from step `start` on, saves, and says what came of it."""
    import jax

    from training import loop
    from training.metrics import Writers

    steps = parts.config.train.steps
    writers = Writers(parts.workdir, start, steps, primary=jax.process_index() == 0)
    writers.text(start, "config", f"```\n{parts.config}\n```")
    writers.text(start, "parameters", describe(parts))
    try:
        if signals.stop and jax.process_count() == 1:  # no need to compile first
            Saver(parts, manager).save(start, state, None)
            step, why, evaluate = start, "signal", None
        else:
            job = make_job(parts, manager, state, start, signals, writers)
            step, why = loop.run(job)
            evaluate = job.evaluate
        with parts.goodput.during("checkpoint"):
            manager.wait()
        parts.goodput.write()
        conclude(parts, step, why, signals, evaluate, writers.say)
    finally:
        writers.close()


def make_job(parts: Parts, manager: Any, state: Any, start: int, signals: Any, writers: Any) -> Any:
    """Compiles the step and ties the loop's pieces together."""
    from training import loop
    from training.evaluate import Evaluator
    from training.profiler import Profiler
    from training.report import Meter

    config, data = parts.config, parts.config.data
    step, votes, peak = compile_step(parts, signals, writers)
    slots = data.global_batch_size * data.sequence_length * config.train.tbptt_windows
    meter = Meter(slots, parts.model, peak, skip_nonfinite=config.train.skip_nonfinite)
    evaluate = Evaluator(
        parts.model,
        parts.mesh,
        parts.validation,
        data.global_batch_size,
        parts.goodput,
        reads_bytes=data.tokenizer == "bytes",
    )
    every = loop.Plan(
        config.train.steps, config.log.every, config.eval.every, config.checkpoint.every
    )
    profiler = Profiler(parts.workdir, config.profile.start, config.profile.steps, writers.say)
    return loop.Job(
        plan=every,
        state=state,
        start=start,
        step=step,
        votes=votes,
        batches=iter(parts.loader),
        more=parts.loader.has_more,
        evaluate=evaluate,
        saver=Saver(parts, manager),
        meter=meter,
        writers=writers,
        goodput=parts.goodput,
        profiler=profiler,
        signals=signals,
    )


def compile_step(parts: Parts, signals: Signals, writers: Any) -> tuple[Any, Any, int | None]:
    """(compiled step, the two arrays of votes, bytes a device that the step needs)."""
    from training.report import compiled_peak_bytes
    from training.step import StepConfig, batch_shapes, make_train_step, make_votes

    config, data = parts.config, parts.config.data
    names = [field.name for field in dataclasses.fields(StepConfig)]
    options = StepConfig(**{name: config.train[name] for name in names})
    step = make_train_step(
        options, parts.model, parts.mesh, parts.optimizer, parts.schedule, parts.shapes
    )
    votes = make_votes(parts.mesh)
    batch = batch_shapes(
        parts.mesh, config.train.tbptt_windows, data.global_batch_size, data.sequence_length
    )
    began = time.monotonic()
    with parts.goodput.during("compilation"):
        compiled = step.lower(parts.shapes, batch, votes[0]).compile()
    writers.say(f"compiled in {time.monotonic() - began:.1f} s")
    return compiled, votes, compiled_peak_bytes(compiled)


def conclude(parts: Parts, step: int, why: str, signals: Signals, evaluate: Any, say: Any) -> None:
    """The lines at a run's end."""
    folder = checkpoint_folder(parts.config.checkpoint.directory, parts.workdir)
    say(parts.loader.summary())
    if evaluate and evaluate.last and evaluate.gzip:
        bits, size = evaluate.gzip
        say(
            f"validation: {evaluate.last['eval/bits_per_byte']:.4f} bits/byte; "
            f"gzip -9 on the same {size:,} bytes: {bits:.4f}"
        )
    if why == "data":
        say(f"the data ended (config.data.epochs={parts.config.data.epochs})")
    reason = (
        f"stopped by {signals.stop or 'a signal to another process'}; " if why == "signal" else ""
    )
    on = "; the same command goes on from there" if why == "signal" else ""
    say(f"{reason}step {step} is saved in {folder}{on}")


if __name__ == "__main__":
    process.leave(main(sys.argv))
