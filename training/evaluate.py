"""Validation: one loss over the held-out documents, with its own carry."""

import contextlib
import gzip
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from data.batch import Batch
from errors import DataError
from model.config import ModelConfig
from training.goodput import Goodput
from training.report import eval_values
from training.state import empty_carry
from training.step import make_eval_step

_POLL_SECONDS = 0.5


class Batches(Protocol):
    """What an evaluation needs of a loader."""

    def __iter__(self) -> Iterator[Batch]: ...

    def ready(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds for the next batch or the end; returns whether it came."""


class Evaluator:
    """Call it with parameters. The step is compiled at the first call, unless it already is.

    Args:
        batches: iterated from the start each time, in the same order. rows: rows of a batch.
        goodput: counts the time of compilation and evaluation.
        reads_bytes: whether tokens below 256 are bytes, so that gzip can compress the same text.
        waiting: a context for waits for documents, which a stop request may end.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        mesh: Mesh,
        batches: Batches,
        rows: int,
        goodput: Goodput,
        *,
        reads_bytes: bool,
        waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ):
        self._waiting = waiting
        self._batches, self._goodput, self._reads_bytes = batches, goodput, reads_bytes
        self._empty_carry = empty_carry(cfg, mesh, rows)
        self._jitted = make_eval_step(cfg, mesh)
        self._step: Callable[..., Any] | None = None
        self.gzip: tuple[float, int] | None = None  # (bits per byte, bytes) of the evaluated text
        self.last: dict[str, float] = {}

    def compile(self, params: Any, batch: Batch) -> None:
        """Compiles the step; both arguments may be of jax.ShapeDtypeStruct."""
        with self._goodput.during("compilation"):
            self._step = self._jitted.lower(params, self._empty_carry(), batch).compile()

    def __call__(self, params: Any, between: Callable[[], None]) -> dict[str, float]:
        """eval/loss (nats per token), /accuracy, /bits_per_byte, /seconds (without compilation).

        between: called before each batch, and twice per second during a wait for one.

        Raises:
            DataError: in all processes, if one of them cannot read its documents.
        """
        began = time.perf_counter()
        compiling = 0.0
        with self._goodput.during("evaluation"):
            carry, sums, texts = self._empty_carry(), [], []
            for batch in self._together(between):
                between()
                if self._step is None:
                    compiling -= time.perf_counter()
                    with self._goodput.during("compilation"):
                        self._step = self._jitted.lower(params, carry, batch).compile()
                    compiling += time.perf_counter()
                carry, numbers = self._step(params, carry, batch)
                sums.append(numbers)
                if self._reads_bytes and self.gzip is None:
                    texts.append(_texts(batch))
            values = eval_values(sums)
            if texts:
                self.gzip = gzip_bits_per_byte(texts)
        self.last = values | {"eval/seconds": time.perf_counter() - began - compiling}
        return self.last

    def _together(self, between: Callable[[], None]) -> Iterator[Batch]:
        """Yields the batches; a data error of one process is raised in all, so that none waits."""
        iterator = iter(self._batches)
        while True:
            with self._waiting():
                while not self._batches.ready(_POLL_SECONDS):
                    between()
            batch, failure = None, None
            try:
                batch = next(iterator, None)
            except DataError as error:
                failure = error
            if failure := _failure_of_any(failure):
                raise failure
            if batch is None:
                return
            yield batch


def _failure_of_any(ours: DataError | None) -> DataError | None:
    """An error of any process's data, in all processes; that of this one first."""
    if jax.process_count() == 1:
        return ours
    failed = np.asarray(multihost_utils.process_allgather(np.bool_(ours is not None))).tolist()
    if ours or not any(failed):
        return ours
    return DataError(
        f"process {failed.index(True)} can no longer read its documents for evaluation, as its own "
        "line says"
    )


def gzip_bits_per_byte(texts: list[list[bytes]]) -> tuple[float, int]:
    """gzip -9 on the same text: (bits per byte, bytes).

    texts: for each batch, the text of each row; a row continues in the next batch.
    """
    text = b"".join(piece for row in zip(*texts) for piece in row)
    if not text:
        return 0.0, 0
    return 8 * len(gzip.compress(text, 9)) / len(text), len(text)


def _texts(batch: Batch) -> list[bytes]:
    """The bytes of each row's targets; all windows of a row in order."""

    def by_row(x: jax.Array) -> np.ndarray:
        whole = multihost_utils.process_allgather(x, tiled=True)  # with other processes' tokens
        return np.moveaxis(np.asarray(whole), 1, 0)

    targets, counts = by_row(batch.targets), by_row(batch.target_bytes)
    return [bytes(t[c > 0].astype(np.uint8)) for t, c in zip(targets, counts)]
