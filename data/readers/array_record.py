"""ArrayRecord: one document per record, whose bytes are its text. Uses Grain's reader."""

import collections
import concurrent.futures
from typing import Any

import grain
import numpy as np

from data.files import Files
from data.readers.reader import Document, hashes_of_numbers
from errors import UserError

# Files that a process keeps open; each takes a descriptor and a thread.
_OPEN_FILES = 64
_OPENERS = 16


class ArrayRecordReader:
    """One document per record."""

    def __init__(self, paths: list[str], option: str):
        self.files = Files(paths)
        with concurrent.futures.ThreadPoolExecutor(_OPENERS) as pool:
            counts = list(pool.map(lambda path: _count(path, option), paths))
        self._first_records = np.cumsum([0, *counts])
        # Sizes are not known without reading, so streams are balanced by number of documents.
        self.sizes = np.ones(len(self), np.int64)
        self._sources: collections.OrderedDict[int, Any] = collections.OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sources": collections.OrderedDict()}

    def __len__(self) -> int:
        return int(self._first_records[-1])

    def fingerprint(self) -> str:
        return self.files.fingerprint()

    def hashes(self) -> np.ndarray:
        return hashes_of_numbers(len(self))

    def __getitem__(self, index: int) -> Document:
        number = int(np.searchsorted(self._first_records, index, side="right")) - 1
        self.files.check(number)
        text = self._source(number)[int(index - self._first_records[number])]
        self.files.check(number)
        return Document(text)

    def _source(self, number: int) -> Any:
        if number in self._sources:
            self._sources.move_to_end(number)
            return self._sources[number]
        source = self._sources[number] = grain.sources.ArrayRecordDataSource(
            self.files.paths[number]
        )
        while len(self._sources) > _OPEN_FILES:
            self._sources.popitem(last=False)[1].__exit__(None, None, None)
        return source


def _count(path: str, option: str) -> int:
    try:
        return len(grain.sources.ArrayRecordDataSource(path))
    except Exception as error:  # the library raises several kinds
        said = " ".join(str(error).split())[:200]
        raise UserError(
            f"config.data.{option}={path!r}: not an ArrayRecord file ({said})"
        ) from None
