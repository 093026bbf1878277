"""Files of a corpus: found below a path, identified by their content, and read with a check.

A fingerprint depends on the sizes and the bytes of the files in their order, neither on their names
nor on their folder. It reads at most SAMPLES blocks of SAMPLE_BYTES: 64 MiB in 1,024 reads,
whatever the size of the corpus, 16 of them at a time. Up to these limits every byte counts;
beyond them a change at equal size is noticed where it touches one of the blocks, which are spread
evenly: a change of one per cent of the corpus, in single bytes or as a whole, nearly always.
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
# Names of packed files end so. They are refused: left out, a part of the corpus would be missing.
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
    """What shows that a file is the one that was opened."""

    size: int
    modified: int  # nanoseconds

    @staticmethod
    def of(status: os.stat_result) -> "FileState":
        return FileState(status.st_size, status.st_mtime_ns)


class Files:
    """Files as they are when a run opens them. A read notices that one has changed since."""

    def __init__(self, paths: list[str]):
        self.paths = paths
        self.states = [FileState.of(os.stat(path)) for path in paths]
        self.sizes = np.asarray([state.size for state in self.states], np.int64)
        self._fingerprint = ""

    def __len__(self) -> int:
        return len(self.paths)

    def key(self) -> tuple[object, ...]:
        """Equal for the same files in the same state."""
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
        """Raises DataError where a file, read by other means, has changed since it was opened."""
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
    """Returns "UTF-16" or "UTF-32" where a file of that size begins as text in it does, else "".

    With a byte order mark, or with a zero in every other byte of Latin letters.
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
    """The error for a file that would need conversion first."""
    return UserError(
        f"config.data: {path} is {encoding}; needs UTF-8; try iconv -f {encoding} -t UTF-8"
    )


def list_files(option: str, path: str, suffix: str) -> list[str]:
    """Returns the file, or those below the folder, also behind links, all of which can be read.

    Raises:
        UserError: rather than leave out what may be a part of the corpus.
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
    """The files below a folder, hidden ones left out."""
    reached: dict[str, tuple[str, ...]] = {}  # by folder: its real path and those of all above it
    for folder, folders, names in os.walk(path, onerror=refuse, followlinks=True):
        # Of "./a/b" and "a//b" as well, the folder above is "a".
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
