"""Document sources, selected by config.data.source, and the split into training and evaluation.

A source is a random-access sequence of documents as bytes: the running Python's standard library,
text files, JSONL, Parquet or ArrayRecord, or documents that a task generates. Opening a source
lists files, samples their content and, for JSONL, finds where lines start. Texts are read on
access.
"""

import hashlib
import os
import sysconfig
import weakref

import numpy as np

from data.files import Files, list_files
from data.options import DataConfig
from data.readers.array_record import ArrayRecordReader
from data.readers.forms import form_of
from data.readers.jsonl import JsonLinesReader
from data.readers.reader import Document, Reader
from data.readers.text import CutFileReader, FileReader
from data.tasks.registry import TASKS
from data.tasks.task import TaskReader
from errors import DataError, TrainerError, UserError

SPLITS = ("train", "eval")
# Folders below the standard library that are not part of its source: tests, vendored wheels, and
# packages installed by the environment.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_SUFFIXES = {"jsonl": ".jsonl", "parquet": ".parquet", "array_record": ".array_record"}


class DocumentSource:
    """The documents of one split: a reader and the numbers of the records that belong to it."""

    def __init__(self, reader: Reader, records: np.ndarray, option: str, described: str):
        self._reader = reader
        self._option = f"config.data.{option}"
        self._records = records
        self.described = described
        self.sizes = reader.sizes[records]
        # The first covers all records of both splits, the second those of this split.
        self.fingerprint = f"{len(reader):,} documents {reader.fingerprint()}"
        digest = hashlib.sha256(records.astype(np.int64).tobytes()).hexdigest()[:16]
        self.split_fingerprint = f"{len(records):,} documents {digest}"

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Document:
        record = int(self._records[index])
        try:
            return self._reader[record]
        except TrainerError:
            raise
        except Exception as error:  # each format has its own kinds
            reason = " ".join(str(error).split())[:200]
            if "Too many open files" in reason:
                reason += "; raise the limit that ulimit -n shows"
            raise DataError(
                f"{self._option}: document {record} of {self.described} can no longer be read "
                f"({reason})"
            ) from error


def open_source(config: DataConfig, split: str) -> DocumentSource:
    """Opens the documents of a split, "train" or "eval".

    Raises:
        UserError: there are no documents, they cannot be read, or none is left for the split.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: needs one of {', '.join(SPLITS)}")
    elsewhere = split == "eval" and bool(config.eval_path)
    option, path = ("eval_path", config.eval_path) if elsewhere else ("path", config.path)
    reader = _open_reader(config, option, path)
    records = np.arange(len(reader))
    if not config.eval_path:
        records = _split(reader, config, split)
    default = "the standard library" if config.source == "stdlib" else config.source
    source = DocumentSource(reader, records, option, path or default)
    # Sizes may be those of lines or records. Training detects a lack of text while it reads, but an
    # evaluation without text would report a loss of 0.
    empty = split == "eval" and not any(len(source[i].text) for i in range(len(source)))
    if empty or not source.sizes.any():
        raise UserError(
            f"config.data.{option}={path!r}: no text left for split {split!r}; give documents for "
            "evaluation as config.data.eval_path"
        )
    return source


def _split(reader: Reader, config: DataConfig, split: str) -> np.ndarray:
    """Returns the numbers of the split's records, held out by their hashes.

    At least one document is held out and at least one is kept.
    """
    if len(reader) < 2:
        raise UserError(
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


# Open readers by key. Both splits share a reader, because opening one may read all files.
_readers: weakref.WeakValueDictionary[object, Reader] = weakref.WeakValueDictionary()


def _open_reader(config: DataConfig, option: str, path: str) -> Reader:
    if write := TASKS.get(config.source):
        length, count = config.task_length, config.task_documents
        return TaskReader(write, length=length, count=count, seed=config.task_seed)
    files = _files(config, option, path)
    # A single text file is cut for training; unless there is an eval_path, its end is held out.
    held_out = 0.0 if config.eval_path else config.eval_fraction
    key = config.source, config.field, config.loss_on, option, held_out, Files(files).key()
    reader = _readers.get(key)
    if reader is None:
        reader = _readers[key] = _make_reader(config, option, path, files, held_out)
    if len(reader) == 0 or not reader.sizes.any():
        raise UserError(f"config.data.{option}={path!r}: it holds no text")
    return reader


def _make_reader(
    config: DataConfig, option: str, path: str, files: list[str], held_out: float
) -> Reader:
    """Opens a reader; the only place that lists all formats."""
    if config.source == "stdlib":
        return FileReader(sysconfig.get_path("stdlib"), files)
    if config.source == "text":
        if len(files) == 1 and option == "path":
            # As one document, it would be the only text that every row reads.
            return CutFileReader(files[0], held_out)
        return FileReader(path if os.path.isdir(path) else os.path.dirname(path), files)
    if config.source == "jsonl":
        return JsonLinesReader(files, form_of(config.loss_on, config.field))
    if config.source == "parquet":
        from data.readers.parquet import ParquetReader  # slow to import and needed by few

        return ParquetReader(files, config.field, option)
    return ArrayRecordReader(files, option)


def _files(config: DataConfig, option: str, path: str) -> list[str]:
    if config.source == "stdlib":
        return _standard_library()
    if not os.path.exists(path):
        raise UserError(f"config.data.{option}={path!r}: no such file or folder")
    suffix = _SUFFIXES.get(config.source, "")
    files = list_files(option, path, suffix)
    if suffix and not files:
        raise UserError(f"config.data.{option}={path!r}: no {suffix} file in it")
    return files


def _standard_library() -> list[str]:
    root = sysconfig.get_path("stdlib")
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)
        files += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise UserError(
            f"config.data.source='stdlib': no .py files below {root}; set config.data.source and "
            "config.data.path to documents of your own"
        )
    return sorted(files)
