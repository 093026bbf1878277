"""Documents in memory whose every token is another number, and an oracle that packs naively.

A document's text is its tokens as four-byte words, so that a token that is lost, repeated or out of
place shows by its number. In every other document the loss counts some words only.
"""

import numpy as np

from data.assignment import DocumentAssigner, SavedAssignment
from data.readers.reader import Document
from data.stream import Corpus

BOS, EOS = 1, 2
# Token p (from 0) of document d is FIRST + d * SPACING + p.
FIRST, SPACING = 1000, 10_000


class WordTokenizer:
    """Four bytes per token; the bytes are the token's id."""

    name = fingerprint = "words"
    vocab_size = 1 << 30
    bos_id, eos_id = BOS, EOS

    def encode(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        ids = np.frombuffer(text, "<i4").astype(np.int32)
        return ids, np.full(len(ids), 4, np.int32)


class MemorySource:
    """Documents of the given numbers of words; -1 is a broken record."""

    described = "memory"

    def __init__(self, lengths: list[int]):
        self._lengths = lengths
        self.sizes = 4 * np.maximum(np.asarray(lengths, np.int64), 0)
        self.fingerprint = repr(lengths)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Document:
        if self._lengths[index] < 0:
            return Document(b"", broken=True)
        length = self._lengths[index]
        text = np.asarray(words(index, length), "<i4").tobytes()
        ranges = [
            # Of the end id, the range is one "byte" after the text.
            [4 * place, min(4 * place + 4, 4 * length + 1)]
            for place in range(length + 1)
            if counts(index, place)
        ]
        everything = all(counts(index, place) for place in range(length + 1))
        counted = None if everything else np.asarray(ranges, np.int64).reshape(-1, 2)
        return Document(text, counted=counted)


def counts(document: int, place: int) -> bool:
    """Whether the loss counts a document's word; the one after the last is the end id."""
    return document % 2 == 0 or (place + document) % 3 > 0


def words(document: int, length: int) -> list[int]:
    return [FIRST + document * SPACING + place for place in range(length)]


def corpus(
    lengths: list[int],
    *,
    rows: int,
    sequence_length: int,
    epochs: int = 1,
    seed: int = 0,
    previous: SavedAssignment | None = None,
) -> Corpus:
    source = MemorySource(lengths)
    assigner = DocumentAssigner(
        source.sizes, streams=rows, seed=seed, epochs=epochs, shuffle=True, previous=previous
    )
    return Corpus(source, WordTokenizer(), assigner, sequence_length)


def tokens_of(lengths: list[int], documents: list[int]) -> list[dict[str, int]]:
    """Returns what a stream of documents should hold, token by token, one dict each."""
    stream = []
    for document in documents:
        if lengths[document] <= 0:
            continue
        ids = [BOS, *words(document, lengths[document]), EOS]
        for place, token in enumerate(ids):
            last = place == len(ids) - 1
            target = 0 if last else ids[place + 1]
            counted = not last and counts(document, place)
            stream.append(
                {
                    "tokens": token,
                    "targets": target,
                    "positions": place,
                    "loss_weights": int(counted),
                    "target_bytes": 4 * int(counted and target >= FIRST),
                    "document": document,
                }
            )
    return stream


def naive_stream_rows(stream: list[dict[str, int]], length: int) -> list[dict[str, list[int]]]:
    """Returns a stream's tokens cut into rows, token by token."""
    rows = []
    for start in range(0, len(stream), length):
        rows.append(naive_row(stream[start : start + length], length))
        rows[-1]["continues"] = stream[start]["positions"] > 0
    return rows


def naive_row(tokens: list[dict[str, int]], length: int) -> dict:
    """Returns one row of the given tokens, padded; each document begins a new segment."""
    fields = ("tokens", "targets", "positions", "loss_weights", "target_bytes")
    row = {field: [token[field] for token in tokens] for field in fields}
    segment, ids = 0, []
    for index, token in enumerate(tokens):
        segment += index == 0 or token["positions"] == 0
        ids.append(segment)
    row["segment_ids"] = ids
    return {field: values + [0] * (length - len(values)) for field, values in row.items()}
