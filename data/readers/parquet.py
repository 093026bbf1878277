"""Parquet: one document per row, its text (string or binary) in a column.

Grain's own Parquet dataset reads all columns from front to back; shuffling needs random access.
"""

import collections
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pyarrow.types as types

from data.files import Files
from data.readers.reader import BROKEN, Document, hashes_of_numbers
from errors import UserError

# Decoded row groups that a process caches. Shuffled reading jumps between row groups: a corpus up
# to this size is decoded once, and a larger one is faster as JSONL or ArrayRecord.
CACHE_BYTES = 1 << 30


class ParquetReader:
    """One document per row. Rows of files without the column, and nulls, are broken documents."""

    def __init__(self, paths: list[str], field: str, option: str):
        self.files = Files(paths)
        self._field = field
        self._option = option
        self._groups: list[tuple[int, int]] = []  # (file, row group)
        rows: list[int] = []
        sizes: list[int] = []
        known: list[str] = []
        has_column = []
        for number, path in enumerate(paths):
            opened = self._open(path)
            column = _leaf(opened.schema_arrow, field, path)
            has_column.append(column is not None)
            if column and types.is_null(opened.schema_arrow.field(field).type):
                column = None  # its rows have no size
            known += [name for name in _texts(opened.schema_arrow) if name not in known]
            for group in range(opened.metadata.num_row_groups):
                described = opened.metadata.row_group(group)
                self._groups.append((number, group))
                rows.append(described.num_rows)
                size = column and _mean_size(described.column(column - 1), described.num_rows)
                sizes.append(size or 0)
        if not any(has_column):
            raise UserError(
                f"config.data.field={field!r}: {paths[0]} has no such text column, nor has any "
                "other file; "
                + ("try " + " or ".join(map(repr, known[:10])) if known else "they have none")
            )
        self._has_column = has_column
        self._first_rows = np.cumsum([0, *rows])
        # The format records only the size of a row group, so each of its rows gets the mean.
        self.sizes = np.repeat(np.asarray(sizes, np.int64), rows)
        self._cache: collections.OrderedDict[int, Any] = collections.OrderedDict()

    def _open(self, path: str) -> Any:
        try:
            return pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            said = " ".join(str(error).split())[:200]
            raise UserError(
                f"config.data.{self._option}={path!r}: not a Parquet file ({said})"
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": collections.OrderedDict()}

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def fingerprint(self) -> str:
        return self.files.fingerprint()

    def hashes(self) -> np.ndarray:
        return hashes_of_numbers(len(self))

    def __getitem__(self, index: int) -> Document:
        group = int(np.searchsorted(self._first_rows, index, side="right")) - 1
        if not self._has_column[self._groups[group][0]]:
            return BROKEN
        value = self._column(group)[int(index - self._first_rows[group])].as_py()
        return BROKEN if value is None else Document(value)

    def _column(self, group: int) -> Any:
        """Returns the texts of a row group as binary."""
        if group in self._cache:
            self._cache.move_to_end(group)
            return self._cache[group]
        number, part = self._groups[group]
        self.files.check(number)
        table = self._open(self.files.paths[number]).read_row_group(part, columns=[self._field])
        # By name: reading a column "a.b" also reads the field b of a column "a".
        self._cache[group] = column = _as_binary(table.column(self._field))
        while len(self._cache) > 1 and (
            sum(held.nbytes for held in self._cache.values()) > CACHE_BYTES
        ):
            self._cache.popitem(last=False)
        return column


def _as_binary(column: Any) -> Any:
    """As binary, because a string column may hold invalid UTF-8, which as_py() would reject."""
    if isinstance(column.type, pyarrow.BaseExtensionType):
        parts = [part.storage for part in column.chunks]
        column = pyarrow.chunked_array(parts, column.type.storage_type)
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pyarrow.large_binary())


def _is_text(kind: Any) -> bool:
    """Returns whether an Arrow type is string or binary in any layout, or holds only nulls."""
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = (
        types.is_string,
        types.is_large_string,
        types.is_string_view,
        types.is_binary,
        types.is_large_binary,
        types.is_binary_view,
        types.is_fixed_size_binary,
        types.is_null,
    )
    return any(test(kind) for test in tests)


def _texts(schema: Any) -> list[str]:
    return [field.name for field in schema if _is_text(field.type)]


def _leaf(schema: Any, field: str, path: str) -> int | None:
    """Returns the number, from 1, of the Parquet column of a text field; None if there is none.

    A nested field has several Parquet columns, whose paths may equal the name of another field.
    """
    found = [number for number, name in enumerate(schema.names) if name == field]
    if len(found) > 1:
        raise UserError(
            f"config.data.field={field!r}: {path} has {len(found)} columns of that name; needs one"
        )
    if not found or not _is_text(schema.field(found[0]).type):
        return None
    return 1 + sum(_leaves(schema.field(number).type) for number in range(found[0]))


def _leaves(kind: Any) -> int:
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    if types.is_dictionary(kind) or not kind.num_fields:
        return 1
    return sum(_leaves(kind.field(number).type) for number in range(kind.num_fields))


def _mean_size(column: Any, rows: int) -> int:
    """Returns the bytes per row of a row group's column; 0 only if no row has text."""
    mean = int(column.total_uncompressed_size) // max(rows, 1)
    if mean or not column.total_uncompressed_size:
        return mean
    # Less than one byte per row: repeated texts in a dictionary, or only empty texts and nulls.
    # The column's statistics distinguish the two.
    found = column.statistics
    if found is None:
        return 1
    if found.has_min_max:
        return int(bool(found.max_raw))  # raw: invalid UTF-8 could not be decoded
    return int(not found.has_null_count or found.null_count < rows)
