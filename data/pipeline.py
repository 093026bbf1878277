"""Rows to batches, on the host: a grain pipeline over the streams of the rows this host holds.

    rows of streams -> worker processes (grain's mp_prefetch) -> batches of W windows x rows

Elements carry the positions of their streams (data/packing.py), so neither workers nor prefetching
are part of what is saved: a run may be resumed with another number of them.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

import grain
import numpy as np
from absl import flags

from data.batch import Batch
from data.options import DataConfig
from data.packing import PLACE, SEGMENT, Record, Row, StreamPacker, WholePacker
from data.stream import TARGET, TARGET_BYTES, TOKEN, WEIGHT, Corpus

# What reaches a whole process group: from a terminal, Slurm or systemd. It is for the parent, which
# decides what to finish.
_FOR_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class HostBatch(NamedTuple):
    """A batch of this host's rows, in NumPy, and where the streams stand behind it."""

    batch: Batch
    records: np.ndarray  # [rows here, RECORD_SIZE] int64
    live: bool  # some row holds a token


def batches(
    corpus: Corpus,
    config: DataConfig,
    *,
    rows: list[int],
    records: np.ndarray,
    windows: int,
    workers: int,
    positions: bool = False,
) -> grain.IterDataset:
    """Returns an endless dataset of `HostBatch`es; after the last epoch they are padding.

    rows: the global numbers of this host's rows. records [rows here, RECORD_SIZE]: where each of
    their streams goes on.
    """
    dataset = RowDataset(corpus, config.packing, config.packing_bins)
    dataset.rows = list(zip(rows, records.tolist()))
    workers = shared_out(len(rows), workers)
    if workers:
        if not flags.FLAGS.is_parsed():
            # Grain reads flags of its own here, which outside an absl program nobody parsed.
            flags.FLAGS.mark_as_parsed()
        options = grain.multiprocessing.MultiprocessingOptions(
            num_workers=workers, per_worker_buffer_size=max(1, 2 * windows * len(rows) // workers)
        )
        dataset = dataset.mp_prefetch(options, worker_init_fn=_set_up_worker)
    return dataset.batch(
        windows * len(rows), batch_fn=lambda made: _stack(made, windows, positions)
    )


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
    """For the start of a pipeline with workers: keeps the parent's signals from them at once.

    They inherit it, through the threads that start them. It takes them seconds to get as far as
    `_set_up_worker`, and one that dies before leaves grain waiting for ever.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_PARENT)
    try:
        # The process that clears up after workers needs it too, and its start unblocks two of them.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_PARENT)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _set_up_worker(index: int, count: int) -> None:
    """Makes a worker live as long as its parent does, no shorter and no longer."""
    del index, count
    # Grain ends a worker by an event, at last by SIGKILL, so nobody needs these.
    for number in _FOR_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    """Ends this process once its parent is gone, be it by SIGKILL."""
    parent.join()
    os._exit(1)


def shared_out(rows: int, workers: int) -> int:
    """Returns the largest number of workers, up to `workers`, that get equally many rows."""
    return max((n for n in range(1, min(rows, workers) + 1) if rows % n == 0), default=0)


def _stack(made: list[dict[str, np.ndarray]], windows: int, positions: bool) -> HostBatch:
    """Rows of window 0, then rows of window 1, ... -> arrays [W, B, T]."""
    table = np.stack([row["table"] for row in made])
    table = table.reshape(windows, -1, *table.shape[1:])
    field = np.ascontiguousarray(np.moveaxis(table, -1, 0))
    batch = Batch(
        tokens=field[TOKEN],
        targets=field[TARGET],
        segment_ids=field[SEGMENT],
        positions=field[PLACE] if positions else None,
        loss_weights=field[WEIGHT].astype(np.float32),
        target_bytes=field[TARGET_BYTES],
        continues=np.asarray([bool(row["continues"]) for row in made]).reshape(windows, -1),
    )
    last = made[-len(made) // windows :]
    records = np.stack([row["record"] for row in last])
    return HostBatch(batch, records, bool(field[SEGMENT, ..., 0].any()))


class RowDataset(grain.IterDataset):
    """The next row of each stream in turn, without end.

    rows: (stream, its record as ints) for each. A worker process takes every n-th of them, which is
    every n-th element too as long as n divides their number.
    """

    def __init__(self, corpus: Corpus, packing: str, bins: int):
        super().__init__()
        self._corpus = corpus
        self._packing = packing
        self._bins = bins
        self.rows: list[tuple[int, list[int]]] = []

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Called by grain in a worker process, for its share."""
        del sequential_slice
        self.rows = self.rows[sl]

    def __iter__(self) -> "_RowIterator":
        packers: list[StreamPacker | WholePacker] = []
        for stream, ints in self.rows:
            record = Record.from_ints(ints)
            if self._packing == "stream":
                packers.append(StreamPacker(self._corpus, stream, record))
            else:
                packers.append(WholePacker(self._corpus, stream, record, self._bins))
        return _RowIterator(packers)


class _RowIterator(grain.DatasetIterator):
    def __init__(self, packers: list[StreamPacker | WholePacker]):
        super().__init__()
        self._packers = packers
        self._turn = 0

    def __next__(self) -> dict[str, np.ndarray]:
        row: Row = self._packers[self._turn].next_row()
        self._turn = (self._turn + 1) % len(self._packers)
        return {
            "table": row.table,
            "continues": np.asarray(row.continues),
            "record": np.asarray(row.record.to_ints(), np.int64),
        }

    # Grain asks for these around its queues. Positions travel with the rows instead.
    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("rows carry their positions; make a new dataset to go elsewhere")


def count_batches(
    corpus: Corpus, config: DataConfig, records: np.ndarray, *, windows: int, limit: int
) -> int:
    """Returns after how many batches, at most `limit`, the longest of all streams ends.

    Reads every stream once. Hosts with different rows need it to stop together.
    """
    longest = 0
    for stream, ints in enumerate(records.tolist()):
        dataset = RowDataset(corpus, config.packing, config.packing_bins)
        dataset.rows = [(stream, ints)]
        rows = 0
        for row in dataset:
            if not row["table"][0, SEGMENT] or rows >= limit * windows:
                break
            rows += 1
        longest = max(longest, -(-rows // windows))
        if longest >= limit:
            return limit
    return longest
