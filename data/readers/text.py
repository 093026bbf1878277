"""Text files: one document per file, or one file cut into documents."""

import os
from typing import BinaryIO

import numpy as np

from data.files import Files, refuse_wide, utf8_mark, wide_encoding
from data.readers import reader
from data.readers.reader import BROKEN, Document, FileText, hash_of_name

# A single text file is cut into documents of this size, so that rows read different texts and an
# epoch can be shuffled. The size is fixed, so that a saved position stays valid with another batch
# size. A file of 1 MiB is enough for 15 rows, and a document holds 16k tokens of four bytes.
_CUT_BYTES = 1 << 16
# How far to look for the line start at which the held-out end of a text file begins.
_LINE_BYTES = 1 << 20
_HEAD_BYTES = 64


class FileReader:
    """One document per file, without a byte order mark. Files in UTF-16 or UTF-32 are broken."""

    def __init__(self, root: str, paths: list[str]):
        names = {_name(root, path): path for path in paths}
        self._names = sorted(names)
        self.files = Files([names[name] for name in self._names])
        self.sizes = self.files.sizes
        self._check_encoding()

    def _check_encoding(self) -> None:
        """Refuses a corpus if all of its files are in an unsupported encoding."""
        for number in np.flatnonzero(self.sizes).tolist():
            if not (encoding := self._wide(number)):
                return
        if self.sizes.any():
            raise refuse_wide(self.files.paths[0], encoding)

    def _wide(self, number: int) -> str:
        size = int(self.sizes[number])
        return wide_encoding(self.files.read(number, 0, min(_HEAD_BYTES, size)), size)

    def __len__(self) -> int:
        return len(self.files)

    def fingerprint(self) -> str:
        return self.files.fingerprint()

    def hashes(self) -> np.ndarray:
        return np.asarray([hash_of_name(name) for name in self._names])

    def __getitem__(self, index: int) -> Document:
        size = int(self.sizes[index])
        text = _text(self.files, index, 0, size)
        head = bytes(text[:_HEAD_BYTES])
        if wide_encoding(head, size):
            return BROKEN
        if mark := utf8_mark(head):
            text = _text(self.files, index, mark, size)
        return Document(text)


class CutFileReader:
    """One text file, cut at line starts into documents of `_CUT_BYTES` or a little more.

    held_out_end: the share of its bytes to hold out. They are one document, the last, and start at
    the next line. 0.0: none.
    """

    def __init__(self, path: str, held_out_end: float):
        self.files = Files([path])
        self._held_out_end = bool(held_out_end)
        end = size = int(self.files.sizes[0])
        head = self.files.read(0, 0, min(size, _HEAD_BYTES))
        if encoding := wide_encoding(head, size):
            raise refuse_wide(path, encoding)
        with open(path, "rb") as opened:
            if held_out_end:
                end = _line_start(opened, int(size * (1 - held_out_end)), _LINE_BYTES)
            self._spans = _cut(opened, utf8_mark(head), end)
        if held_out_end:
            self._spans.append((end, size))
        self.sizes = np.asarray([stop - start for start, stop in self._spans], np.int64)

    def __len__(self) -> int:
        return len(self._spans)

    def fingerprint(self) -> str:
        return self.files.fingerprint()

    def hashes(self) -> np.ndarray:
        hashes = np.ones(len(self._spans))
        hashes[-1] = 0.0 if self._held_out_end else 1.0
        return hashes

    def __getitem__(self, index: int) -> Document:
        return Document(_text(self.files, 0, *self._spans[index]))


def _text(files: Files, number: int, start: int, stop: int) -> bytes | FileText:
    if stop - start >= reader.LONG_BYTES:
        return FileText(files, number, start, stop)
    return files.read(number, start, stop)


def _name(root: str, path: str) -> str:
    """Returns a file's name relative to the root, the same on every system."""
    return os.path.relpath(path, root).replace(os.sep, "/")


def _cut(opened: BinaryIO, start: int, end: int) -> list[tuple[int, int]]:
    """Returns the spans, in order, of the documents that a text file is cut into."""
    spans: list[tuple[int, int]] = []
    # Three more bytes may belong to a character that begins before the cut.
    while end - start > _CUT_BYTES + 3:
        # A line that does not end within another _CUT_BYTES is cut inside.
        stop = min(_line_start(opened, start + _CUT_BYTES, _CUT_BYTES), end)
        spans.append((start, stop))
        start = stop
    if start < end or not spans:
        spans.append((start, end))
    return spans


def _line_start(opened: BinaryIO, near: int, within: int) -> int:
    """Returns where the first line after byte `near` starts.

    If none starts within `within` bytes: `near`, moved to the end of the character that it is in.
    """
    opened.seek(near)
    line = opened.readline(within)
    if line.endswith(b"\n") and opened.read(1):
        return near + len(line)
    # There is no line end: at least do not cut inside a character.
    return near + next((i for i, byte in enumerate(line[:4]) if byte & 0xC0 != 0x80), 0)
