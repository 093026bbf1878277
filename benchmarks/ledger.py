"""Benefit of the carried state: accuracy on the ledger task by distance from question to answer.

    python -m benchmarks.ledger [--seeds 1] [--workdir runs/ledger] [--out results.jsonl]

Models are trained without carry, with carry through 1 and 4 windows, without it and then with it,
and on rows as long as a document. All read documents of 8, 32 and 128 rows, rolled out: the state
goes from row to row. The same command continues after an interruption and repeats nothing.
docs/evidence.md explains the experiment; `python -m benchmarks.ledger_plot` draws it.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONFIG = os.path.join(ROOT, "configs", "ledger.py")
ROW = 256
STEPS, LATE_STEPS = 1500, 150
# Rows of a document: documents that are read.
DOCUMENTS = {8: 16, 32: 4, 128: 4}
STREAMS = 4
# Rows between a write and its question: at least so many. A question whose value is in its own row
# already, written or in an earlier answer, is of the first kind: no state has to bring it there.
DISTANCES = {"same row": 0, "1-2 rows": 1, "3-8 rows": 3, "9+ rows": 9}


@dataclasses.dataclass(frozen=True)
class Phase:
    """One training run.

    steps: its last step. init_from: the arm whose parameters it begins with, as they are then.
    """

    arm: str
    steps: int
    flags: tuple[str, ...]
    init_from: str = ""


ONE_ROW = "--config.data.global_batch_size=1"
NO_CARRY = ("--config.model.carry=False",)
# Two rows of four windows, or one row as long as a document: 2,048 tokens per step, as all arms.
CARRY_4 = ("--config.data.global_batch_size=2", "--config.train.tbptt_windows=4")
LONG = (ONE_ROW, f"--config.data.sequence_length={8 * ROW}", *NO_CARRY)
LATE = (
    f"--config.optimizer.schedule_steps={LATE_STEPS}",
    "--config.optimizer.learning_rate=3e-3",
    "--config.optimizer.warmup_steps=5",
)
# In this order: the late arm begins where the arm without carry has a tenth of its steps left.
PHASES = (
    Phase("no carry", STEPS - LATE_STEPS, NO_CARRY),
    Phase("no carry, then carry", LATE_STEPS, LATE, init_from="no carry"),
    Phase("carry, 1 window", STEPS, ()),
    Phase("no carry", STEPS, NO_CARRY),
    Phase("rows of 2048", STEPS, LONG),
    Phase("carry, 4 windows", STEPS, CARRY_4),
)
ALSO_RESET = ("no carry", "carry, 1 window")
ARMS = tuple(dict.fromkeys(phase.arm for phase in PHASES))


def main() -> None:
    """Trains what is not trained yet, evaluates what is not evaluated yet, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workdir", default=os.path.join("runs", "ledger"))
    parser.add_argument("--out", default=os.path.join(ROOT, "docs", "evidence", "ledger.jsonl"))
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    os.makedirs(os.path.dirname(options.out), exist_ok=True)
    start_jax(options.workdir)
    for seed in range(options.seeds):
        for phase in PHASES:
            train(phase, seed, options.workdir)
            if phase.steps == STEPS or phase.init_from:
                evaluate_all(phase, seed, options.workdir, options.out)
    print(table(read_results(options.out)))


def folder(workdir: str, arm: str, seed: int) -> str:
    """A run's workdir."""
    return os.path.join(workdir, f"{re.sub('[^a-z0-9]+', '-', arm)}-seed{seed}")


def train(phase: Phase, seed: int, workdir: str) -> None:
    """Runs train.py to the phase's last step, unless it is done."""
    runs_in = folder(workdir, phase.arm, seed)
    done = metrics(runs_in)
    if done and done[-1]["step"] >= phase.steps:
        return
    command = [sys.executable, os.path.join(ROOT, "train.py"), "--config", CONFIG]
    command += ["--workdir", runs_in, f"--config.train.seed={seed}", *phase.flags]
    command += [f"--config.train.steps={phase.steps}", "--config.eval.every=0"]
    command += [f"--config.train.compilation_cache={os.path.join(workdir, 'cache')}"]
    if phase.init_from:
        command += ["--init_from", folder(workdir, phase.init_from, seed)]
    subprocess.run(command, check=True)


def metrics(run: str) -> list[dict[str, float]]:
    """What a run has logged so far."""
    path = os.path.join(run, "metrics.jsonl")
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.endswith("\n")]


def evaluate_all(phase: Phase, seed: int, workdir: str, out: str) -> None:
    """Appends a record for every length of documents, rolled out, and for some arms reset."""
    done = {key_of(record) for record in read_results(out)}
    logged = metrics(folder(workdir, phase.arm, seed))
    for carried in (True, False) if phase.arm in ALSO_RESET else (True,):
        for rows in DOCUMENTS:
            record = {"arm": phase.arm, "carried": carried, "rows": rows, "seed": seed}
            if key_of(record) in done:
                continue
            print(f"evaluating {record}", flush=True)
            record["answers"] = evaluate(folder(workdir, phase.arm, seed), carried, rows)
            record["tokens"] = int(logged[-1]["learning/tokens_seen"])
            record["row_bytes"] = row_bytes(phase, workdir)
            times = [line["perf/step_time_seconds"] for line in logged if len(line) > 9]
            record["step_seconds"] = round(statistics.median(times), 4)
            record["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
            record["date"] = str(datetime.date.today())
            with open(out, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def key_of(record: dict) -> tuple:
    return record["arm"], record["carried"], record["rows"], record["seed"]


def read_results(out: str) -> list[dict]:
    """The records so far."""
    if not os.path.exists(out):
        return []
    with open(out, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def start_jax(workdir: str) -> None:
    """One device, and the cache of compiled programs."""
    from training import devices

    devices.start_jax(1, os.path.join(workdir, "cache"), devices.Processes())


def config_of(**options: str | int | float | bool):
    """The config with options changed, checked; names have a double underscore for the dot."""
    from configs import check, ledger

    config = ledger.get_config()
    named = {name.replace("__", "."): value for name, value in options.items()}
    config.update_from_flattened_dict(named)
    check.check(config)
    return config


def evaluate(run: str, carried: bool, rows: int) -> dict[str, list[int]]:
    """(correct answers, answers) by distance, over documents of so many rows.

    run: a workdir, whose newest checkpoint is read. carried: whether the state goes from row to
    row; else each row begins afresh.
    """
    from data.loader import make_loader
    from data.options import DataConfig
    from training import devices
    from training.build import model_config
    from training.restore import load_params
    from training.state import empty_carry
    from training.step import make_score_step

    config = config_of(
        data__task_length=rows * ROW, data__global_batch_size=STREAMS, model__carry=carried
    )
    mesh = devices.make_mesh(config.mesh)
    batches = rows * DOCUMENTS[rows] // STREAMS
    tokens, correct = [], []
    with make_loader(
        DataConfig(**config.data), split="eval", mesh=mesh, seed=0, max_batches=batches
    ) as loader:
        model = model_config(config, loader.tokenizer.vocab_size)
        params = load_params(run, mesh).params
        step, carry = make_score_step(model, mesh), empty_carry(model, mesh, STREAMS)()
        for batch in loader:
            carry, (_, hits) = step(params, carry, batch)
            tokens.append(np.asarray(batch.tokens)[0])
            correct.append(np.asarray(hits))
    shape = (-1, rows * ROW)  # streams begin with a document and hold whole ones
    return by_distance(
        np.concatenate(tokens, 1).reshape(shape), np.concatenate(correct, 1).reshape(shape)
    )


def by_distance(tokens: np.ndarray, correct: np.ndarray) -> dict[str, list[int]]:
    """(correct answers, answers) for each of DISTANCES.

    tokens, correct: [documents, tokens]; correct: whether the next token was predicted.
    """
    found = {name: [0, 0] for name in DISTANCES}
    for document, hits in zip(tokens, correct):
        for place, distance in answers(document):
            name = [name for name, least in DISTANCES.items() if distance >= least][-1]
            found[name][0] += int(hits[place])
            found[name][1] += 1
    return found


def answers(document: np.ndarray) -> Iterator[tuple[int, int]]:
    """(place of the token before the answer, rows since its key was last written).

    The rows are 0 where an earlier answer in the row of the question has the value, too.
    """
    text = "".join(chr(token) for token in document)  # begin and end are other characters
    written: dict[str, int] = {}  # the row of a key's newest write
    seen: dict[str, int] = {}  # the row that last had its value
    for event in re.finditer(r"\?(.):.|(.)=.", text):
        place = event.end() - 2
        if written_now := event[2]:
            written[written_now] = seen[written_now] = event.start() // ROW
        else:
            here, asked = place // ROW, event[1]
            yield place, 0 if seen[asked] == here else here - written[asked]
            # An answer whose question begins in the row before is of little use in this one.
            seen[asked] = event.start() // ROW


def row_bytes(phase: Phase, workdir: str) -> int:
    """Peak memory of a compiled training step on one row, or on the windows of one row."""
    one = dataclasses.replace(
        phase, arm=f"memory {phase.arm}", steps=1, flags=(*phase.flags, ONE_ROW), init_from=""
    )
    train(one, 0, workdir)
    return int(metrics(folder(workdir, one.arm, 0))[-1]["memory/compiled_peak_bytes"])


def table(records: list[dict]) -> str:
    """Markdown: accuracy by distance of each arm and length of documents, over all seeds."""
    head = ["trained", "read", "rows", *DISTANCES, "MB, one row", "s per step"]
    lines = [head, ["---"] * len(head)]
    groups = {(r["arm"], r["carried"], r["rows"]): r for r in records}
    for arm, carried, rows in sorted(groups, key=lambda g: (g[2], not g[1], ARMS.index(g[0]))):
        same = [r for r in records if (r["arm"], r["carried"], r["rows"]) == (arm, carried, rows)]
        line = [arm, "rolled out" if carried else "reset", str(rows)]
        line += [accuracy(same, name) for name in DISTANCES]
        line.append(f"{same[0]['row_bytes'] / 1e6:.1f}")
        line.append(f"{statistics.median(r['step_seconds'] for r in same):.3f}")
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def accuracy(records: list[dict], distance: str) -> str:
    """The mean over seeds, with the lowest and highest where there are several."""
    shares = [c / n for c, n in (record["answers"][distance] for record in records) if n]
    if not shares:
        return ""
    text = f"{statistics.mean(shares):.3f}"
    return text if len(shares) == 1 else f"{text} ({min(shares):.3f}-{max(shares):.3f})"


if __name__ == "__main__":
    main()
