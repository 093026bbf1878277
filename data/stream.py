"""Reads one stream's documents token by token, from any saved position.

A document becomes the begin id, its tokens and the end id. A long document is encoded in spans of
about a megabyte that end after a line, so that neither memory nor the time to resume depends on the
length of documents. A tokenizer that merges across line ends may merge differently at such a cut.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from data.assignment import DocumentAssigner, Position
from data.documents import DocumentSource
from data.readers.reader import Document, Text
from data.tokenizer import Tokenizer
from errors import DataError, UserError

SPAN_BYTES = 1 << 20
# Documents in a window of a stream. The fraction of them with text is compared with the fraction
# of all documents before the window.
WINDOW = 500

# Columns of the tables of tokens.
TOKEN, TARGET, TARGET_BYTES, WEIGHT = range(4)


class Counts(NamedTuple):
    """Counts of a stream so far. A document read in two epochs counts twice."""

    documents: int = 0  # begun, excluding empty and broken ones
    empty: int = 0  # skipped: no text, or the tokenizer returned no ids
    broken: int = 0  # skipped: a record that could not be read, such as half a line of JSON
    invalid_utf8: int = 0  # read, with bytes that are not UTF-8
    one_byte: int = 0  # read, a single byte long
    longer_than_row: int = 0  # read, with more tokens than a row holds

    @property
    def looked_at(self) -> int:
        """All documents, with or without text."""
        return self.documents + self.empty + self.broken


class Piece(NamedTuple):
    """Consecutive tokens of one document."""

    table: np.ndarray  # [n, 4] int32: token, target, target's bytes, weight
    place: int  # of the first token in its document


@dataclass(frozen=True)
class Corpus:
    """What all streams share; pickled to worker processes."""

    source: DocumentSource
    tokenizer: Tokenizer
    assigner: DocumentAssigner
    sequence_length: int


class StreamReader:
    """Reads the documents assigned to one stream, from a position on."""

    def __init__(self, corpus: Corpus, stream: int, position: Position, counts: Counts):
        self._corpus = corpus
        self._stream = stream
        self._position = position
        self._counts = dict(zip(Counts._fields, counts))
        self._document: _OpenDocument | None = None
        self._skipped = 0  # documents without text since the last one with text
        self._window = counts  # at the start of the current window of documents

    @property
    def position(self) -> Position:
        return self._position

    @property
    def counts(self) -> Counts:
        return Counts(**self._counts)

    def take(self, limit: int) -> Piece | None:
        """Returns the next tokens of the current document, at most `limit` (>= 1) of them.

        Returns None after the last epoch.
        """
        document = self._document or self._next_document()
        if document is None:
            return None
        self._document, before = document, self._position
        piece = Piece(document.take(limit), before.place)
        place = before.place + len(piece.table)
        if before.place <= self._corpus.sequence_length < place:
            self._counts["longer_than_row"] += 1
        if document.invalid and not before.invalid:
            self._counts["invalid_utf8"] += 1
        if document.finished:
            self._document = None
            self._position = Position(before.block, before.ordinal + 1)
        else:
            self._position = before._replace(
                byte=document.byte,
                token=document.token,
                place=place,
                invalid=int(document.invalid),
            )
        return piece

    def _next_document(self) -> "_OpenDocument | None":
        """Opens the document at the position, or else the next one that has text.

        Returns None after the last epoch.
        """
        while True:
            position = self._position
            assigned = self._corpus.assigner.documents(self._stream, position.block)
            if assigned is None:
                return None
            if position.ordinal == len(assigned):
                self._position = Position(position.block + 1)
                continue
            index = int(assigned[position.ordinal])
            begun = (
                position if position.place else self._corpus.assigner.start(position.block, index)
            )
            if begun:
                self._position = begun._replace(block=position.block, ordinal=position.ordinal)
            document = self._open(index, self._position)
            if document is not None:
                if not begun:
                    self._counts["documents"] += 1
                    self._counts["one_byte"] += len(document.text) == 1
                self._check_text(found=True)
                return document
            self._position = Position(position.block, position.ordinal + 1)
            self._check_text(found=False)

    def _check_text(self, found: bool) -> None:
        """Counts a document, and raises an error if documents no longer have text."""
        self._skipped = 0 if found else self._skipped + 1
        counts = self.counts
        if self._skipped > 100 * len(self._corpus.source):
            raise UserError(
                f"config.data.path: no text in any document of {self._corpus.source.described}; "
                f"{counts.empty:,} were empty and {counts.broken:,} broken"
            )
        # Without shuffling, a series of empty documents says nothing about the others.
        looked_at, before = counts.looked_at, self._window.looked_at
        if not self._corpus.assigner.shuffle or looked_at - before < WINDOW:
            return
        found_now = counts.documents - self._window.documents
        usual = self._window.documents / max(before, 1)
        if before >= WINDOW and usual > 0.1 and found_now <= 0.01 * WINDOW:
            raise DataError(
                f"config.data.path: {found_now} of the last {WINDOW} documents of "
                f"{self._corpus.source.described} had text, but {usual:.0%} of those before; the "
                "files or the disk have changed; restore them and start the same command again"
            )
        self._window = counts

    def _open(self, index: int, position: Position) -> "_OpenDocument | None":
        """Opens a document at a position in it. If it has no tokens, counts it and returns None."""
        document = self._corpus.source[index]
        if document.broken:
            self._counts["broken"] += 1
            return None
        opened = _OpenDocument(document, self._corpus.tokenizer, position)
        if opened.empty:
            self._counts["empty"] += 1
            return None
        return opened


class _OpenDocument:
    """A document's tokens from a position on, encoded span by span."""

    def __init__(self, document: Document, tokenizer: Tokenizer, position: Position):
        self.text = document.text
        self.invalid = bool(position.invalid)
        self._counted = document.counted
        self._tokenizer = tokenizer
        self._encoded_to = position.byte
        self._cursor = position.token
        # The spans held are complete; the cursor is in the first of them or at its end.
        self._tokens = np.zeros((0, 3), np.int32)  # id, bytes, whether the loss counts it
        self._starts: list[tuple[int, int]] = []  # of each span: (byte, index into _tokens)
        self._encode_span()

    @property
    def _all_encoded(self) -> bool:
        return self._encoded_to == len(self.text)

    @property
    def empty(self) -> bool:
        """Whether there is nothing between the begin id and the end id."""
        return self._all_encoded and self._starts[0][0] == 0 and len(self._tokens) == 2

    @property
    def finished(self) -> bool:
        return self._all_encoded and self._cursor == len(self._tokens)

    @property
    def byte(self) -> int:
        return self._span_at_cursor()[0]

    @property
    def token(self) -> int:
        return self._cursor - self._span_at_cursor()[1]

    def _span_at_cursor(self) -> tuple[int, int]:
        return [start for start in self._starts if start[1] <= self._cursor][-1]

    def take(self, limit: int) -> np.ndarray:
        """Returns the next tokens and their targets, [n, 4] int32 with n <= limit."""
        # One more token than requested, as the target of the last one.
        while len(self._tokens) - self._cursor <= limit and not self._all_encoded:
            self._encode_span()
        start = self._cursor
        stop = min(start + limit, len(self._tokens))
        targets, nbytes, counted = self._tokens[start + 1 : stop + 1].T
        table = np.zeros((stop - start, 4), np.int32)
        table[:, TOKEN] = self._tokens[start:stop, 0]
        table[: len(targets), TARGET] = targets
        table[: len(targets), TARGET_BYTES] = nbytes * counted
        table[: len(targets), WEIGHT] = counted
        self._cursor = stop
        return table

    def _encode_span(self) -> None:
        self._drop_read_spans()
        start = self._encoded_to
        stop = span_end(self.text, start)
        text = bytes(self.text[start:stop])
        self.invalid = self.invalid or not _is_utf8(text)
        self._starts.append((start, len(self._tokens)))
        parts = [self._tokens]
        if start == 0:
            parts.append(_table([self._tokenizer.bos_id], [0], False))
        for first, last, counts in counted_parts(self._counted, start, stop):
            encoded = self._tokenizer.encode(text[first - start : last - start])
            parts.append(_table(*encoded, counts))
        if stop == len(self.text):
            parts.append(_table([self._tokenizer.eos_id], [0], _counts(self._counted, stop)))
        self._tokens = np.concatenate(parts)
        self._encoded_to = stop

    def _drop_read_spans(self) -> None:
        if not self._starts:
            return
        byte, first = self._span_at_cursor()
        self._starts = [(b, i - first) for b, i in self._starts if b >= byte]
        self._tokens = self._tokens[first:]
        self._cursor -= first


def _table(ids: ArrayLike, nbytes: ArrayLike, counts: bool) -> np.ndarray:
    table = np.full((len(np.asarray(ids)), 3), counts, np.int32)
    table[:, 0], table[:, 1] = ids, nbytes
    return table


def counted_parts(counted: np.ndarray | None, start: int, stop: int) -> list[tuple[int, int, bool]]:
    """Cuts a span of bytes where counting for the loss begins or ends: (start, stop, counts) each.

    Parts are encoded separately, so that no token has bytes of both kinds.
    """
    if counted is None:
        return [(start, stop, True)]
    inside = counted.ravel()[(counted.ravel() > start) & (counted.ravel() < stop)]
    bounds = [start, *inside.tolist(), stop]
    return [(a, b, _counts(counted, a)) for a, b in itertools.pairwise(bounds) if a < b]


def _counts(counted: np.ndarray | None, byte: int) -> bool:
    """Whether the loss counts a byte (len(text): the end id)."""
    if counted is None:
        return True
    return bool(np.searchsorted(counted.ravel(), byte, side="right") % 2)


def span_end(text: Text, start: int) -> int:
    """Returns where the span that starts at byte `start` ends: after a line, within a megabyte."""
    end = start + SPAN_BYTES
    if end >= len(text):
        return len(text)
    newline = bytes(text[start:end]).rfind(b"\n")
    if newline >= 0:
        return start + newline + 1
    # There is no line end: at least do not cut inside a character (at most 4 bytes).
    for back in range(4):
        if text[end - back] & 0xC0 != 0x80 and end - back > start:
            return end - back
    return end


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
