"""Writes metrics to TensorBoard event files, a JSONL file and the console, on process 0.

After a resume every step appears once in each: lines of the JSONL file after the resumed step are
removed, and a new event file makes TensorBoard drop its later steps.
"""

import json
import math
import os
import sys

import tqdm

from training.events import EventFile

JSONL = "metrics.jsonl"
HPARAMS_METRICS = ("eval/loss", "eval/bits_per_byte", "learning/loss")  # columns of that page


class Writers:
    """All writers of one process; does nothing on processes other than the first.

    Args:
        workdir: the run's folder, created if missing.
        start: number of steps done before; entries of later steps are removed.
        steps: last step of the run, for the console.
    """

    def __init__(self, workdir: str, start: int, steps: int, *, primary: bool = True):
        self._primary = primary
        if not primary:
            return
        os.makedirs(workdir, exist_ok=True)
        path = os.path.join(workdir, JSONL)
        newest = cut_jsonl(path, start)
        self._jsonl = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._events = EventFile(workdir, start, newest)
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True)
        self._steps = steps

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes one step's values by name; called once per step, in order."""
        if not self._primary:
            return
        # JSON has no NaN or infinity.
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        now = self._events.now()
        line = {"step": step, "time": round(now, 3), **finite}
        self._jsonl.write(json.dumps(line) + "\n")
        self._jsonl.flush()
        self._events.scalars(step, values, now)
        self._show(step, values)

    def text(self, step: int, tag: str, content: str) -> None:
        """Writes a Markdown text for TensorBoard's text page."""
        if self._primary:
            self._events.text(step, tag, content)

    def hyperparameters(self, step: int, options: dict[str, int | float | str]) -> None:
        """Writes the options for TensorBoard's HParams page, where a sweep is a table of runs."""
        if self._primary:
            self._events.hyperparameters(step, options, HPARAMS_METRICS)

    def log(self, line: str) -> None:
        """A line for the user, above the progress bar if there is one."""
        if not self._primary:
            return
        if self._bar is not None:
            self._bar.write(line, file=sys.stdout)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Flushes and closes everything."""
        if self._primary:
            self._jsonl.close()
            self._events.close()
            if self._bar is not None:
                self._bar.close()

    def _show(self, step: int, values: dict[str, float]) -> None:
        shown = console_text(values)
        if self._bar is not None:
            self._bar.n = step
            self._bar.set_postfix_str(shown)
            if "eval/loss" in values:
                self._bar.write(f"step {step}/{self._steps}  {_eval_text(values)}", sys.stdout)
            return
        left = (self._steps - step) * values.get("perf/step_time_seconds", 0.0)
        line = f"step {step}/{self._steps}  {shown}  left {tqdm.tqdm.format_interval(left)}"
        if "eval/loss" in values:
            line += f"  | {_eval_text(values)}"
        print(line, flush=True)


def console_text(values: dict[str, float]) -> str:
    """The few values that are shown on the console."""
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


def cut_jsonl(path: str, last: int) -> float:
    """Keeps the complete lines of steps up to `last`; replaces the file atomically.

    Returns the newest time of all lines, including dropped ones; 0 if there are none.
    """
    if not os.path.exists(path):
        return 0.0
    part, newest = f"{path}.part", 0.0
    with (
        open(path, encoding="utf-8", errors="replace") as old,
        open(part, "w", encoding="utf-8") as new,
    ):
        for line in old:
            try:
                values = json.loads(line)
                newest = max(newest, float(values.get("time", 0)))
                keep = line.endswith("\n") and values["step"] <= last
            except (ValueError, KeyError, TypeError, AttributeError):
                keep = False  # a line that a killed process left incomplete
            if keep:
                new.write(line)
    os.replace(part, path)
    return newest


def _eval_text(values: dict[str, float]) -> str:
    return (
        f"validation loss {values['eval/loss']:.4f}  "
        f"bits/byte {values['eval/bits_per_byte']:.4f}  "
        f"accuracy {values['eval/accuracy']:.4f}  "
        f"({values['eval/seconds']:.1f} s)"
    )
