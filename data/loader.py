"""Batches on the mesh, made ahead of the step, with a position that can be saved.

Rows are what hosts share out: a host reads the streams of the rows that its devices hold, so hosts
on the same rows (a context axis across processes) read the same and each places its own tokens.
"""

import contextlib
import hashlib
import json
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import grain
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data.assignment import DocumentAssigner, Position, SavedAssignment
from data.batch import Batch
from data.documents import DocumentSource, open_source
from data.options import DataConfig, check
from data.packing import RECORD_SIZE, Record
from data.pipeline import HostBatch, batches, count_batches, starting_workers
from data.stream import Corpus, Counts
from data.tokenizer import Tokenizer, make_tokenizer

ROWS = ("data", "fsdp")
# Evaluation's order is the documents' own; its deal still needs a seed for ties.
_EVAL_SEED = 0
_NO_LIMIT = 1 << 40
# Where a record's numbers of tokens and of padding begin.
_MADE = RECORD_SIZE - 2


def make_loader(
    config: DataConfig,
    *,
    split: str,
    mesh: Mesh,
    seed: int,
    windows: int = 1,
    max_batches: int = 0,
    positions: bool = False,
) -> "Loader":
    """Opens a split's documents and returns a loader at their beginning.

    split: "train" (shuffled by seed and epoch; without end where config.epochs is 0) or "eval" (one
    pass in fixed order, the same every time, without worker processes). windows: consecutive rows
    of each stream in a batch. max_batches: stop after so many; 0 for no limit. positions: whether
    batches hold the positions of tokens in their documents, for a model that reads them.

    Raises ValueError, in one line that names the option, for whatever in the configuration or the
    files cannot work. Where there are several processes all have to call it together.
    """
    check(config)
    tokenizer = make_tokenizer(config.tokenizer, config.bos_token, config.eos_token)
    source = open_source(config, split)
    _check_mesh(config, mesh)
    if split == "train":
        _check_documents(config, source, mesh)
    loader = Loader(
        source,
        tokenizer,
        config,
        split,
        mesh,
        seed=seed,
        windows=windows,
        max_batches=max_batches,
        positions=positions,
    )
    loader.check_processes()
    return loader


def _check_mesh(config: DataConfig, mesh: Mesh) -> None:
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    for name, given, parts, axes in (
        ("global_batch_size", config.global_batch_size, shards, "mesh.data * mesh.fsdp"),
        ("sequence_length", config.sequence_length, mesh.shape["context"], "mesh.context"),
    ):
        if given % parts:
            near = sorted({max(given // parts, 1) * parts, (given // parts + 1) * parts})
            raise ValueError(
                f"config.data.{name}={given}: needs a multiple of {axes} = {parts}, such as "
                + " or ".join(str(value) for value in near)
            )


def _check_documents(config: DataConfig, source: DocumentSource, mesh: Mesh) -> None:
    """Refuses an endless training in which streams would be assigned nothing epoch after epoch.

    They go on at once to the next epoch, so that all of them soon read the same texts in lockstep.
    With a number of epochs they end, and their rows are padded.
    """
    found = int(np.count_nonzero(source.sizes))
    if config.epochs or found >= config.global_batch_size:
        return
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    fewer = found // shards * shards
    raise ValueError(
        f"config.data.global_batch_size={config.global_batch_size}: needs at least as many "
        "training documents, or rows would read the same text at the same steps; there "
        f"{'is' if found == 1 else 'are'} {found}; "
        + (f"try --config.data.global_batch_size={fewer}, or cut" if fewer else "cut")
        + f" {'it' if found == 1 else 'them'} into more documents"
    )


class _Placed(NamedTuple):
    batch: Batch
    records: np.ndarray
    live: bool


class Loader:
    """An iterator of `Batch`es of global arrays [W, B, T], sharded over the mesh.

    Arrays lie P(None, ("data", "fsdp"), "context"), `continues` P(None, ("data", "fsdp")). A thread
    makes and places `config.prefetch` batches ahead, from the first one asked for or `start()` on.

    A training loader goes on where it was when iterated again; an evaluation loader starts over.
    """

    def __init__(
        self,
        source: DocumentSource,
        tokenizer: Tokenizer,
        config: DataConfig,
        split: str,
        mesh: Mesh,
        *,
        seed: int,
        windows: int,
        max_batches: int,
        positions: bool,
    ):
        self.source = source
        self.tokenizer = tokenizer
        self._config = config
        self._split = split
        self._seed = seed if split == "train" else _EVAL_SEED
        self._windows = windows
        self._positions = positions
        self._max_batches = max_batches or _NO_LIMIT
        self._sharding = NamedSharding(mesh, PartitionSpec(None, ROWS, "context"))
        self._flags_sharding = NamedSharding(mesh, PartitionSpec(None, ROWS))
        self._rows = rows_here(self._flags_sharding, config.global_batch_size)
        self._batches_out = 0
        self._previous: SavedAssignment | None = None  # where the batch size or seed had changed
        self._corpus = self._assign()
        self._records = _start(
            config.global_batch_size
        )  # of all rows; kept up for the rows held here
        self._total: int | None = None
        # The running pipeline's iterator, or nothing. A list, so that closing it lets go of it:
        # also at interpreter exit, as a thread must not place arrays while JAX is taken down.
        self._running: list[Any] = []
        self._ahead: list[_Placed] = []  # the batch that has_more looked at, or nothing
        weakref.finalize(self, _close, self._running)

    def _assign(self) -> Corpus:
        train = self._split == "train"
        assigner = DocumentAssigner(
            self.source.sizes,
            streams=self._config.global_batch_size,
            seed=self._seed,
            epochs=self._config.epochs if train else 1,
            shuffle=train,
            previous=self._previous,
        )
        return Corpus(self.source, self.tokenizer, assigner, self._config.sequence_length)

    def __iter__(self) -> Iterator[Batch]:
        if self._split == "eval":
            total = self._total  # of a whole pass, so still right
            self._move_to(_start(self._config.global_batch_size), 0)
            self._total = total
        return self

    def __next__(self) -> Batch:
        if not self.has_more():
            raise StopIteration
        placed = self._ahead.pop()
        self._batches_out += 1
        self._records[self._rows] = placed.records
        return placed.batch

    def has_more(self) -> bool:
        """Whether another batch follows, the same on every host. It is made; the position stays."""
        if self._batches_out >= self._limit():
            return False
        self.start()
        try:
            if not self._ahead:
                self._ahead.append(next(self._running[0]))
        except BaseException:
            self.close()  # what the thread had made ahead is behind a gap now
            raise
        placed = self._ahead[0]
        over = not placed.live and self._ends_by_itself()
        if over:
            # This batch is not handed out. What it met at the end, such as empty documents, counts;
            # its padding does not.
            self._records[:, :_MADE] = placed.records[:, :_MADE]
        return not over

    def _ends_by_itself(self) -> bool:
        """This host holds all rows, so it sees when they have all ended."""
        return len(self._rows) == self._config.global_batch_size

    def _limit(self) -> int:
        """Returns after how many batches to stop, the same on every host.

        It is first asked right after the start or a move, when the records of all rows are known.
        """
        endless = self._split == "train" and not self._config.epochs
        if endless or self._ends_by_itself():
            return self._max_batches
        if self._total is None:
            self._total = self._batches_out + count_batches(
                self._corpus,
                self._config,
                self._records,
                windows=self._windows,
                limit=self._max_batches - self._batches_out,
            )
        return self._total

    def start(self) -> None:
        """Begins to make batches ahead: workers take seconds to start, as the step does to compile.

        What it makes follows the present position, so restore() comes first.
        """
        if not self._running:
            workers = self._config.workers if self._split == "train" else 0
            with starting_workers() if workers else contextlib.nullcontext():
                self._running.append(self._pipeline(workers))
                self._running[0].start_prefetch()

    def _pipeline(self, workers: int) -> Any:
        dataset = batches(
            self._corpus,
            self._config,
            rows=self._rows,
            records=self._records[self._rows],
            windows=self._windows,
            workers=workers,
            positions=self._positions,
        )
        place = _Placer(
            self._rows, self._config.global_batch_size, self._sharding, self._flags_sharding
        )
        placed = grain.experimental.ThreadPrefetchIterDataset(
            dataset.map(place), prefetch_buffer_size=self._config.prefetch
        )
        return iter(placed)

    def close(self) -> None:
        """Ends the thread and the worker processes. Iterating again starts new ones."""
        self._ahead.clear()
        _close(self._running)

    def state(self) -> dict[str, Any]:
        """Returns the position behind the batch last handed out, as JSON's own types.

        It is the whole run's: on several processes all must call it together, and all get the same.
        """
        return {
            "version": 1,
            "data": self._identity(),
            "batches": self._batches_out,
            "records": _of_all_rows(self._records, self._rows).tolist(),
            "previous": self._previous,
        }

    def restore(self, state: dict[str, Any]) -> str:
        """Goes to a saved position; the next batch is the one that followed it.

        Returns "", or a line that says what happened where `config.data.on_data_change` allowed
        other rows, another seed or other documents. Then no row continues what it held before.

        Raises ValueError, in one line that names what differs, where the position belongs to other
        data. Workers, prefetch, epochs, windows, mesh and processes may always differ, and in
        "stream" packing sequence_length.
        """
        if state.get("version") != 1:
            raise ValueError(
                f"data position: version {state.get('version')!r} is unknown; this program reads 1"
            )
        records = np.asarray(state["records"], np.int64).reshape(-1, RECORD_SIZE)
        changed = differences(state["data"], self._identity())
        if not changed:
            self._previous = state["previous"]
            self._move_to(records, state["batches"])
            return ""
        if self._config.on_data_change == "refuse":
            if _why_not_go_on(state["data"], self._identity()):
                raise ValueError(f"{changed[0]}; set it back or start in a new --workdir")
            raise ValueError(
                f"{changed[0]}; set it back, start in a new --workdir, or let the run go on with "
                "--config.data.on_data_change=continue"
            )
        return self._go_on(state, records, changed)

    def _go_on(self, state: dict[str, Any], records: np.ndarray, changed: list[str]) -> str:
        """Goes on from a position of another deal, or of other documents."""
        saved, given = state["data"], self._identity()
        if why_not := _why_not_go_on(saved, given):
            raise ValueError(f"{changed[0]}; {why_not}")
        start = _start(self._config.global_batch_size)
        if _other_documents(saved, given):
            self._previous = None
            self._move_to(start, state["batches"])
            return f"{changed[0]}: reading the documents there from their beginning"
        old = [Record.from_ints(ints) for ints in records]
        positions = [[int(value) for value in record.position] for record in old]
        self._previous = SavedAssignment(
            positions=positions, seed=saved["seed"], previous=state["previous"]
        )
        self._corpus = self._assign()
        begin = Record(
            Position(block=self._corpus.assigner.first_block),
            Counts(*np.sum([record.counts for record in old], axis=0)),
            tokens=sum(record.tokens for record in old),
            padding=sum(record.padding for record in old),
        )
        start[:] = begin._replace(counts=Counts(), tokens=0, padding=0).to_ints()
        start[0] = begin.to_ints()  # the totals go on with one of the rows
        self._move_to(start, state["batches"])
        return f"{changed[0]}: what is left of the epoch is assigned anew to {len(start)} rows"

    def _move_to(self, records: np.ndarray, batches_out: int) -> None:
        self.close()
        self._corpus = self._assign()
        self._total = None
        self._records = records
        self._batches_out = int(batches_out)

    def _identity(self) -> dict[str, Any]:
        """What has to be the same for a position to mean the same."""
        config = self._config
        identity = {
            "source": config.source,
            "path": self.source.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
            "packing": config.packing,
            "global_batch_size": config.global_batch_size,
            "seed": self._seed,
        }
        if config.packing == "whole":
            identity["sequence_length"] = config.sequence_length
            identity["packing_bins"] = config.packing_bins
        return identity

    def check_processes(self) -> None:
        """Raises ValueError where processes see other documents or options than the first does."""
        if jax.process_count() == 1:
            return
        identity = self._identity()
        values = [json.dumps(value).encode() for value in identity.values()]
        digests = b"".join(hashlib.sha256(value).digest() for value in values)
        mine = np.frombuffer(digests, np.int32).reshape(len(values), -1)
        every = np.asarray(multihost_utils.process_allgather(mine))
        process, name = np.nonzero((every != every[0]).any(axis=-1))
        if len(process):
            raise ValueError(
                f"{_option(list(identity)[name[0]])}: process {process[0]} reads other data than "
                "process 0; all need the same options and the same files"
            )

    def counts(self) -> dict[str, int]:
        """Returns what the streams of this host's rows have met, up to the last batch.

        In "whole" packing up to where the rows now being handed out began to be filled.

        The names are those of `data.stream.Counts`, with `tokens` (real ones) and `padding`.
        """
        records = [Record.from_ints(ints) for ints in self._records[self._rows]]
        totals = np.sum([record.counts for record in records], axis=0)
        return {
            **dict(zip(Counts._fields, (int(value) for value in totals))),
            "tokens": sum(record.tokens for record in records),
            "padding": sum(record.padding for record in records),
        }

    def summary(self) -> str:
        """Returns the counts in one line."""
        counts = self.counts()
        places = counts["tokens"] + counts["padding"]
        share = 100 * counts["padding"] / max(places, 1)
        return (
            f"data ({self._split}): {counts['documents']:,} documents, {counts['tokens']:,} tokens "
            f"and {share:.1f}% padding; skipped {counts['empty']:,} empty, {counts['broken']:,} "
            f"broken; {counts['invalid_utf8']:,} with invalid UTF-8, {counts['one_byte']:,} of one "
            f"byte, {counts['longer_than_row']:,} longer than a row"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        batch = Batch(*fields)
        return _Placed(batch, made.records, made.live)

    def _to_devices(self, field: np.ndarray) -> jax.Array:
        """[W, rows here, T] or [W, rows here] -> the global array."""
        sharding = self._sharding if field.ndim == 3 else self._flags_sharding
        shape = (field.shape[0], self._all_rows, *field.shape[2:])

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # each device has its part
            windows, rows, *tokens = index
            start, stop, _ = rows.indices(self._all_rows)
            here = self._place[start]
            return field[(windows, slice(here, here + stop - start), *tokens)]

        return jax.make_array_from_callback(shape, sharding, part)


def rows_here(flags_sharding: NamedSharding, rows: int) -> list[int]:
    """Returns the global numbers of the rows that this process's devices hold, ascending."""
    held = flags_sharding.addressable_devices_indices_map((1, rows)).values()
    return sorted({row for index in held if index for row in range(*index[1].indices(rows))})


def _start(rows: int) -> np.ndarray:
    return np.asarray([Record().to_ints()] * rows, np.int64)


def _close(running: list[Any]) -> None:
    while running:
        running.pop().close()


def _of_all_rows(records: np.ndarray, rows: list[int]) -> np.ndarray:
    """Returns [all rows, RECORD_SIZE], each row from a process that holds it."""
    if jax.process_count() == 1:
        return records
    held = np.zeros((len(records), 1), np.int64)
    held[rows] = 1
    # As int32: JAX would cut 64-bit numbers off.
    mine = np.concatenate([records, held], axis=1).view(np.int32)
    gathered = np.asarray(multihost_utils.process_allgather(mine)).view(np.int64)
    first = np.argmax(gathered[:, :, -1], axis=0)
    return gathered[first, np.arange(len(records)), :-1]


def differences(saved: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """Returns a line for each thing that a saved position and this run do not have in common."""
    lines = []
    for name in dict.fromkeys([*saved, *given]):
        if saved.get(name) != given.get(name):
            was, now = json.dumps(saved.get(name)), json.dumps(given.get(name))
            lines.append(
                f"{_option(name)}: the saved data position is for {was}, this run has {now}"
            )
    return lines


def _other_documents(saved: dict[str, Any], given: dict[str, Any]) -> bool:
    """Tells whether two loaders' identities are of different documents."""
    return (saved["source"], saved["path"]) != (given["source"], given["path"])


def _why_not_go_on(saved: dict[str, Any], given: dict[str, Any]) -> str:
    """Returns why no loader can go on from a saved identity that differs; "" where one can."""
    if saved["tokenizer"] != given["tokenizer"]:
        return "a model cannot go on with other ids"
    if "whole" in (saved["packing"], given["packing"]) and not _other_documents(saved, given):
        return "only packing 'stream' can be assigned anew"
    return ""


def _option(name: str) -> str:
    """Returns the option behind a part of a loader's identity."""
    return "config.train.seed" if name == "seed" else f"config.data.{name}"
