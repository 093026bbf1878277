"""Reads and writes Hugging Face folders of safetensors files, one tensor in memory at a time.

A file consists of an eight-byte little-endian length, a JSON header of that length, and the
tensors' bytes (github.com/huggingface/safetensors, "Format"). Several files share an index that
gives the file of each tensor. The `safetensors` package is not used: it needs all tensors of a file
at once to write it, and its NumPy interface lacks bfloat16.
"""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from types import TracebackType
from typing import BinaryIO, Self

import ml_dtypes
import numpy as np

from errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9
_MOST_HEADER = 100 * 10**6  # bytes; the format's own limit
_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class WeightsError(UserError):
    """A folder of weights cannot be read or written; one line with what, where and what to try."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """The location of a tensor; `begin` is its first byte in the file."""

    file: str
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Spec:
    """A tensor to be written: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Reader:
    """The tensors of a folder by name. Headers are read and checked here, tensors in `read`.

    Raises:
        WeightsError: there are no safetensors files, a file is missing or truncated, or a header
            is invalid.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        for file in self._files():
            for name, entry in _header(os.path.join(folder, file)).items():
                if name in self.entries:
                    raise WeightsError(
                        f"{entry.file}: {name} is in {self.entries[name].file} as well; "
                        "try downloading the folder again"
                    )
                self.entries[name] = entry

    def read(self, name: str) -> np.ndarray:
        """Returns the tensor in its stored dtype."""
        entry = self.entries[name]
        with open(entry.file, "rb") as file:
            file.seek(entry.begin)
            data = file.read(entry.nbytes)
        if len(data) != entry.nbytes:
            raise WeightsError(f"{entry.file}: truncated inside {name}; try downloading it again")
        return np.frombuffer(data, entry.dtype).reshape(entry.shape)

    def _files(self) -> list[str]:
        path = os.path.join(self.folder, INDEX)
        if os.path.exists(path):
            try:
                with open(path, encoding="utf-8") as file:
                    files = sorted(set(json.load(file)["weight_map"].values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                raise WeightsError(
                    f"{path}: not an index of safetensors files; try downloading it again"
                ) from None
            missing = [f for f in files if not os.path.isfile(os.path.join(self.folder, f))]
            if missing:
                raise WeightsError(
                    f"{self.folder}: {missing[0]} of its index is missing ({len(missing)} of "
                    f"{len(files)} files); try downloading the folder again"
                )
            return files
        if not os.path.isdir(self.folder):
            raise WeightsError(f"{self.folder}: no such folder; try the folder of a config.json")
        files = sorted(f for f in os.listdir(self.folder) if f.endswith(".safetensors"))
        if not files:
            raise WeightsError(f"{self.folder}: no .safetensors files; only that format is read")
        return files


def _header(path: str) -> dict[str, Entry]:
    """Returns the entries of one file, after checking that it is not truncated."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise WeightsError(f"{path}: truncated or not a safetensors file ({size} bytes)")
        text = file.read(length)
    try:
        table = {name: _entry(path, 8 + length, x) for name, x in json.loads(text).items()
                 if name != "__metadata__"}  # fmt: skip
    except WeightsError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WeightsError(f"{path}: its header is damaged; try downloading it again") from None
    end = max((entry.begin + entry.nbytes for entry in table.values()), default=0)
    if end > size:
        raise WeightsError(
            f"{path}: truncated, {size} bytes where its header needs {end}; "
            "try downloading it again"
        )
    return table


def _entry(path: str, start: int, found: dict) -> Entry:
    begin, end = found["data_offsets"]
    if found["dtype"] not in _DTYPES:
        raise WeightsError(f"{path}: has type {found['dtype']}; valid types: {', '.join(_DTYPES)}")
    entry = Entry(path, _DTYPES[found["dtype"]], tuple(map(int, found["shape"])), start + begin)
    if end - begin != entry.nbytes or begin < 0:
        raise ValueError
    return entry


class Writer:
    """Writes tensors one by one, in the order of `specs`, into as many files as necessary.

    A file gets its final name only when it is complete, and the index is written last, so that an
    interrupted export is not mistaken for a complete one.

    Args:
        folder: created if missing. specs: all tensors, in the order in which they are added.
        shard_bytes: bytes of tensors per file; a larger tensor gets its own file.
    """

    def __init__(self, folder: str, specs: Sequence[Spec], shard_bytes: int = SHARD_BYTES):
        os.makedirs(folder, exist_ok=True)
        self._folder = folder
        self._shards = _shards(specs, shard_bytes)
        self._file: BinaryIO | None = None
        self._shard = self._place = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._file is not None:
            self._file.close()
        if kind is None:
            self._finish()

    def add(self, name: str, array: np.ndarray) -> None:
        """Writes the next tensor, cast to the dtype of its spec.

        Raises:
            ValueError: it is not the next one of `specs`, or has another shape.
        """
        specs = self._shards[self._shard]
        spec = specs[self._place]
        if name != spec.name or array.shape != spec.shape:
            raise ValueError(f"{name} {array.shape} where {spec.name} {spec.shape} comes next")
        if self._file is None:
            self._file = open(self._path(self._shard) + ".part", "wb")  # noqa: SIM115
            self._file.write(_header_bytes(specs))
        self._file.write(np.ascontiguousarray(array, spec.dtype).view(np.uint8).data)
        self._place += 1
        if self._place == len(specs):
            self._file.close()
            os.replace(self._path(self._shard) + ".part", self._path(self._shard))
            self._file, self._shard, self._place = None, self._shard + 1, 0

    def _path(self, shard: int) -> str:
        return os.path.join(self._folder, self._name(shard))

    def _name(self, shard: int) -> str:
        count = len(self._shards)
        return SINGLE if count == 1 else f"model-{shard + 1:05d}-of-{count:05d}.safetensors"

    def _finish(self) -> None:
        if self._shard < len(self._shards):
            raise ValueError(f"{self._shards[self._shard][self._place].name} was never added")
        if len(self._shards) == 1:
            return
        names = {s.name: self._name(i) for i, shard in enumerate(self._shards) for s in shard}
        size = sum(spec.nbytes for shard in self._shards for spec in shard)
        part = os.path.join(self._folder, INDEX + ".part")
        with open(part, "w", encoding="utf-8") as file:
            json.dump({"metadata": {"total_size": size}, "weight_map": names}, file, indent=1)
        os.replace(part, os.path.join(self._folder, INDEX))


def _shards(specs: Sequence[Spec], shard_bytes: int) -> list[list[Spec]]:
    shards: list[list[Spec]] = []
    used = 0
    for spec in specs:
        if not shards or (used and used + spec.nbytes > shard_bytes):
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.nbytes
    return shards


def _header_bytes(specs: Sequence[Spec]) -> bytes:
    table: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for spec in specs:
        table[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, begin + spec.nbytes],
        }
        begin += spec.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of eight bytes
    return len(text).to_bytes(8, "little") + text
