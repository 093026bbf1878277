"""Random access to the records of files, one class a format.

Readers are pickled to worker processes, so they keep names and indexes and open files when they are
first used. All have: sizes [n], fingerprint, len, [index] -> Document, hashes() (see
`data.documents.Reader`).
"""

import collections
import hashlib
import json
import mmap
import os
from typing import Any, BinaryIO, NamedTuple

import numpy as np

# Documents that are files, or ends of one, are mapped from this size on, not read: the streams of a
# batch may all be inside one.
_MAPPED_BYTES = 1 << 24
# A single text file is cut into documents of this size: rows then have texts of their own, and an
# epoch has an order to shuffle. It is fixed, so that a saved position means the same with other
# rows. A file of 1 MiB is enough for 15 rows, and 16k tokens of four bytes still lie in one text.
_CUT_BYTES = 1 << 16
# How far to look for the line start at which a text file's held-out end begins.
_LINE_BYTES = 1 << 20
# Decoded Parquet row groups kept by a process. Shuffled reading jumps between row groups, so a
# corpus up to this size is decoded once; a larger one is faster as JSONL or ArrayRecord.
_PARQUET_CACHE_BYTES = 1 << 30


# A large file is a read-only map of it, its end a view of one. Slices of a view are views.
Text = bytes | mmap.mmap | memoryview


class Document(NamedTuple):
    """One document.

    broken: the record could not be read as a document; its text is empty.
    """

    text: Text
    broken: bool = False


_BROKEN = Document(b"", broken=True)


class FileReader:
    """One document a file."""

    def __init__(self, root: str, files: list[str]):
        names = {_name(root, file): file for file in files}
        self._names = sorted(names)
        self._files = [names[name] for name in self._names]
        sizes = [os.path.getsize(file) for file in self._files]
        self.sizes = np.asarray(sizes, np.int64)
        self.fingerprint = _digest(self._names, [(0, size) for size in sizes])

    def __len__(self) -> int:
        return len(self._files)

    def hashes(self) -> np.ndarray:
        return np.asarray([_share(name) for name in self._names])

    def __getitem__(self, index: int) -> Document:
        return Document(_span(self._files[index], 0, int(self.sizes[index])))


class CutFileReader:
    """One text file, cut at line starts into documents of `_CUT_BYTES` or a little more.

    held_out_end: that share of its bytes, from the next line on, is left whole as the last document
    and is the one to hold out. 0.0: there is none.
    """

    def __init__(self, root: str, file: str, held_out_end: float):
        self._file = file
        self._held_out_end = bool(held_out_end)
        end = size = os.path.getsize(file)
        with open(file, "rb") as opened:
            if held_out_end:
                end = _line_start(opened, int(size * (1 - held_out_end)), _LINE_BYTES)
            self._spans = _cut(opened, end)
        if held_out_end:
            self._spans.append((end, size))
        self.sizes = np.asarray([stop - start for start, stop in self._spans], np.int64)
        self.fingerprint = _digest([_name(root, file)] * len(self._spans), self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    def hashes(self) -> np.ndarray:
        hashes = np.ones(len(self._spans))
        hashes[-1] = 0.0 if self._held_out_end else 1.0
        return hashes

    def __getitem__(self, index: int) -> Document:
        return Document(_span(self._file, *self._spans[index]))


class JsonLinesReader:
    """One document a line of JSON, its text under `field`. Lines are found once, at opening."""

    # Lines looked at to tell a wrong field name from a few broken lines.
    _LOOKED_AT = 100

    def __init__(self, files: list[str], field: str):
        self._files = files
        self._field = field
        found = [_lines(file) for file in files]
        self._file_of = np.repeat(np.arange(len(files)), [len(starts) for starts, _ in found])
        self._starts = np.concatenate([starts for starts, _ in found])
        # A line's length stands for its text's: close enough to balance streams by.
        self.sizes = np.concatenate([lengths for _, lengths in found])
        self.fingerprint = _digest(self._files_sizes(), field)
        self._check_field()

    def _files_sizes(self) -> list[tuple[str, int]]:
        return [(os.path.basename(file), os.path.getsize(file)) for file in self._files]

    def _check_field(self) -> None:
        """Raises ValueError where none of the first readable lines has the field."""
        seen: set[str] = set()
        for index in range(min(len(self), self._LOOKED_AT)):
            record = self._record(index)
            if isinstance(record, dict):
                if isinstance(record.get(self._field), str):
                    return
                seen |= {key for key, value in record.items() if isinstance(value, str)}
        if len(self):
            keys = ", ".join(repr(key) for key in sorted(seen)[:10]) or "no text at all"
            raise ValueError(
                f"config.data.field={self._field!r}: {self._files[0]} has no text under that key; "
                f"its lines have {keys}"
            )

    def __len__(self) -> int:
        return len(self._starts)

    def hashes(self) -> np.ndarray:
        return _shares_of_numbers(len(self))

    def _record(self, index: int) -> Any:
        """Returns the line's JSON value, None where it is none."""
        with open(self._files[self._file_of[index]], "rb") as file:
            file.seek(self._starts[index])
            line = file.read(self.sizes[index])
        try:
            # Bad UTF-8 inside a string is kept byte for byte, for the tokenizer to deal with.
            return json.loads(line.decode("utf-8", errors="surrogateescape"))
        except (ValueError, RecursionError):
            return None

    def __getitem__(self, index: int) -> Document:
        record = self._record(index)
        if not isinstance(record, dict) or not isinstance(record.get(self._field), str):
            return _BROKEN
        return Document(_to_bytes(record[self._field]))


class ParquetReader:
    """One document a row, its text (string or binary) in the column `field`.

    Grain's own Parquet dataset only runs from front to back, all columns; a shuffle jumps.
    """

    def __init__(self, files: list[str], field: str, option: str):
        self._files = files
        self._field = field
        self._option = option
        groups, rows, sizes = [], [], []
        for number, file in enumerate(files):
            metadata = self._open(file).metadata
            column = self._column(file)
            for group in range(metadata.num_row_groups):
                described = metadata.row_group(group)
                groups.append((number, group))
                rows.append(described.num_rows)
                sizes.append(_mean_size(described.column(column), described.num_rows))
        self._groups = groups
        self._first_rows = np.cumsum([0, *rows])
        # Parquet tells the size of a row group, so each of its rows gets the mean.
        self.sizes = np.repeat(np.asarray(sizes, np.int64), rows)
        described_files = [(os.path.basename(file), os.path.getsize(file)) for file in files]
        self.fingerprint = _digest(described_files, field)
        self._cache: collections.OrderedDict[int, Any] = collections.OrderedDict()

    def _open(self, file: str) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.ParquetFile(file)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise ValueError(
                f"config.data.{self._option}={file!r}: not a Parquet file ({_one_line(error)})"
            ) from None

    def _column(self, file: str) -> int:
        """Returns the number of the text's column; ValueError where there is none."""
        opened = self._open(file)
        texts = [field.name for field in opened.schema_arrow if _is_text(field.type)]
        if self._field not in texts:
            raise ValueError(
                f"config.data.field={self._field!r}: {file} has no such text column; it has "
                + (", ".join(repr(name) for name in texts[:10]) or "none")
            )
        paths = [opened.schema.column(i).path for i in range(len(opened.schema.names))]
        return paths.index(self._field)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": collections.OrderedDict()}

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def hashes(self) -> np.ndarray:
        return _shares_of_numbers(len(self))

    def __getitem__(self, index: int) -> Document:
        group = int(np.searchsorted(self._first_rows, index, side="right")) - 1
        value = self._texts(group)[int(index - self._first_rows[group])].as_py()
        if value is None:
            return _BROKEN
        return Document(value)

    def _texts(self, group: int) -> Any:
        if group in self._cache:
            self._cache.move_to_end(group)
            return self._cache[group]
        number, part = self._groups[group]
        import pyarrow

        column = (
            self._open(self._files[number]).read_row_group(part, columns=[self._field]).column(0)
        )
        if pyarrow.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        # As bytes: a string column may hold invalid UTF-8, which as_py() would refuse.
        column = column.cast(pyarrow.large_binary())
        self._cache[group] = column
        while len(self._cache) > 1 and (
            sum(held.nbytes for held in self._cache.values()) > _PARQUET_CACHE_BYTES
        ):
            self._cache.popitem(last=False)
        return column


class ArrayRecordReader:
    """One document a record: the record's bytes are its text. grain's own reader does the work."""

    def __init__(self, files: list[str], option: str):
        import grain

        try:
            self._source = grain.sources.ArrayRecordDataSource(files)
            count = len(self._source)
        except Exception as error:  # the library raises several kinds
            raise ValueError(
                f"config.data.{option}={files[0]!r}: not an ArrayRecord file ({_one_line(error)})"
            ) from None
        # The format hides sizes without reading, so streams are balanced by number of documents.
        self.sizes = np.ones(count, np.int64)
        self.fingerprint = _digest([(os.path.basename(f), os.path.getsize(f)) for f in files])

    def __len__(self) -> int:
        return len(self.sizes)

    def hashes(self) -> np.ndarray:
        return _shares_of_numbers(len(self))

    def __getitem__(self, index: int) -> Document:
        return Document(self._source[index])


def _mean_size(column: Any, rows: int) -> int:
    """Returns the bytes a row of a row group's column, 0 only where none has any text."""
    mean = int(column.total_uncompressed_size) // max(rows, 1)
    if mean or not column.total_uncompressed_size:
        return mean
    # Texts that repeat stand in a dictionary, with less than a byte a row to tell which. So does a
    # column of empty texts or nulls, which only its statistics tell apart.
    found = column.statistics
    if found is None:
        return 1
    if found.has_min_max:
        return int(bool(found.max_raw))  # raw: what is no UTF-8 could not be decoded
    return int(not found.has_null_count or found.null_count < rows)


def _is_text(kind: Any) -> bool:
    """Tells whether an Arrow type is string or binary, plain or as a dictionary."""
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def _lines(file: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the file's lines start and how long they are, [n] int64 each, ends left off.

    Blank lines are left out: they are what editors leave behind, not records.
    """
    ends = []
    start = 0
    with open(file, "rb") as opened:
        while block := opened.read(1 << 24):
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + start)
            start += len(block)
    stops = np.concatenate([*ends, [start]]).astype(np.int64)
    starts = np.concatenate([[0], stops[:-1] + 1])
    kept = stops - starts > 1  # one byte is blank, a carriage return, or no object
    return starts[kept], (stops - starts)[kept]


def _name(root: str, file: str) -> str:
    """Returns a file's name below the root, the same on every system."""
    return os.path.relpath(file, root).replace(os.sep, "/")


def _span(file: str, start: int, stop: int) -> Text:
    """Returns a file's bytes from `start` to `stop`, mapped where they are many."""
    with open(file, "rb") as opened:
        if stop - start >= _MAPPED_BYTES:
            # A map can only begin at such a multiple.
            before = start % mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(
                opened.fileno(),
                stop - start + before,
                access=mmap.ACCESS_READ,
                offset=start - before,
            )
            return memoryview(mapped)[before:] if before else mapped
        opened.seek(start)
        return opened.read(stop - start)


def _cut(opened: BinaryIO, end: int) -> list[tuple[int, int]]:
    """Returns the spans, in order, of the documents that a text file is cut into up to `end`."""
    spans, start = [], 0
    # Three more bytes may belong to a character that begins before the cut.
    while end - start > _CUT_BYTES + 3:
        # A line that does not end within as much again is cut inside.
        stop = min(_line_start(opened, start + _CUT_BYTES, _CUT_BYTES), end)
        spans.append((start, stop))
        start = stop
    if start < end or not spans:
        spans.append((start, end))
    return spans


def _line_start(opened: BinaryIO, near: int, within: int) -> int:
    """Returns where the first line after byte `near` starts.

    Where none does within so many bytes, `near` itself or the end of the character it lies in.
    """
    opened.seek(near)
    line = opened.readline(within)
    if line.endswith(b"\n") and opened.read(1):
        return near + len(line)
    # No line to go by: at least not inside a character.
    return near + next((i for i, byte in enumerate(line[:4]) if byte & 0xC0 != 0x80), 0)


def _to_bytes(text: str) -> bytes:
    """Returns the text as UTF-8, with bytes that came in as surrogates as they were."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        pass
    try:
        return text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError:  # JSON escapes such as "\ud800" have no byte form
        return text.encode("utf-8", errors="surrogatepass")


def _share(name: str) -> float:
    """Returns a fixed number in [0, 1) for a name."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "little") / 2**64


def _shares_of_numbers(count: int) -> np.ndarray:
    """Returns a fixed number in [0, 1) for each of 0 .. count - 1 (the SplitMix64 mixer)."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) / 2**53


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
