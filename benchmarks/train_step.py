"""Speed of a whole training step, and the cost of the loop around it.

    python benchmarks/train_step.py [--config.group.option=value ...]

5M parameters, 4 rows x 2048 tokens per step. Bare steps (the compiled step on one batch, again and
again) and the loop (data, metrics, files, console) take turns, so that a noisy machine is noisy for
both; figures are medians over the turns. The machine's own matrix-product rate, before and after,
says what machine it was at that moment.
"""

import contextlib
import dataclasses
import datetime
import io
import os
import platform
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import train
from configs import base, check
from configs import flags as command_line
from training.signals import Signals

STEPS, TURNS = 4, 5
SIZE = 1024  # of the matrices whose product measures the machine


def get_config():
    """The measured config; this file is also a config file for train.py."""
    config = base.get_config()
    with config.unlocked():
        config.mesh.data = 2  # a CPU device for each of two cores
        config.data.global_batch_size = 4
        config.data.sequence_length = 2048
        config.model.d_model = 256
        config.model.num_repeats = 5
        config.model.d_ff = 768
        config.model.remat = "none"
        config.model.kda_state_policy = "save"
        config.model.scan_layers = False  # on CPU a scan's stacking and slicing costs a sixth
        config.eval.every = 0
        config.checkpoint.every = 0
    return config


def main() -> None:
    """Prints one table."""
    signals = Signals()
    config, flags = command_line.parse(
        [sys.argv[0], f"--config={os.path.abspath(__file__)}", *sys.argv[1:]]
    )
    check.check(config)
    train.start_jax(config, flags)
    with tempfile.TemporaryDirectory() as workdir:
        rows = measure(config, workdir, signals)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}, {datetime.date.today()}"
    )
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")


def measure(config, workdir: str, signals: Signals) -> list[tuple[str, str]]:
    """Rows of the table: (what, figure)."""
    import jax

    from training import build, run
    from training.metrics import Writers
    from training.state import init_state

    parts = build.build(config, workdir)
    writers = Writers(workdir, 0, STEPS * TURNS)
    data = config.data
    state = init_state(
        parts.model,
        parts.mesh,
        parts.make_optimizer(parts.tunables),
        data.global_batch_size,
        config.train.spike_window,
        0,
    )
    began = time.perf_counter()
    job = run.make_loop(parts, None, state, 0, signals, writers)
    compilation = time.perf_counter() - began
    matmul = [matmul_rate()]
    batch = next(job.batches)
    bare, whole, waits = [], [], []
    for turn in range(TURNS + 1):
        job.state, seconds = bare_steps(job, batch)
        bare.append(seconds)
        began = time.perf_counter()
        reports = loop_steps(job, turn)
        whole.append((time.perf_counter() - began) / STEPS)
        waits += [values["perf/data_wait_seconds"] for values in reports]
    matmul.append(matmul_rate())
    writers.close()
    parts.loader.close()
    bare, whole = bare[1:], whole[1:]  # the first turn warms up
    tokens = data.global_batch_size * data.sequence_length
    step, loop = statistics.median(bare), statistics.median(whole)
    return [
        ("model", build.describe(parts)),
        ("compilation", f"{compilation:.1f} s"),
        ("bare compiled step", f"{step:.3f} s"),
        ("step in the loop", f"{loop:.3f} s"),
        ("loop over bare step", f"{statistics.median(w / b for w, b in zip(whole, bare)):.3f}"),
        ("tokens per second", f"{tokens / loop:,.0f}"),
        ("waiting for data", f"{statistics.median(waits) * 1e3:.1f} ms per step"),
        ("model FLOP/s", f"{tokens * job.meter.flops_per_token / loop / 1e9:.0f} GFLOP/s"),
        (
            "matrix product, float32",
            f"{matmul[0]:.0f} GFLOP/s before, {matmul[1]:.0f} after ({SIZE}^3, all cores)",
        ),
        ("jax", jax.__version__),
    ]


def bare_steps(job, batch):
    """(state, seconds per step) of the compiled step alone."""
    import jax

    state = jax.block_until_ready(job.state)
    began = time.perf_counter()
    for _ in range(STEPS):
        state, metrics = job.step(state, batch, job.votes[0])
    jax.block_until_ready((state, metrics))
    return state, (time.perf_counter() - began) / STEPS


def loop_steps(job, turn: int):
    """The values that the trainer's own loop reports."""

    reports = []
    job.start = turn * STEPS
    job.cadence = dataclasses.replace(job.cadence, steps=job.start + STEPS)
    write = type(job.writers).write

    def keep(step, values):
        reports.append(values)
        write(job.writers, step, values)

    job.writers.write = keep
    with contextlib.redirect_stdout(io.StringIO()):
        job.run()
    return reports


def matmul_rate() -> float:
    """GFLOP/s of float32 products of square matrices, the best of five."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((SIZE, SIZE), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    jax.block_until_ready(product(x))
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(product(x))
        best = min(best, time.perf_counter() - began)
    return 2 * SIZE**3 / best / 1e9


if __name__ == "__main__":
    main()
