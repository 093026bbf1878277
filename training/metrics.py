"""Where numbers go: TensorBoard event files, a JSONL file and the console, from process 0.

After a resume every step stands once in each: lines of the JSONL file beyond the resumed step are
cut off, and a new event file tells TensorBoard to forget them.
"""

import json
import math
import os
import sys
import time
from typing import Any

import tqdm
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import Summary, text

JSONL = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class Writers:
    """All writers of one process; does nothing in processes other than the first.

    Args:
        workdir: the run's folder, made if need be.
        start: steps done before; what was written of later ones goes.
        steps: where the run ends, for the console.
    """

    def __init__(self, workdir: str, start: int, steps: int, *, primary: bool = True):
        self._primary = primary
        if not primary:
            return
        events = os.path.join(workdir, TENSORBOARD)
        os.makedirs(events, exist_ok=True)
        path = os.path.join(workdir, JSONL)
        cut_jsonl(path, start)
        self._jsonl = open(path, "a", encoding="utf-8")  # noqa: SIM115
        # Written here and now, not by tensorboardX's queue and thread: what a checkpoint's step
        # reported must be on disk before the checkpoint is.
        # Files are read in the order of their names, of which the writer's part is in seconds.
        self._events = EventsWriter(os.path.join(events, "events"), f".{time.time_ns()}")
        # Whatever older files say of later steps, they say no longer.
        self._event(start + 1, session_log=SessionLog(status=SessionLog.START))
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True)
        self._steps = steps

    def write(self, step: int, values: dict[str, float]) -> None:
        """One step's numbers, by their names; called once a step, in order."""
        if not self._primary:
            return
        # JSON has no NaN or infinity.
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        line = {"step": step, "time": round(time.time(), 3), **finite}
        self._jsonl.write(json.dumps(line) + "\n")
        self._jsonl.flush()
        scalars = [Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        self._event(step, summary=Summary(value=scalars))
        self._show(step, values)

    def text(self, step: int, tag: str, content: str) -> None:
        """A text for TensorBoard's text page, in Markdown."""
        if self._primary:
            self._event(step, summary=text(tag, content))

    def log(self, line: str) -> None:
        """A line for the user, above the progress bar where there is one."""
        if not self._primary:
            return
        if self._bar is not None:
            self._bar.write(line, file=sys.stdout)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Writes out and closes everything."""
        if self._primary:
            self._jsonl.close()
            self._events.close()
            if self._bar is not None:
                self._bar.close()

    def _event(self, step: int, **content: Any) -> None:
        self._events.write_event(Event(wall_time=time.time(), step=step, **content))
        self._events.flush()

    def _show(self, step: int, values: dict[str, float]) -> None:
        shown = console_text(values)
        if self._bar is not None:
            self._bar.n = step
            self._bar.set_postfix_str(shown)
            if "eval/loss" in values:
                self._bar.write(f"step {step}/{self._steps}  {_eval_text(values)}", sys.stdout)
            return
        left = (self._steps - step) * values.get("perf/step_time_seconds", 0.0)
        line = f"step {step}/{self._steps}  {shown}  left {duration(left)}"
        if "eval/loss" in values:
            line += f"  | {_eval_text(values)}"
        print(line, flush=True)


def console_text(values: dict[str, float]) -> str:
    """The few numbers that a person watches."""
    names = {
        "learning/loss": "loss {:.4f}",
        "learning/bits_per_byte": "bits/byte {:.4f}",
        "learning/grad_norm": "grad {:.2f}",
        "learning/learning_rate": "lr {:.2e}",
        "perf/step_time_seconds": "{:.3f} s/step",
        "perf/tokens_per_second": "{:,.0f} tokens/s",
    }
    shown = [form.format(values[name]) for name, form in names.items() if name in values]
    skipped = values.get("learning/steps_skipped")
    return "  ".join([*shown, f"{skipped:.0f} skipped"] if skipped else shown)


def duration(seconds: float) -> str:
    """3:05 or 2:03:05."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def cut_jsonl(path: str, last: int) -> None:
    """Keeps the whole lines of steps up to `last`; replaces the file at once or not at all."""
    if not os.path.exists(path):
        return
    part = f"{path}.part"
    with open(path, encoding="utf-8", errors="replace") as old, open(part, "w") as new:
        for line in old:
            try:
                keep = line.endswith("\n") and json.loads(line)["step"] <= last
            except (ValueError, KeyError, TypeError):
                keep = False  # the line that a killed process left half written
            if keep:
                new.write(line)
    os.replace(part, path)


def _eval_text(values: dict[str, float]) -> str:
    return (
        f"validation loss {values['eval/loss']:.4f}  "
        f"bits/byte {values['eval/bits_per_byte']:.4f}  "
        f"({values['eval/seconds']:.1f} s)"
    )
