"""Files of a corpus: found below a path, identified by content, and checked when they are read.

A fingerprint depends on the sizes and bytes of the files, in order, and neither on their names nor
on their folder. It reads at most SAMPLES blocks of SAMPLE_BYTES: 64 MiB in 1,024 reads, 16 at a
time, whatever the size of the corpus. Within these limits it covers every byte. In a larger corpus,
a change that keeps the size is detected if it touches one of the evenly spaced blocks. A change of
one per cent of the corpus, scattered or contiguous, is nearly always detected.
"""

import concurrent.futures
import dataclasses
import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np

from errors import DataError, UserError

SAMPLES = 1024
SAMPLE_BYTES = 1 << 16
_READERS = 16
# Suffixes of compressed files. They are refused, because skipping them would lose part of the
# corpus.
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_UTF8_MARK = b"\xef\xbb\xbf"
_WIDE_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


@dataclasses.dataclass(frozen=True)
class FileState:
    """Size and modification time, which show whether a file has changed since it was opened."""

    size: int
    modified: int  # nanoseconds

    @staticmethod
    def of(status: os.stat_result) -> "FileState":
        return FileState(status.st_size, status.st_mtime_ns)


class Files:
    """Files in the state in which a run opened them. A read fails if the file has changed since."""

    def __init__(self, paths: list[str]):
        self.paths = paths
        self.states = [FileState.of(os.stat(path)) for path in paths]
        self.sizes = np.asarray([state.size for state in self.states], np.int64)
        self._fingerprint = ""

    def __len__(self) -> int:
        return len(self.paths)

    def key(self) -> tuple[object, ...]:
        """A key that is equal for the same files in the same state."""
        return (*self.paths, *self.states)

    def read(self, number: int, start: int, stop: int) -> bytes:
        """Returns the bytes from `start` to `stop` of a file.

        They are copied, never mapped: reading a mapped file that has shrunk ends a process by
        SIGBUS.

        Raises:
            DataError: the file is not what it was when it was opened.
        """
        with open(self.paths[number], "rb", buffering=0) as file:
            file.seek(start)
            parts, left = [], stop - start
            while left and (part := file.read(left)):
                parts.append(part)
                left -= len(part)
            self._check(number, os.fstat(file.fileno()))
        if left:
            raise self._changed(number, "it has lost its end")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def check(self, number: int) -> None:
        """Raises DataError if a file that a library reads has changed since it was opened."""
        self._check(number, os.stat(self.paths[number]))

    def _check(self, number: int, status: os.stat_result) -> None:
        now, then = FileState.of(status), self.states[number]
        if now.size != then.size:
            raise self._changed(number, f"it had {then.size:,} bytes and has {now.size:,}")
        if now.modified != then.modified:
            raise self._changed(number, "it was written to")

    def _changed(self, number: int, how: str) -> DataError:
        return DataError(
            f"config.data: {self.paths[number]} has changed during the run ({how}); restore it and "
            "start the same command again, or start in a new --workdir"
        )

    def fingerprint(self) -> str:
        """Returns a digest of sizes and sampled bytes; see the head of this module."""
        if not self._fingerprint:
            digest = hashlib.sha256(self.sizes.tobytes())
            with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
                for part in pool.map(self._digest_span, sampled_spans(self.sizes)):
                    digest.update(part)
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    def _digest_span(self, span: tuple[int, int, int]) -> bytes:
        return hashlib.sha256(self.read(*span)).digest()


def sampled_spans(sizes: np.ndarray) -> list[tuple[int, int, int]]:
    """Returns (file, start, stop) of the bytes to compare, at most SAMPLES of SAMPLE_BYTES each."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    spans = [
        (number, start, min(start + SAMPLE_BYTES, size))
        for number, size in enumerate(sizes.tolist()[: SAMPLES + 1])
        for start in range(0, min(size, SAMPLES * SAMPLE_BYTES + 1), SAMPLE_BYTES)
    ]
    if len(sizes) <= SAMPLES and len(spans) <= SAMPLES:
        return spans
    places = np.linspace(0, max(total - SAMPLE_BYTES, 0), SAMPLES).astype(np.int64)
    numbers = np.searchsorted(ends, places, side="right")
    starts = places - (ends - sizes)[numbers]
    stops = np.minimum(starts + SAMPLE_BYTES, sizes[numbers])
    return list(zip(numbers.tolist(), starts.tolist(), stops.tolist()))


def utf8_mark(head: bytes) -> int:
    """Returns the length of the byte order mark that UTF-8 text begins with, 0 without one."""
    return len(_UTF8_MARK) if head.startswith(_UTF8_MARK) else 0


def wide_encoding(head: bytes, size: int) -> str:
    """Returns "UTF-16" or "UTF-32" if a file that begins with `head` has that encoding, else "".

    Detected by a byte order mark, or by the zero bytes that Latin letters have in it.
    """
    for mark, name in _WIDE_MARKS:
        if head.startswith(mark) and size % (4 if name == "UTF-32" else 2) == 0:
            return name
    zero = np.frombuffer(head[: len(head) // 4 * 4], np.uint8).reshape(-1, 4) == 0
    if size % 2 or len(zero) < 2:
        return ""
    columns = zero.mean(axis=0)
    if (columns[0] < 0.1 and columns[1:].min() > 0.9) or (
        columns[3] < 0.1 and columns[:3].min() > 0.9
    ):
        return "UTF-32"
    low, high = (columns[0] + columns[2]) / 2, (columns[1] + columns[3]) / 2
    return "UTF-16" if min(low, high) < 0.1 and max(low, high) > 0.9 else ""


def refuse_wide(path: str, encoding: str) -> UserError:
    """Returns the error for a file that must be converted first."""
    return UserError(
        f"config.data: {path} is {encoding}; needs UTF-8; try iconv -f {encoding} -t UTF-8"
    )


def list_files(option: str, path: str, suffix: str) -> list[str]:
    """Returns the file, or all files below the folder. Symbolic links are followed.

    Raises:
        UserError: a file cannot be read. It is not skipped, since it may be part of the corpus.
    """

    def refuse(error: OSError) -> NoReturn:
        raise UserError(
            f"config.data.{option}={path!r}: {error.filename} cannot be read ({error.strerror}); "
            "remove it or make it readable"
        )

    found = [path] if os.path.isfile(path) else list(_below(path, suffix, refuse))
    for file in found:
        if not os.path.isfile(file):
            refuse(OSError(errno.EINVAL, "a broken link, or not a regular file", file))
        if not os.access(file, os.R_OK):
            refuse(OSError(errno.EACCES, os.strerror(errno.EACCES), file))
        if file.endswith(_COMPRESSED):
            raise UserError(
                f"config.data.{option}={path!r}: {file} is compressed; unpack it or remove it"
            )
    return sorted(found)


def _below(path: str, suffix: str, refuse: Callable[[OSError], NoReturn]) -> Iterator[str]:
    """Yields the files below a folder, except hidden ones."""
    reached: dict[str, tuple[str, ...]] = {}  # by folder: its real path and those of its parents
    for folder, folders, names in os.walk(path, onerror=refuse, followlinks=True):
        # normpath: the parent of "./a/b" and of "a//b" is "a" as well.
        above = os.path.normpath(os.path.dirname(folder))
        real, through = os.path.realpath(folder), reached.get(above, ())
        if real in through:
            refuse(OSError(errno.ELOOP, "a link to a folder that contains it", folder))
        reached[os.path.normpath(folder)] = (*through, real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            wanted = name.endswith((suffix, *(suffix + end for end in _COMPRESSED)))
            if wanted and not name.startswith("."):
                yield os.path.join(folder, name)
