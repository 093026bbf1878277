"""The loader: batches on the mesh, prepared ahead of the step, with a position that can be saved.

Each host reads the streams of the rows that its devices hold. Hosts that hold the same rows (if the
context axis crosses processes) read the same documents, and each places its own tokens.
"""

import hashlib
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data.assignment import DocumentAssigner, Position, SavedAssignment
from data.batch import Batch
from data.checks import ROWS, check_documents, check_mesh
from data.documents import DocumentSource, open_source
from data.identity import (
    Identity,
    differences,
    identity_of,
    option_of,
    other_documents,
    why_not_continue,
)
from data.mixture import Mixture
from data.options import DataConfig, check, mixture_weights, parts_of
from data.packing import RECORD_SIZE, Record
from data.pipeline import Batches, HostBatch, count_batches
from data.prefetch import Prefetcher
from data.stream import Corpus, Counts
from data.tokenizer import Tokenizer, make_tokenizer
from data.totals import broken_warning, sum_counts, summary
from errors import UserError

# Evaluation does not shuffle documents, but a seed still breaks ties between streams.
_EVAL_SEED = 0
_NO_LIMIT = 1 << 40
# Between the seeds of a mixture's sources: equal ones would shuffle equal numbers alike.
_SEEDS_APART = 1_000_003
# Index of a record's count of tokens; its count of padding follows.
_MADE = RECORD_SIZE - 2
_VERSION = 2
_WAIT_SECONDS = 1.0
# Batches that several processes wait for before a step, so that all learn of an error in time: a
# process votes with step N, and the vote is read after step N + 1 has been dispatched.
LOOK_AHEAD = 2


def make_loader(
    config: DataConfig,
    *,
    split: str,
    mesh: Mesh,
    seed: int,
    windows: int = 1,
    max_batches: int = 0,
    positions: bool = False,
    log: Callable[[str], None] | None = None,
) -> "Loader":
    """Opens a split's documents and returns a loader positioned at their beginning.

    All processes must call it together.

    Args:
        split: "train" (shuffled by seed and epoch; endless if config.epochs is 0) or "eval" (one
            pass in a fixed order, the same every time, without worker processes).
        windows: consecutive rows of each stream in a batch.
        max_batches: stop after this many batches; 0: no limit.
        positions: whether batches hold the positions of tokens in their documents, for a model
            that reads them.
        log: called with a line when many documents are broken; by default process 0 prints it.

    Raises:
        UserError: the configuration or the files cannot work; one line that names the option.
    """
    check(config)
    tokenizer = make_tokenizer(config.tokenizer, config.bos_token, config.eos_token)
    sources = tuple(open_source(part, split) for part in parts_of(config))
    check_mesh(config, mesh.shape)
    if split == "train":
        for source in sources:
            check_documents(config, source, mesh.shape)
    loader = Loader(
        sources,
        tokenizer,
        config,
        split,
        mesh,
        seed=seed,
        windows=windows,
        max_batches=max_batches,
        positions=positions,
        log=log or _print_once,
    )
    loader.check_processes()
    return loader


class _Placed(NamedTuple):
    batch: Batch
    records: np.ndarray
    live: bool


class Loader:
    """An iterator of `Batch`es of global arrays [W, B, T], sharded over the mesh.

    Arrays are sharded by P(None, ROWS, "context"), `continues` by P(None, ROWS). A thread prepares
    and places `config.prefetch` batches ahead; it starts with the first request or with `start()`.

    Iterating again continues a training loader where it was, and restarts an evaluation loader.
    """

    def __init__(
        self,
        sources: tuple[DocumentSource, ...],
        tokenizer: Tokenizer,
        config: DataConfig,
        split: str,
        mesh: Mesh,
        *,
        seed: int,
        windows: int,
        max_batches: int,
        positions: bool,
        log: Callable[[str], None],
    ):
        self.sources = sources
        self.tokenizer = tokenizer
        self._config = config
        self._split = split
        self._seed = seed if split == "train" else _EVAL_SEED
        self._windows = windows
        self._positions = positions
        self._max_batches = max_batches or _NO_LIMIT
        self._log = log
        self._announced = False
        self._sharding = NamedSharding(mesh, PartitionSpec(None, ROWS, "context"))
        self._flags_sharding = NamedSharding(mesh, PartitionSpec(None, ROWS))
        self._rows = rows_here(self._flags_sharding, config.global_batch_size)
        self._batches_out = 0
        self._previous: SavedAssignment | None = None  # if the batch size or seed has changed
        self._mixture = self._assign()
        # Of all rows; up to date only for the rows of this host.
        self._records = self._start()
        self._total: int | None = None
        self._running: list[_Running] = []  # the pipeline, or empty
        self._ahead: list[_Placed] = []  # the batch that has_more looked at, or empty
        # Also at exit: the thread must not place arrays while JAX shuts down.
        weakref.finalize(self, _close, self._running)

    def _assign(self) -> Mixture:
        corpora = [self._corpus(number) for number in range(len(self.sources))]
        return Mixture(tuple(corpora), mixture_weights(self._config))

    def _corpus(self, number: int) -> Corpus:
        train = self._split == "train"
        assigner = DocumentAssigner(
            self.sources[number].sizes,
            streams=self._config.global_batch_size,
            seed=self._seed + number * _SEEDS_APART,
            epochs=self._config.epochs if train else 1,
            shuffle=train,
            previous=self._previous,
        )
        length = self._config.sequence_length
        return Corpus(self.sources[number], self.tokenizer, assigner, length)

    def _start(self) -> np.ndarray:
        """[rows, sources * RECORD_SIZE]: the beginning of every stream."""
        record = Record().to_ints() * len(self.sources)
        return np.asarray([record] * self._config.global_batch_size, np.int64)

    def __iter__(self) -> Iterator[Batch]:
        if self._split == "eval":
            total = self._total  # the count of a whole pass stays valid
            self._move_to(self._start(), 0)
            self._total = total
        return self

    def __next__(self) -> Batch:
        if not self.has_more():
            raise StopIteration
        placed = self._ahead.pop()
        self._batches_out += 1
        self._records[self._rows] = placed.records
        self._announce_broken()
        return placed.batch

    def ready(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds; returns whether `has_more` would now return at once."""
        if self._ahead or self._batches_out >= self._limit():
            return True
        return self.start().batches.ready(timeout)

    def has_more(self) -> bool:
        """Whether another batch follows, the same on every host.

        Prepares that batch, without changing the position.
        """
        if self._batches_out >= self._limit():
            return False
        try:
            while not self.ready(_WAIT_SECONDS):
                pass  # a signal handler may run
            if not self._ahead:
                self._ahead.append(self.start().batches.take())
        except BaseException:
            self.close()  # batches prepared ahead no longer follow the ones handed out
            raise
        placed = self._ahead[0]
        over = not placed.live and self._ends_by_itself()
        if over:
            # This batch is not handed out. The documents skipped at its end are counted; its
            # padding is not.
            of_sources = (len(self._records), len(self.sources), RECORD_SIZE)
            met = placed.records.reshape(of_sources)[..., :_MADE]
            self._records.reshape(of_sources)[..., :_MADE] = met
        return not over

    def error_ahead(self, timeout: float) -> tuple[bool, BaseException | None]:
        """Waits up to `timeout` seconds for LOOK_AHEAD batches after the last one handed out.

        Returns (whether they, or their end, are there; the error that one of them will raise).
        """
        wanted = min(LOOK_AHEAD, self._limit() - self._batches_out) - len(self._ahead)
        if wanted <= 0:
            return True, None
        return self.start().batches.error_within(wanted, timeout)

    def _ends_by_itself(self) -> bool:
        """Whether this host holds all rows, so that it sees when all of them have ended."""
        return len(self._rows) == self._config.global_batch_size

    def _limit(self) -> int:
        """Returns after how many batches to stop, the same on every host.

        First called right after the start or a move, when the records of all rows are known.
        """
        endless = self._split == "train" and not self._config.epochs
        if endless or self._ends_by_itself():
            return self._max_batches
        if self._total is None:
            self._total = self._batches_out + count_batches(
                self._mixture,
                self._config,
                self._records,
                windows=self._windows,
                limit=self._max_batches - self._batches_out,
            )
        return self._total

    def start(self) -> "_Running":
        """Starts preparing batches: workers take seconds to start, while the step compiles.

        Batches follow the current position, so call restore() first.
        """
        if not self._running:
            made = Batches(
                self._mixture,
                self._config,
                rows=self._rows,
                records=self._records[self._rows],
                windows=self._windows,
                workers=self._config.workers if self._split == "train" else 0,
                positions=self._positions,
            )
            place = _Placer(
                self._rows, self._config.global_batch_size, self._sharding, self._flags_sharding
            )
            ahead = max(self._config.prefetch, LOOK_AHEAD if jax.process_count() > 1 else 1)
            self._running.append(_Running(made, place, ahead))
        return self._running[0]

    def close(self) -> None:
        """Stops the thread and the worker processes. Iterating again starts new ones."""
        self._ahead.clear()
        _close(self._running)

    def state(self) -> dict[str, Any]:
        """Returns the position after the batch last handed out, as JSON values.

        It covers all rows of the run. All processes must call it together; all get the same value.
        """
        return {
            "version": _VERSION,
            "data": self._identity(),
            "batches": self._batches_out,
            "records": _of_all_rows(self._records, self._rows).tolist(),
            "previous": self._previous,
        }

    def restore(self, state: dict[str, Any]) -> str:
        """Moves to a saved position; the next batch is the one that followed it.

        Workers, prefetch, epochs, windows, mesh, processes, the folder and the names of the files
        may always differ; with "stream" packing, so may sequence_length.

        Returns:
            "" normally. If `config.data.on_data_change` allowed another batch size, another seed or
            other documents: a line that says so. Then no row continues its previous contents.

        Raises:
            UserError: the position belongs to other data.
        """
        if state.get("version") != _VERSION:
            raise UserError(
                f"data position: version {state.get('version')!r} is unknown; this program reads "
                f"{_VERSION}; start in a new --workdir"
            )
        records = np.asarray(state["records"], np.int64)
        changed = differences(state["data"], self._identity())
        if not changed:
            self._previous = state["previous"]
            self._move_to(records, state["batches"])
            return ""
        if self._config.on_data_change == "refuse":
            if why_not_continue(state["data"], self._identity()):
                raise UserError(f"{changed[0]}; set it back or start in a new --workdir")
            raise UserError(
                f"{changed[0]}; set it back, start in a new --workdir, or let the run continue "
                "with --config.data.on_data_change=continue"
            )
        return self._continue_changed(state, records, changed)

    def _continue_changed(
        self, state: dict[str, Any], records: np.ndarray, changed: list[str]
    ) -> str:
        """Continues from a position of another assignment, or of other documents."""
        saved, given = state["data"], self._identity()
        if why_not := why_not_continue(saved, given):
            raise UserError(f"{changed[0]}; {why_not}")
        start = self._start()
        if other_documents(saved, given):
            self._previous = None
            self._move_to(start, state["batches"])
            return f"{changed[0]}: reading the documents there from their beginning"
        old = [Record.from_ints(ints) for ints in records]
        positions = [[int(value) for value in record.position] for record in old]
        self._previous = SavedAssignment(
            positions=positions, seed=saved["seed"], previous=state["previous"]
        )
        self._mixture = self._assign()
        begin = Record(
            Position(block=self._mixture.corpora[0].assigner.first_block),
            Counts(*np.sum([record.counts for record in old], axis=0)),
            tokens=sum(record.tokens for record in old),
            padding=sum(record.padding for record in old),
        )
        start[:] = begin._replace(counts=Counts(), tokens=0, padding=0).to_ints()
        start[0] = begin.to_ints()  # the first row takes over the totals
        self._move_to(start, state["batches"])
        return f"{changed[0]}: the rest of the epoch is reassigned to {len(start)} rows"

    def _move_to(self, records: np.ndarray, batches_out: int) -> None:
        self.close()
        self._mixture = self._assign()
        self._total = None
        self._records = records
        self._batches_out = int(batches_out)

    def _identity(self) -> Identity:
        return identity_of(self._config, self.sources, self.tokenizer, self._seed)

    def check_processes(self) -> None:
        """Raises UserError if processes have other documents or options than process 0."""
        if jax.process_count() == 1:
            return
        identity = self._identity()
        values = [json.dumps(value).encode() for value in identity.values()]
        digests = b"".join(hashlib.sha256(value).digest() for value in values)
        mine = np.frombuffer(digests, np.int32).reshape(len(values), -1)
        every = np.asarray(multihost_utils.process_allgather(mine))
        process, name = np.nonzero((every != every[0]).any(axis=-1))
        if len(process):
            raise UserError(
                f"{option_of(list(identity)[name[0]])}: process {process[0]} reads other data than "
                "process 0; all need the same options and the same files"
            )

    def _announce_broken(self) -> None:
        """Logs a line, once, when many documents of this host are broken."""
        if not self._announced:
            counts = sum_counts(self._records[self._rows])
            described = " or ".join(source.described for source in self.sources)
            if line := broken_warning(self._split, counts, described):
                self._announced = True
                self._log(line)

    def counts(self) -> dict[str, int]:
        """Returns the counts of all rows' streams, up to the last batch.

        With "whole" packing, up to the position where the packer began to fill the current rows.
        All processes must call it together.

        The names are those of `data.stream.Counts`, plus `tokens` (real ones) and `padding`.
        """
        return sum_counts(_of_all_rows(self._records, self._rows))

    def progress(self) -> dict[str, float]:
        """Values to log, up to the last batch, estimated from this process's rows.

        learning/epoch: passes over the documents. Of a mixture: data/epoch_N and data/share_N for
        source N from 0 instead, the latter its share of the tokens so far.
        """
        part = len(self._rows) / len(self._records)
        of_sources = (len(self._rows), len(self.sources), RECORD_SIZE)
        records = self._records[self._rows].reshape(of_sources)
        counts = [sum_counts(records[:, number]) for number in range(len(self.sources))]
        epochs = [
            (met["documents"] + met["empty"] + met["broken"]) / part / max(len(source), 1)
            for met, source in zip(counts, self.sources)
        ]
        if not self._config.mixture:
            return {"learning/epoch": epochs[0]}
        values = {f"data/epoch_{number}": epoch for number, epoch in enumerate(epochs)}
        total = max(sum(met["tokens"] for met in counts), 1)
        shares = {
            f"data/share_{number}": met["tokens"] / total for number, met in enumerate(counts)
        }
        return values | shares

    def summary(self) -> str:
        """Returns the counts in one line. All processes must call it together."""
        return summary(self._split, self.counts())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Running:
    """A pipeline and the prefetch thread that runs it."""

    def __init__(self, made: Batches, place: "_Placer", ahead: int):
        self._made = made
        self.batches = Prefetcher(lambda: place(next(made)), ahead)

    def close(self) -> None:
        self._made.stop()
        self.batches.close()
        self._made.close()


class _Placer:
    """Puts a host's batch on its devices, as part of the global arrays."""

    def __init__(
        self, rows: list[int], all_rows: int, sharding: NamedSharding, flags_sharding: NamedSharding
    ):
        self._place = {row: place for place, row in enumerate(rows)}
        self._all_rows = all_rows
        self._sharding = sharding
        self._flags_sharding = flags_sharding

    def __call__(self, made: HostBatch) -> _Placed:
        fields = (None if field is None else self._to_devices(field) for field in made.batch)
        return _Placed(Batch(*fields), made.records, made.live)

    def _to_devices(self, field: np.ndarray) -> jax.Array:
        """[W, rows here, T] or [W, rows here] -> the global array."""
        sharding = self._sharding if field.ndim == 3 else self._flags_sharding
        shape = (field.shape[0], self._all_rows, *field.shape[2:])

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # every device holds a part
            windows, rows, *tokens = index
            start, stop, _ = rows.indices(self._all_rows)
            here = self._place[start]
            return field[(windows, slice(here, here + stop - start), *tokens)]

        return jax.make_array_from_callback(shape, sharding, part)


def rows_here(flags_sharding: NamedSharding, rows: int) -> list[int]:
    """Returns the global numbers of the rows that this process's devices hold, ascending."""
    held = flags_sharding.addressable_devices_indices_map((1, rows)).values()
    return sorted({row for index in held if index for row in range(*index[1].indices(rows))})


def _print_once(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def _close(running: list[_Running]) -> None:
    while running:
        running.pop().close()


def _of_all_rows(records: np.ndarray, rows: list[int]) -> np.ndarray:
    """Returns the records of all rows, each row from a process that holds it."""
    if jax.process_count() == 1:
        return records
    held = np.zeros((len(records), 1), np.int64)
    held[rows] = 1
    # As int32, because JAX would truncate 64-bit integers.
    mine = np.concatenate([records, held], axis=1).view(np.int32)
    gathered = np.asarray(multihost_utils.process_allgather(mine)).view(np.int64)
    first = np.argmax(gathered[:, :, -1], axis=0)
    return gathered[first, np.arange(len(records)), :-1]
