"""The interface of every format's reader: random access to documents, their sizes and hashes.

Readers are pickled to worker processes, so they hold file names and indexes, and open files only
when a document is read.
"""

import hashlib
from typing import NamedTuple, Protocol, overload

import numpy as np

from data.files import Files

# Documents of at least this size are read in parts: all streams of a batch may have long documents.
LONG_BYTES = 1 << 24


class FileText:
    """A part of a file as a sequence of bytes; an index or slice reads just those bytes."""

    def __init__(self, files: Files, number: int, start: int, stop: int):
        self._files = files
        self._number = number
        self._start = start
        self._length = stop - start

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> bytes: ...

    def __getitem__(self, index: int | slice) -> int | bytes:
        if isinstance(index, int):
            index %= self._length
            return self[index : index + 1][0]
        start, stop, _ = index.indices(self._length)
        return self._files.read(self._number, self._start + start, self._start + max(start, stop))


Text = bytes | FileText


class Document(NamedTuple):
    """One document.

    broken: the record could not be read as a document; its text is empty.
    counted: what the loss counts, as ascending, disjoint byte ranges [n, 2] (start, stop);
        len(text) is the end id. They begin and end between characters. None: everything.
    """

    text: Text
    broken: bool = False
    counted: np.ndarray | None = None


BROKEN = Document(b"", broken=True)


class Reader(Protocol):
    """Random access to documents, of files or generated. To add a format, implement this protocol
    and add it to data/documents.py."""

    sizes: np.ndarray  # [n] int64 bytes, or estimates

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Document: ...
    def fingerprint(self) -> str: ...  # changes with the content
    def hashes(self) -> np.ndarray: ...  # [n] float64 in [0, 1), from names or numbers


def hash_of_name(name: str) -> float:
    """Returns a fixed number in [0, 1) for a name."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "little") / 2**64


def hashes_of_numbers(count: int) -> np.ndarray:
    """Returns a fixed number in [0, 1) for each of 0 .. count - 1 (the SplitMix64 mixer)."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) / 2**53


def sample_of(count: int) -> np.ndarray:
    """Returns the numbers of a sample of records: all of up to 2,000, else 2,000 spread evenly."""
    return np.unique(np.linspace(0, count - 1, min(count, 2000)).astype(np.int64))
