"""Packs documents into rows of T tokens.

"stream": a row takes the next T tokens of its stream, whatever documents they belong to; a document
that does not fit continues in the next row of the stream. Nothing is padded before the stream ends.
(Grain's concat-then-split also cuts documents, but it restarts positions in each row, and it
resumes by packing again from its last checkpoint, where a position in the document is enough.)

"whole": rows hold whole documents; documents longer than a row are cut into independent pieces.
Grain's first-fit packer fills a few rows of the stream at a time. The last token of a piece still
predicts the first token of the next piece, because that is the next token of the document.

In both modes a row comes with the position of its stream after that row. A position thus belongs to
a row, and not to the thread, process or queue through which the row came. On resume, the "whole"
packer reads the pieces that it held again, from the position where it began to fill its rows.
"""

from typing import Any, NamedTuple

import grain
import numpy as np

from data.assignment import Position
from data.mixture import Mixture, MixtureReader
from data.stream import Corpus, Counts, Piece, StreamReader

# Columns of a row's table: those of a piece, then these.
SEGMENT, PLACE = 4, 5
COLUMNS = 6


class Record(NamedTuple):
    """A stream's saved position in one source, and what it has read and produced from it so far."""

    position: Position = Position()
    counts: Counts = Counts()
    rows: int = 0  # "whole": of the rows filled from the position on, how many are handed out
    tokens: int = 0  # real tokens handed out
    padding: int = 0  # padding tokens handed out; of a mixture, in its first source's record

    def to_ints(self) -> list[int]:
        return [*self.position, *self.counts, self.rows, self.tokens, self.padding]

    @classmethod
    def from_ints(cls, ints: Any) -> "Record":
        ints = [int(value) for value in ints]
        a, b = len(Position._fields), len(Position._fields) + len(Counts._fields)
        return cls(Position(*ints[:a]), Counts(*ints[a:b]), *ints[b:])


RECORD_SIZE = len(Record().to_ints())


class Row(NamedTuple):
    """One row of one stream."""

    table: np.ndarray  # [T, 6] int32: token, target, target's bytes, weight, segment, place
    continues: bool  # whether its first segment continues the stream's previous row
    records: tuple[Record, ...]  # of the stream in each source, after this row

    @property
    def live(self) -> bool:
        """False if the stream had ended, so that the row is padding."""
        return bool(self.table[0, SEGMENT])


class StreamPacker:
    """Packs a stream's documents into rows so that they continue from row to row."""

    def __init__(self, mixture: Mixture, stream: int, records: list[Record]):
        readers = [
            StreamReader(corpus, stream, record.position, record.counts)
            for corpus, record in zip(mixture.corpora, records)
        ]
        self._reader = MixtureReader(mixture, readers, [record.tokens for record in records])
        self._length = mixture.sequence_length
        self._padding = records[0].padding

    def next_row(self) -> Row:
        """Returns the next row; only padding once the stream has ended."""
        table = np.zeros((self._length, COLUMNS), np.int32)
        filled, segment = 0, 0
        continues = self._reader.inside
        while filled < self._length and (piece := self._reader.take(self._length - filled)):
            segment += 1
            _write(table, filled, piece, segment)
            filled += len(piece.table)
        self._padding += self._length - filled
        records = [
            Record(reader.position, reader.counts, tokens=tokens)
            for reader, tokens in zip(self._reader.readers, self._reader.tokens.tolist())
        ]
        records[0] = records[0]._replace(padding=self._padding)
        return Row(table, continues, tuple(records))


def _write(table: np.ndarray, start: int, piece: Piece, segment: int) -> None:
    stop = start + len(piece.table)
    table[start:stop, :SEGMENT] = piece.table
    table[start:stop, SEGMENT] = segment
    table[start:stop, PLACE] = np.arange(piece.place, piece.place + len(piece.table))


class WholePacker:
    """Packs a stream's documents whole into rows, with Grain's first-fit packer."""

    def __init__(self, corpus: Corpus, stream: int, record: Record, bins: int):
        self._length = corpus.sequence_length
        self._record = record
        self._pieces = _Pieces(corpus, stream)
        self._packed = grain.experimental.FirstFitPackIterDataset(
            self._pieces,
            length_struct={"piece": self._length},
            num_packing_bins=bins,
            shuffle_bins=False,
        ).__iter__()
        self._packed.set_state(
            {
                "parent": {"at": [*record.position, *record.counts]},
                "next_row": record.rows,
                "counter": record.rows,
            }
        )

    def next_row(self) -> Row:
        """Returns the next row; only padding once the stream has ended."""
        table = np.zeros((self._length, COLUMNS), np.int32)
        row = next(self._packed, None)
        if row is not None:
            table[:, :SEGMENT] = row["piece"]
            table[:, SEGMENT] = row["piece_segment_ids"]
            table[:, PLACE] = row["piece_positions"]
        filled = int(np.count_nonzero(table[:, SEGMENT]))
        state = self._packed.get_state()
        if row is None:
            # The end of the stream: Grain's packer is still before what followed its last piece.
            state["parent"] = self._pieces.iterator.get_state()
        began = Record.from_ints([*state["parent"]["at"], state["next_row"], 0, 0])
        self._record = began._replace(
            tokens=self._record.tokens + filled,
            padding=self._record.padding + self._length - filled,
        )
        return Row(table, False, (self._record,))


class _Pieces(grain.IterDataset):
    """A stream's documents, cut into pieces of at most a row, for Grain's packers."""

    def __init__(self, corpus: Corpus, stream: int):
        super().__init__()
        self._corpus = corpus
        self._stream = stream

    def __iter__(self) -> "_PieceIterator":
        self.iterator = _PieceIterator(self._corpus, self._stream)
        return self.iterator


class _PieceIterator(grain.DatasetIterator):
    def __init__(self, corpus: Corpus, stream: int):
        super().__init__()
        self._corpus = corpus
        self._stream = stream
        self._reader = StreamReader(corpus, stream, Position(), Counts())

    def __next__(self) -> dict[str, np.ndarray]:
        piece = self._reader.take(self._corpus.sequence_length)
        if piece is None:
            raise StopIteration
        return {"piece": piece.table}

    def get_state(self) -> dict[str, list[int]]:
        return {"at": [*self._reader.position, *self._reader.counts]}

    def set_state(self, state: dict[str, list[int]]) -> None:
        split = len(Position._fields)
        position, counts = Position(*state["at"][:split]), Counts(*state["at"][split:])
        self._reader = StreamReader(self._corpus, self._stream, position, counts)
