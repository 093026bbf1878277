"""Gain and cost of carrying the state across rows, on documents longer than a row.

    python benchmarks/carry.py [--config.train.steps=300 ...]

The main config is trained twice from one seed on the same batches, with config.model.carry on and
off. Both models then read the same validation documents; bits per byte are reported separately for
bytes in the first row of their document and beyond it. The two compiled steps are timed
alternately.
"""

import dataclasses
import datetime
import os
import platform
import statistics
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import train
from benchmarks.train_step import bare_steps
from configs import base, check
from configs import flags as command_line
from training.signals import Signals

MAIN_CONFIG = os.path.join(os.path.dirname(base.__file__), "kda_cp4.py")
TURNS = 5


def main() -> None:
    """Prints one table."""
    signals = Signals()
    config, flags = command_line.parse([sys.argv[0], f"--config={MAIN_CONFIG}", *sys.argv[1:]])
    check.check(config)
    train.start_jax(config, flags)
    trained = [trained_model(config, carry, signals) for carry in (True, False)]
    for _ in range(TURNS):
        for model in trained:
            model.job.state, seconds = bare_steps(model.job, model.batch)
            model.seconds.append(seconds)
    print(f"{platform.machine()}, {os.cpu_count()} cores, {datetime.date.today()}")
    rows, length = config.data.global_batch_size, config.data.sequence_length
    print(f"{config.train.steps} steps of {rows} x {length} tokens")
    print(f"{'':42}{'carry':>10}{'no carry':>10}")
    for name, values in table(trained):
        print(f"{name:42}" + "".join(f"{value:>10}" for value in values))


@dataclasses.dataclass
class Trained:
    """A trained model, and what is still to be measured with it."""

    job: object  # training.loop.TrainLoop
    batch: object  # one training batch
    bits: dict[str, float]  # validation bits per byte by position
    peak_bytes: int | None
    carried_bytes: int
    seconds: list[float] = dataclasses.field(default_factory=list)


def trained_model(config, carry: bool, signals: Signals) -> Trained:
    """Trains the config, with or without carry, and evaluates it by place."""
    import jax

    from training import build, run
    from training.metrics import Writers
    from training.report import compiled_peak_bytes
    from training.state import init_state

    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.model.carry = carry
        config.eval.every = config.checkpoint.every = 0
    with tempfile.TemporaryDirectory() as workdir:
        parts = build.build(config, workdir)
        writers = Writers(workdir, 0, config.train.steps)
        data, options = config.data, config.train
        state = init_state(
            parts.model,
            parts.mesh,
            parts.make_optimizer(parts.tunables),
            data.global_batch_size,
            options.spike_window,
            options.seed,
        )
        carried = sum(x.nbytes for x in jax.tree.leaves(state.carry))
        job = run.make_loop(parts, None, state, 0, signals, writers)
        job.run()
        writers.close()
    batch = next(iter(parts.loader))
    bits = {
        place: evaluate(parts, job.state.params, keep)
        for place, keep in {
            "all": lambda positions: positions >= 0,
            "first row": lambda positions: positions < data.sequence_length,
            "beyond": lambda positions: positions >= data.sequence_length,
        }.items()
    }
    parts.loader.close()
    peak = compiled_peak_bytes(job.step.compiled)
    return Trained(job, batch, bits, peak, carried)


class Masked:
    """Batches in which only some targets count, chosen by their positions in their documents."""

    def __init__(self, batches, keep):
        self._batches, self._keep, self.ready = batches, keep, batches.ready

    def __iter__(self):
        for batch in self._batches:
            kept = self._keep(batch.positions)
            yield batch._replace(
                loss_weights=batch.loss_weights * kept, target_bytes=batch.target_bytes * kept
            )


def evaluate(parts, params, keep) -> float:
    """Validation bits per byte at the positions for which `keep` is true."""
    from data.loader import make_loader
    from data.options import DataConfig
    from training.evaluate import Evaluator

    config = parts.config
    loader = make_loader(
        DataConfig(**config.data),
        split="eval",
        mesh=parts.mesh,
        seed=config.train.seed,
        max_batches=config.eval.batches,
        positions=True,
    )
    batches = Masked(loader, keep)
    evaluator = Evaluator(
        parts.model,
        parts.mesh,
        batches,
        parts.config.data.global_batch_size,
        parts.goodput,
        reads_bytes=False,
    )
    values = evaluator(params, lambda: None)
    loader.close()
    return values["eval/bits_per_byte"]


def table(trained: list[Trained]) -> list[tuple[str, list[str]]]:
    """(what, a figure for each model)."""
    places = {
        "all": "validation bits/byte, all positions",
        "first row": "  in the first row of a document",
        "beyond": "  beyond the first row",
    }
    lines = [(text, [f"{m.bits[place]:.4f}" for m in trained]) for place, text in places.items()]
    lines.append(("bare step, s", [f"{statistics.median(m.seconds):.3f}" for m in trained]))
    lines.append(("compiled peak, MB per device", [f"{m.peak_bytes / 1e6:.2f}" for m in trained]))
    lines.append(("carried state, total MB", [f"{m.carried_bytes / 1e6:.2f}" for m in trained]))
    return lines


if __name__ == "__main__":
    main()
