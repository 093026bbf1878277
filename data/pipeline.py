"""Assembles the rows that this host holds into batches, on the host.

    rows of streams, in this process or in workers -> batches of W windows x rows

Every row comes with the position of its stream (data/packing.py), so neither workers nor prefetched
batches are part of the saved position: a run may be resumed with another number of workers.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from data.batch import Batch
from data.mixture import Mixture
from data.options import DataConfig
from data.packing import PLACE, RECORD_SIZE, SEGMENT, Record, Row, StreamPacker, WholePacker
from data.stream import TARGET, TARGET_BYTES, TOKEN, WEIGHT
from data.workers import Workers


class HostBatch(NamedTuple):
    """A batch of this host's rows, as NumPy arrays, and the positions of the streams after it."""

    batch: Batch
    records: np.ndarray  # [rows here, sources * RECORD_SIZE] int64
    live: bool  # whether any row holds a token


@dataclasses.dataclass(frozen=True)
class Rows:
    """Yields the next row of each of its streams in turn, endlessly; pickled to workers.

    streams: (number, records of all sources as ints) of each stream.
    """

    mixture: Mixture
    packing: str
    bins: int
    streams: list[tuple[int, list[int]]]

    def __call__(self) -> Iterator[Row]:
        packers = [self._packer(stream, records_of(ints)) for stream, ints in self.streams]
        while True:
            for packer in packers:
                yield packer.next_row()

    def _packer(self, stream: int, records: list[Record]) -> StreamPacker | WholePacker:
        if self.packing == "stream":
            return StreamPacker(self.mixture, stream, records)
        (corpus,), (record,) = self.mixture.corpora, records
        return WholePacker(corpus, stream, record, self.bins)


def records_of(ints: list[int]) -> list[Record]:
    """A stream's records, of each source, from the ints of all."""
    return [
        Record.from_ints(ints[start : start + RECORD_SIZE])
        for start in range(0, len(ints), RECORD_SIZE)
    ]


class Batches:
    """An endless iterator of `HostBatch`es; after the last epoch they hold only padding.

    Args:
        rows: the global numbers of this host's rows.
        records: where each of their streams continues, [rows here, sources * RECORD_SIZE].
        workers: maximum number of workers; the largest one that divides the rows is used. 0: none.
    """

    def __init__(
        self,
        mixture: Mixture,
        config: DataConfig,
        *,
        rows: list[int],
        records: np.ndarray,
        windows: int,
        workers: int,
        positions: bool = False,
    ):
        streams = list(zip(rows, records.tolist()))
        work = functools.partial(Rows, mixture, config.packing, config.packing_bins)
        self._count = windows * len(rows)
        self._windows = windows
        self._positions = positions
        self._workers: Workers | None = None
        self._rows: Iterator[Row]
        if used := shared_out(len(rows), workers):
            # Each worker gets every n-th stream, so rows taken from workers in turn are in order.
            works = [work(streams[number::used]) for number in range(used)]
            self._rows = self._workers = Workers(works, max(1, 2 * self._count // used))
        else:
            self._rows = work(streams)()

    def __iter__(self) -> Iterator[HostBatch]:
        return self

    def __next__(self) -> HostBatch:
        rows = [next(self._rows) for _ in range(self._count)]
        return _stack(rows, self._windows, self._positions)

    def stop(self) -> None:
        """Stops the workers, which also ends another thread's wait for one of their rows."""
        if self._workers:
            self._workers.kill()

    def close(self) -> None:
        if self._workers:
            self._workers.close()


def shared_out(rows: int, workers: int) -> int:
    """Returns the largest number of workers, up to `workers`, that divides the rows."""
    return max((n for n in range(1, min(rows, workers) + 1) if rows % n == 0), default=0)


def _stack(made: list[Row], windows: int, positions: bool) -> HostBatch:
    """Stacks the rows of window 0, then of window 1, ... into arrays [W, B, T]."""
    table = np.stack([row.table for row in made])
    table = table.reshape(windows, -1, *table.shape[1:])
    field = np.ascontiguousarray(np.moveaxis(table, -1, 0))
    batch = Batch(
        tokens=field[TOKEN],
        targets=field[TARGET],
        segment_ids=field[SEGMENT],
        positions=field[PLACE] if positions else None,
        loss_weights=field[WEIGHT].astype(np.float32),
        target_bytes=field[TARGET_BYTES],
        continues=np.asarray([row.continues for row in made]).reshape(windows, -1),
    )
    last = made[-len(made) // windows :]
    records = [[number for record in row.records for number in record.to_ints()] for row in last]
    return HostBatch(batch, np.asarray(records, np.int64), bool(field[SEGMENT, ..., 0].any()))


def count_batches(
    mixture: Mixture, config: DataConfig, records: np.ndarray, *, windows: int, limit: int
) -> int:
    """Returns after how many batches, at most `limit`, the longest of all streams ends.

    Reads every stream once. Hosts that hold different rows need the result to stop together.
    """
    longest = 0
    for stream, ints in enumerate(records.tolist()):
        rows = 0
        for row in Rows(mixture, config.packing, config.packing_bins, [(stream, ints)])():
            if not row.live or rows >= limit * windows:
                break
            rows += 1
        longest = max(longest, -(-rows // windows))
        if longest >= limit:
            return limit
    return longest
