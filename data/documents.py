"""Where documents come from, and which of them are held out for evaluation.

A source is a random-access sequence of documents as bytes (so a grain `MapDataset` can be made of
it): the running Python's standard library, text files, JSONL, Parquet or ArrayRecord. Opening one
lists files and, for JSONL, finds where lines start; texts are read when asked for.
"""

import errno
import hashlib
import os
import sysconfig
import weakref
from typing import NoReturn, Protocol

import numpy as np

from data.options import DataConfig
from data.readers import (
    ArrayRecordReader,
    CutFileReader,
    Document,
    FileReader,
    JsonLinesReader,
    ParquetReader,
)

SPLITS = ("train", "eval")
# Top-level parts of the standard library that are not its source text: tests, vendored wheels,
# and what the environment put there.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
# Names of packed files end so. They are refused: left out, a part of the corpus would be missing.
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_SUFFIXES = {"jsonl": ".jsonl", "parquet": ".parquet", "array_record": ".array_record"}


class Reader(Protocol):
    """Random access to the records of some files; what each class in data/readers.py is."""

    sizes: np.ndarray  # [n] int64 bytes, or estimates
    fingerprint: str  # changes when the records do

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Document: ...
    def hashes(self) -> np.ndarray: ...  # [n] float64 in [0, 1), from names or numbers


class DocumentSource:
    """The documents of one split: a reader and the numbers of the records that belong to it."""

    def __init__(self, reader: Reader, records: np.ndarray, described: str):
        self._reader = reader
        self._records = records
        self.described = described
        self.sizes = reader.sizes[records]
        digest = hashlib.sha256(records.tobytes() + reader.fingerprint.encode())
        self.fingerprint = f"{len(records)} documents {digest.hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Document:
        record = int(self._records[index])
        try:
            return self._reader[record]
        except Exception as error:  # each format has its own kinds
            raise ValueError(
                f"config.data.path: document {record} of {self.described} can no longer be read "
                f"({' '.join(str(error).split())[:200]})"
            ) from error


def open_source(config: DataConfig, split: str) -> DocumentSource:
    """Opens the documents of a split, "train" or "eval".

    Raises ValueError, in one line that names the option, where there is nothing to read.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: needs 'train' or 'eval'")
    option = "eval_path" if config.eval_path and split == "eval" else "path"
    path = os.path.expanduser(getattr(config, option))
    reader = _open_reader(config, option, path)
    records = np.arange(len(reader)) if config.eval_path else _split(reader, config, split)
    source = DocumentSource(reader, records, f"{config.source} {path}".rstrip())
    # Training says by itself that it finds no text; an evaluation of none would be a loss of 0.
    empty = split == "eval" and not any(len(source[i].text) for i in range(len(source)))
    if empty or not source.sizes.any():
        raise ValueError(
            f"config.data.{option}={path!r}: no text left for split {split!r}; give documents for "
            "evaluation as config.data.eval_path"
        )
    return source


def _split(reader: Reader, config: DataConfig, split: str) -> np.ndarray:
    """Returns the numbers of the split's records, held out by their hashes.

    At least one document is held out and at least one is kept.
    """
    if len(reader) < 2:
        raise ValueError(
            f"config.data.path={config.path!r}: one document cannot be split into training and "
            "evaluation; give the latter as config.data.eval_path"
        )
    hashes = reader.hashes()
    held_out = hashes < config.eval_fraction
    if not held_out.any():
        held_out[np.argmin(hashes)] = True
    if held_out.all():
        held_out[np.argmax(hashes)] = False
    return np.flatnonzero(held_out if split == "eval" else ~held_out)


def _open_reader(config: DataConfig, option: str, path: str) -> Reader:
    if config.source == "stdlib":
        return _standard_library()
    if not os.path.exists(path):
        raise ValueError(f"config.data.{option}={path!r}: no such file or folder")
    if config.source == "text":
        reader: Reader = _text_files(config, option, path)
    else:
        files = _files(option, path, _SUFFIXES[config.source])
        if not files:
            raise ValueError(
                f"config.data.{option}={path!r}: no {_SUFFIXES[config.source]} file in it"
            )
        if config.source == "jsonl":
            reader = _json_lines(files, config.field)
        elif config.source == "parquet":
            reader = ParquetReader(files, config.field, option)
        else:
            reader = ArrayRecordReader(files, option)
    if len(reader) == 0 or not reader.sizes.any():
        raise ValueError(f"config.data.{option}={path!r}: it holds no text")
    return reader


# By field and files as they are: those in use.
_json_lines_readers: weakref.WeakValueDictionary[object, JsonLinesReader] = (
    weakref.WeakValueDictionary()
)


def _json_lines(files: list[str], field: str) -> JsonLinesReader:
    """The reader of both splits, as long as one of them is open: finding lines reads all files."""
    stats = [os.stat(file) for file in files]
    states = [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats]
    key = field, tuple(files), tuple(states)
    reader = _json_lines_readers.get(key)
    if reader is None:
        reader = _json_lines_readers[key] = JsonLinesReader(files, field)
    return reader


def _standard_library() -> FileReader:
    root = sysconfig.get_path("stdlib")
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)
        files += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise ValueError(
            f"config.data.source='stdlib': no .py files below {root}; set config.data.source and "
            "config.data.path to documents of your own"
        )
    return FileReader(root, files)


def _text_files(config: DataConfig, option: str, path: str) -> Reader:
    root = path if os.path.isdir(path) else os.path.dirname(path)
    files = _files(option, path, "")
    if len(files) != 1 or option == "eval_path":
        return FileReader(root, files)
    # As one document it would be all that every row reads; what is held out is its end.
    return CutFileReader(root, files[0], 0.0 if config.eval_path else config.eval_fraction)


def _files(option: str, path: str, suffix: str) -> list[str]:
    """The file, or those below the folder, also behind links, all of which can be read.

    Raises ValueError rather than leave out what may be a part of the corpus.
    """

    def refuse(error: OSError) -> NoReturn:
        raise ValueError(
            f"config.data.{option}={path!r}: {error.filename} cannot be read ({error.strerror}); "
            "take it away or make it readable"
        )

    found = [path] if os.path.isfile(path) else []
    reached: dict[str, tuple[str, ...]] = {}  # by folder: its real path and those of all above it
    for folder, folders, names in () if found else os.walk(path, onerror=refuse, followlinks=True):
        # Of "./a/b" and "a//b" as well, the folder above is "a".
        above = os.path.normpath(os.path.dirname(folder))
        real, through = os.path.realpath(folder), reached.get(above, ())
        if real in through:
            refuse(OSError(errno.ELOOP, "a link to a folder that it lies in", folder))
        reached[os.path.normpath(folder)] = (*through, real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [
            os.path.join(folder, name)
            for name in names
            if name.endswith((suffix, *(suffix + end for end in _COMPRESSED)))
            and not name.startswith(".")
        ]
    for file in found:
        if not os.path.isfile(file):
            refuse(OSError(errno.EINVAL, "a broken link, or no regular file", file))
        if not os.access(file, os.R_OK):
            refuse(OSError(errno.EACCES, os.strerror(errno.EACCES), file))
        if file.endswith(_COMPRESSED):
            raise ValueError(
                f"config.data.{option}={path!r}: {file} is compressed; unpack it or take it away"
            )
    return sorted(found)
