"""Assigns documents to streams: which stream reads which documents, and in which order.

The assignment depends only on the seed, the epoch and the documents' sizes, so every host computes
the same one and then reads only the documents of its rows.

1. The order of an epoch is a shuffle of all documents, seeded by the epoch. It is assigned in
   blocks of at most BLOCK documents, so that neither a new run nor a resumed one waits for more
   than one block, however large the corpus. (The shuffle is NumPy's. Grain's shuffle computes one
   index at a time without a table, which takes 10 us per index in a large corpus and 10 ms in one
   of three documents; a table of 100 million indices takes NumPy seconds and 0.8 GB.)
2. The documents of a block are assigned largest first, each to the stream with the fewest bytes so
   far. "Largest" is by size class (powers of two); within a class the order of the epoch decides,
   so documents are grouped differently in every epoch. Assigning the small documents last keeps
   the streams within a few small documents of each other. Assigning document j to stream j mod rows
   would let them differ by the largest documents.
3. A stream reads its documents in the order of the epoch, then continues with the next block.

Nothing is padded between epochs, and each stream reads the documents of epoch e before those of
e + 1. After the last epoch, streams that end early are padded until the longest ends. A stream that
has no documents in a block (the last of an epoch, or if there are fewer documents than rows)
continues with the next block. With fewer documents than rows, all blocks would be alike and all
streams would soon be in lockstep, so make_loader refuses this for training without a number of
epochs.

Sizes serve only to balance the streams: bytes, or an estimate if the format does not record them.

When a run continues with a different number of streams, the unread rest of the current blocks is
reassigned. Documents that were partly read continue where they were left.
"""

import heapq
from typing import Any, NamedTuple, TypedDict

import numpy as np

# Documents assigned at a time. It takes about 0.1 s, and is far more than the rows of a batch.
BLOCK = 65_536


class Position(NamedTuple):
    """Everything needed to continue a stream with its next token."""

    block: int = 0
    ordinal: int = 0  # of the document, among those of the stream in this block
    byte: int = 0  # where the span being read starts in the document
    token: int = 0  # tokens of that span already read
    place: int = 0  # tokens of the document already read
    invalid: int = 0  # 1 if a span of the document read so far is not valid UTF-8


class DocumentAssigner:
    """Assigns the documents 0 .. len(sizes) - 1 to `streams` streams, block by block.

    Blocks are numbered over all epochs: block b is part of epoch b // blocks_per_epoch.

    Args:
        sizes: bytes of each document, [n]; estimates are enough.
        epochs: number of epochs; 0: no end.
        shuffle: False keeps the documents in their given order, for evaluation.
        previous: how far a run with another assignment had read.
    """

    # Streams are never more than a few blocks apart, so few blocks are needed at a time.
    _KEPT = 8

    def __init__(
        self,
        sizes: np.ndarray,
        *,
        streams: int,
        seed: int,
        epochs: int,
        shuffle: bool,
        previous: "SavedAssignment | None" = None,
    ):
        self._sizes = np.asarray(sizes, np.int64)
        self._streams = streams
        self._seed = seed
        self.shuffle = shuffle
        self._epochs = epochs
        self._previous = previous and PreviousAssignment(self._sizes, shuffle, previous)
        self._assigned: dict[int, list[np.ndarray]] = {}
        self._shuffled: dict[int, np.ndarray] = {}  # by epoch
        self._blocks_per_epoch = -(-len(self._sizes) // BLOCK)

    def __getstate__(self) -> dict[str, Any]:
        """Drops the tables: a worker process recomputes them faster than it could receive them."""
        return {**self.__dict__, "_assigned": {}, "_shuffled": {}}

    @property
    def first_block(self) -> int:
        """The block in which streams begin."""
        return self._previous.first_block if self._previous else 0

    def documents(self, stream: int, block: int) -> np.ndarray | None:
        """Returns the documents [n] that a stream reads in a block, in order.

        None after the last epoch.
        """
        if self._epochs and block >= self._epochs * self._blocks_per_epoch:
            return None
        if block not in self._assigned:
            self._assigned[block] = self._assign(block)
            if len(self._assigned) > self._KEPT:
                del self._assigned[next(iter(self._assigned))]
        return self._assigned[block][stream]

    def start(self, block: int, document: int) -> Position | None:
        """Returns where to continue a document that a previous stream had begun, else None."""
        return self._previous.start(block, document) if self._previous else None

    def order(self, block: int) -> np.ndarray:
        """Returns the documents of a block, in the order of its epoch."""
        if self._previous and block <= self._previous.last_block:
            return self._previous.left(block)
        count = len(self._sizes)
        epoch, part = divmod(block, self._blocks_per_epoch)
        places = slice(part * BLOCK, (part + 1) * BLOCK)
        if not self.shuffle:
            return np.arange(count)[places]
        if epoch not in self._shuffled:
            generator = np.random.default_rng([self._seed, epoch])
            self._shuffled[epoch] = generator.permutation(count)
            if len(self._shuffled) > 2:
                del self._shuffled[next(iter(self._shuffled))]
        return self._shuffled[epoch][places]

    def _assign(self, block: int) -> list[np.ndarray]:
        order = self.order(block)
        # Equal loads are common (all are 0 at first); who wins a tie changes with the block.
        ties = np.random.default_rng([self._seed, block, 1]).permutation(self._streams)
        loads = [(0, tie, int(stream)) for tie, stream in enumerate(ties)]
        sizes = self._sizes[order]
        largest_first = np.argsort(-np.frexp(sizes.astype(np.float64))[1], kind="stable")
        stream_of = np.empty(len(order), np.int64)
        for place in largest_first:
            load, tie, stream = loads[0]
            stream_of[place] = stream
            heapq.heapreplace(loads, (load + int(sizes[place]) + 1, tie, stream))
        return [order[stream_of == stream] for stream in range(self._streams)]


class SavedAssignment(TypedDict):
    """How far the streams of an assignment had read, as saved in a checkpoint."""

    positions: list[list[int]]  # of each stream: the fields of its `Position`
    seed: int
    previous: "SavedAssignment | None"  # the assignment before that, if it was unfinished too


class PreviousAssignment:
    """How far an assignment with another number of streams, or another seed, had been read."""

    def __init__(self, sizes: np.ndarray, shuffle: bool, saved: SavedAssignment):
        self._positions = [Position(*ints) for ints in saved["positions"]]
        self._assigner = DocumentAssigner(
            sizes,
            streams=len(self._positions),
            seed=saved["seed"],
            epochs=0,
            shuffle=shuffle,
            previous=saved["previous"],
        )
        self.first_block = min(position.block for position in self._positions)
        # The last block that is only partly unread; an earlier assignment may reach further.
        self.last_block = max(position.block for position in self._positions)
        if self._assigner._previous:
            self.last_block = max(self.last_block, self._assigner._previous.last_block)

    def left(self, block: int) -> np.ndarray:
        """Returns the documents of a block that were not read to their end, in order."""
        read = [self._read(stream, block) for stream in range(len(self._positions))]
        order = self._assigner.order(block)
        return order[~np.isin(order, np.concatenate(read))]

    def _read(self, stream: int, block: int) -> np.ndarray:
        position = self._positions[stream]
        assigned = self._assigner.documents(stream, block)
        assert assigned is not None  # this assigner has no last epoch
        if block == position.block:
            return assigned[: position.ordinal]
        return assigned if block < position.block else assigned[:0]

    def start(self, block: int, document: int) -> Position | None:
        """Returns where reading of a document stopped; None if it had not begun."""
        for stream, position in enumerate(self._positions):
            if position.block == block and position.place:
                assigned = self._assigner.documents(stream, block)
                if assigned is not None and assigned[position.ordinal] == document:
                    return position
        return self._assigner.start(block, document)
