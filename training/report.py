"""Turns the values that a step returned, including layers' metrics, into logged values."""

import dataclasses
import math
import time
from typing import Any

import jax
import psutil

from errors import RunError
from model.config import ModelConfig
from model.flops import key_flops_per_token, train_flops_per_token
from training.step import CONTROL

# Peak bf16 FLOP/s of a JAX device by `device_kind`: a chip, or on v7x one of its two cores.
# Sources: Google Cloud's TPU pages, "System architecture"; NVIDIA's data sheets, dense figures.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


Numbers = dict[str, Any]  # a finished step's metrics on the host: floats, ints and bools by name


class NonFiniteError(RunError):
    """A step's loss or gradient is not finite; `step` is its number."""

    def __init__(self, step: int, loss: float, norm: float):
        super().__init__(
            f"step {step}: loss {loss}, gradient norm {norm}: not finite, so it is not saved; try "
            "a lower config.optimizer.learning_rate, or --config.train.skip_nonfinite=true"
        )
        self.step, self.loss, self.norm = step, loss, norm


# The last word of a metric's name determines how the values since the last report are combined.
LAST = ("seen", "skipped", "last")  # totals of the run, and values reported unchanged
MOST = ("max",)


@dataclasses.dataclass
class Progress:
    """What a run has done so far, including earlier starts."""

    tokens_seen: int = 0  # real tokens of the steps passed to `Meter.finish`


@dataclasses.dataclass
class Interval:
    """Sums over the steps since the last report whose time was measured."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    flops: float = 0.0
    data_wait: float = 0.0


class Meter:
    """Turns finished steps into numbers.

    Args:
        slots: tokens of a step, including padding. cfg: for the FLOPs of a token.
        compiled_peak: bytes per device that the compiled step needs, None if unknown.
        progress: is updated.
        skip_nonfinite: whether non-finite steps were skipped on the device; otherwise they are an
            error.
    """

    def __init__(
        self,
        slots: int,
        cfg: ModelConfig,
        compiled_peak: int | None,
        progress: Progress,
        *,
        skip_nonfinite: bool,
    ):
        self._slots, self._progress = slots, progress
        self._values: dict[str, list[float]] = {}  # of the steps since the last report
        self.flops_per_token = train_flops_per_token(cfg)
        self._flops_per_key = key_flops_per_token(cfg, 1.0)
        self._compiled_peak = compiled_peak
        self._skip_nonfinite = skip_nonfinite
        self._interval = Interval()
        self._done: float | None = None
        self._process = psutil.Process()

    def start(self) -> None:
        """Starts the next step's time; call it when the device is idle."""
        self._done = time.monotonic()

    def finish(self, step: int, metrics: dict[str, jax.Array], data_wait: float) -> Numbers:
        """Waits for a step and returns its numbers, on the host.

        Raises:
            NonFiniteError: the loss or the gradient is not finite and may not be skipped.
        """
        numbers = {k: v.item() for k, v in jax.device_get(metrics).items()}
        now = time.monotonic()
        if not numbers["finite"] and not self._skip_nonfinite:
            raise NonFiniteError(step, numbers["loss"], numbers["grad_norm"])
        if self._done is not None:
            self._interval.steps += 1
            self._interval.seconds += now - self._done
            self._interval.tokens += numbers["tokens"]
            self._interval.flops += numbers["tokens"] * self.flops_per_token
            self._interval.flops += numbers["attended"] * self._flops_per_key
            self._interval.data_wait += data_wait
        self._done = now
        self._progress.tokens_seen += numbers["tokens"]
        for name, value in numbers.items():
            if name not in CONTROL:
                self._values.setdefault(name, []).append(value)
        return numbers

    def report(self) -> dict[str, float]:
        """One value for each metric of the steps since the last report, and their speed.

        The names are those of the step; names without a group are put below "learning/".
        """
        values, self._values = self._values, {}
        learning = {
            name if "/" in name else f"learning/{name}": summarize(name, found)
            for name, found in values.items()
        }
        learning["learning/tokens_seen"] = self._progress.tokens_seen
        return learning | self._speed() | self._memory()

    def _speed(self) -> dict[str, float]:
        interval, self._interval = self._interval, Interval()
        if not interval.steps:
            return {}
        devices = jax.device_count()
        step_time = interval.seconds / interval.steps
        tokens = interval.tokens / interval.seconds
        rate = interval.flops / interval.seconds / devices  # of real tokens, not of padding
        values = {
            "perf/step_time_seconds": step_time,
            "perf/tokens_per_second": tokens,
            "perf/tokens_per_second_per_device": tokens / devices,
            "perf/padded_tokens_per_second": self._slots / step_time,
            "perf/data_wait_seconds": interval.data_wait / interval.steps,
            "perf/tflops_per_second_per_device": rate / 1e12,
        }
        peak = PEAK_FLOPS.get(jax.devices()[0].device_kind)
        if peak:
            values["perf/mfu"] = rate / peak
        return values

    def _memory(self) -> dict[str, float]:
        values: dict[str, float] = {"memory/host_rss_bytes": self._process.memory_info().rss}
        if self._compiled_peak is not None:
            values["memory/compiled_peak_bytes"] = self._compiled_peak
        peaks = [
            stats["peak_bytes_in_use"]
            for stats in (device.memory_stats() for device in jax.local_devices())
            if stats and "peak_bytes_in_use" in stats  # CPU devices have none
        ]
        if peaks:
            values["memory/peak_bytes_per_device"] = max(peaks)
        return values


def summarize(name: str, values: list[float]) -> float:
    """One value for several steps: their mean, unless the name's last word says otherwise.

    Values that are not finite (of skipped steps) are used only if there are no others.
    """
    word = name.replace("/", "_").split("_")[-1]
    if word in LAST:
        return values[-1]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return values[-1]
    return max(finite) if word in MOST else math.fsum(finite) / len(finite)


def compiled_peak_bytes(compiled: Any) -> int | None:
    """Bytes that a compiled program needs on a device; None if the backend does not report it."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    # Donated arguments are reused for results, so they count once.
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def eval_values(sums: list[dict[str, jax.Array]]) -> dict[str, float]:
    """One loss over all batches: sums divided by one global count, in float64 on the host."""
    host = jax.device_get(sums)
    nll = math.fsum(float(s["nll"]) for s in host)
    correct = math.fsum(float(s["correct"]) for s in host)
    weight = math.fsum(float(s["weight"]) for s in host)
    count = sum(int(s["bytes"]) for s in host)
    return {
        "eval/loss": nll / max(weight, 1.0),
        "eval/accuracy": correct / max(weight, 1.0),
        "eval/bits_per_byte": nll / math.log(2.0) / max(count, 1),
    }
