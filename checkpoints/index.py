"""The index of a step's arrays (OCDBT): which bytes of which files it refers to.

Orbax merges what every process wrote into one B-tree, whose nodes have checksums. Reading the nodes
is cheap and shows whether the data files exist and are long enough; opening the arrays does not.
"""

import collections
import concurrent.futures
import dataclasses
from collections.abc import Iterator

import tensorstore as ts
from etils import epath

from checkpoints.errors import DamagedError, IncompleteError

_STAT_THREADS = 16  # for a bucket, where each thread mostly waits for the network


@dataclasses.dataclass(frozen=True)
class Extent:
    """A range of bytes of a file, whose path is relative to the index."""

    path: str
    begin: int
    length: int

    @property
    def end(self) -> int:
        return self.begin + self.length


def check_files(folder: epath.Path) -> None:
    """Checks that every file that the index in `folder` refers to exists and is long enough.

    Cost: it reads the nodes of the index and gets the size of each file.

    Raises:
        IncompleteError: the index is empty. DamagedError: a file is missing or too short.
    """
    needed: dict[str, int] = collections.defaultdict(int)
    for extent in extents(folder):
        needed[extent.path] = max(needed[extent.path], extent.end)
    with concurrent.futures.ThreadPoolExecutor(_STAT_THREADS) as pool:
        sizes = pool.map(lambda path: _size(folder / path), needed)
    for (path, least), size in zip(needed.items(), sizes):
        if size is None:
            raise DamagedError(f"{folder.parent}: damaged, {path} is missing")
        if size < least:
            raise DamagedError(
                f"{folder.parent}: damaged, {path} has {size} bytes where its index needs {least}"
            )


def extents(folder: epath.Path) -> Iterator[Extent]:
    """Yields where the values of the newest version of the index are stored."""
    store = ts.KvStore.open(_base(folder)).result()
    versions = ts.ocdbt.dump(store).result()["versions"]
    if not versions:
        raise IncompleteError(f"{folder}: incomplete, its index is empty")
    nodes = [versions[-1]["root"]["location"]]
    while nodes:
        for entry in ts.ocdbt.dump(store, nodes.pop()).result()["entries"]:
            if "location" in entry:
                nodes.append(entry["location"])
            elif "indirect_value" in entry:
                yield _extent(entry["indirect_value"])


def _extent(reference: str) -> Extent:
    """Parses kind:base:path:begin:length."""
    _, base, path, begin, length = reference.split(":")
    return Extent(base + path, int(begin), int(length))


def _base(folder: epath.Path) -> dict[str, str]:
    """TensorStore's specification of the folder; in a URL, "%" and "#" would be special."""
    scheme, _, rest = str(folder).rpartition("://")
    if not scheme:
        return {"driver": "file", "path": f"{folder}/"}
    bucket, _, path = rest.partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}


def _size(path: epath.Path) -> int | None:
    """Size of a file in bytes; None if there is no such file."""
    try:
        return path.stat().length
    except FileNotFoundError:
        return None
