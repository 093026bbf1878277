"""JSONL: one document per line, a JSON object; see forms.py for which values are its text."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from data.files import Files, refuse_wide, utf8_mark, wide_encoding
from data.readers.forms import Form
from data.readers.reader import BROKEN, Document, hashes_of_numbers, sample_of
from errors import UserError

# Numbers are ignored and must not cause errors: float accepts any number of digits, int does not.
_JSON = json.JSONDecoder(parse_int=float)
# Unicode's private-use planes, whose characters can represent bytes while a line is parsed.
_PRIVATE = range(0xF0000, 0x10FF00, 0x100)
_HEAD_BYTES = 256


class JsonLinesReader:
    """One document per line of JSON. Lines are found once, when the files are opened."""

    def __init__(self, paths: list[str], form: Form):
        self.files = Files(paths)
        self._form = form
        found = [find_lines(self.files, number) for number in range(len(paths))]
        self._file_of = np.repeat(np.arange(len(paths)), [len(starts) for starts, _ in found])
        self._starts = np.concatenate([starts for starts, _ in found])
        # The length of a line is close enough to that of its text to balance the streams.
        self.sizes = np.concatenate([lengths for _, lengths in found])
        self._check_form()

    def _check_form(self) -> None:
        """Refuses files if a sample of lines of all files has no record of the form."""
        keys: set[str] = set()
        for index in sample_of(len(self)).tolist():
            record = self._record(index)
            if isinstance(record, dict):
                if self._form.texts(record) is not None:
                    return
                keys |= self._form.known(record)
        if len(self):
            known = ", ".join(repr(key) for key in sorted(keys)[:10])
            advice = (
                f"the lines have {known}; try one of these"
                if keys
                else f"its lines have no text at all; each needs to be {self._form.example}"
            )
            raise UserError(
                f"{self._form.option}: {self.files.paths[0]} has no {self._form.needs}, nor has "
                f"any other file; {advice}"
            )

    def __len__(self) -> int:
        return len(self._starts)

    def fingerprint(self) -> str:
        return self.files.fingerprint()

    def hashes(self) -> np.ndarray:
        return hashes_of_numbers(len(self))

    def _line(self, index: int) -> bytes:
        start = int(self._starts[index])
        return self.files.read(int(self._file_of[index]), start, start + int(self.sizes[index]))

    def _record(self, index: int) -> Any:
        """Returns the JSON value of a line; None if it is not JSON."""
        return _parsed(self._line(index).decode("utf-8", errors="surrogateescape"))

    def __getitem__(self, index: int) -> Document:
        texts = texts_of(self._line(index), self._form.texts)
        return BROKEN if texts is None else self._form.document(texts)


def _parsed(line: str) -> Any:
    try:
        return _JSON.decode(line)
    except (ValueError, RecursionError):
        return None


# Selects the texts of a line's JSON object that form the document; None if there are none.
type Select = Callable[[dict[str, Any]], list[str] | None]


def texts_of(line: bytes, select: Select) -> list[bytes] | None:
    """Returns the selected texts of a line of JSON as UTF-8; None if there are none.

    Bytes that are not UTF-8 are kept. An escaped lone surrogate, which has no UTF-8 form, becomes
    the three bytes that would encode its code point.
    """
    try:
        texts = _selected(line.decode("utf-8"), select)
    except UnicodeDecodeError:
        return _texts_with_bytes(line, select)
    if texts is None:
        return None
    return [text.encode("utf-8", errors="surrogatepass") for text in texts]


def _selected(line: str, select: Select) -> list[str] | None:
    record = _parsed(line)
    return select(record) if isinstance(record, dict) else None


def _texts_with_bytes(line: bytes, select: Select) -> list[bytes] | None:
    """`texts_of` for a line with bytes that are not UTF-8.

    Python escapes such a byte as a surrogate, which the line may also contain as a JSON escape. So
    byte b is parsed as the character `base` + b, with a base whose characters the texts lack.
    """
    escaped = line.decode("utf-8", errors="surrogateescape")
    texts = _selected(escaped, select)
    if texts is None:
        return None
    used = {ord(char) & ~0xFF for text in texts for char in text}
    base = next(start for start in _PRIVATE if start not in used)
    marked = _selected(
        escaped.translate({0xDC00 + b: base + b for b in range(0x80, 0x100)}), select
    )
    assert marked is not None  # it parses as `escaped` did
    return [_bytes_of(text, base) for text in marked]


def _bytes_of(text: str, base: int) -> bytes:
    return b"".join(
        bytes([ord(char) - base])
        if base <= ord(char) < base + 256
        else char.encode("utf-8", errors="surrogatepass")
        for char in text
    )


def find_lines(files: Files, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the starts and the lengths without line ends of a file's lines, [n] int64 each.

    Blank lines, which editors leave behind, and a byte order mark are skipped.
    """
    ends: list[np.ndarray] = []
    start = 0
    head = b""
    with open(files.paths[number], "rb") as opened:
        while block := opened.read(1 << 24):
            head = head or block[:_HEAD_BYTES]
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + start)
            start += len(block)
    if encoding := wide_encoding(head, start):
        raise refuse_wide(files.paths[number], encoding)
    stops = np.concatenate([*ends, [start]]).astype(np.int64)
    starts = np.concatenate([[0], stops[:-1] + 1])
    starts[0] = utf8_mark(head)
    kept = stops - starts > 1  # a single byte is a space, a carriage return, or not an object
    return starts[kept], (stops - starts)[kept]
