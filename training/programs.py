"""A cache of compiled programs on disk, kept between starts.

JAX decides what is cached and under which key: the program, the versions of jaxlib and the
compiler, flags, devices and the CPU's instruction set. The files are written here, because JAX
writes a program in place and never again: another run may read half of it, and a file that a killed
run left incomplete stays so. Here a file is renamed into place when it is complete, and has a
digest that is checked on reading. A folder that cannot be read or written costs one line and a
compilation, but never ends a run.
"""

import contextlib
import hashlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable

import jax

# Private: no public API accepts a custom cache. test_programs.py fails if JAX changes this.
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

DIRECTORY = "kda-trainer"
MOST_BYTES = 4 * 2**30  # per folder; the least recently used programs are removed first
LEAST_SECONDS = 0.5  # programs that compile faster are not kept
_DIGEST_BYTES = hashlib.sha256().digest_size
_SUFFIX = ".program"


def default_folder() -> str:
    """DIRECTORY in the user's cache folder: $XDG_CACHE_HOME, or ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    caches = given if os.path.isabs(given) else os.path.expanduser("~/.cache")
    return os.path.join(caches, DIRECTORY)


def keep(folder: str) -> None:
    """Makes JAX look up and keep compiled programs in this folder."""
    programs = Programs(folder, lambda line: print(line, file=sys.stderr, flush=True))
    compilation_cache.reset_cache()
    compilation_cache.get_file_cache = lambda path: (programs, path)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)


class Programs(CacheInterface):
    """A folder of programs by key, which several processes may read and write at the same time.

    Args:
        log: called with one line, about the first file that cannot be read or written.
    """

    def __init__(self, folder: str, log: Callable[[str], None], most_bytes: int = MOST_BYTES):
        self._path = pathlib.Path(folder)  # the name that JAX's interface wants
        self._log: Callable[[str], None] | None = log
        self._most_bytes = most_bytes

    def get(self, key: str) -> bytes | None:
        """The program; None if there is none, or it is incomplete."""
        path = self._file(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._report(error)
            return None
        digest, program = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        whole = digest == hashlib.sha256(program).digest()
        with contextlib.suppress(OSError):  # of a folder that can only be read
            if whole:
                os.utime(path)  # used now, see _make_room
            else:
                path.unlink()
        return program if whole else None

    def put(self, key: str, value: bytes) -> None:
        """Stores a program, unless the disk refuses."""
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)  # programs are trusted
            self._write(self._file(key), hashlib.sha256(value).digest() + value)
            self._make_room()
        except OSError as error:
            self._report(error)

    def clear(self) -> None:
        """Part of JAX's interface; there is no state to clear."""

    def _file(self, key: str) -> pathlib.Path:
        return self._path / f"{key}{_SUFFIX}"

    def _write(self, path: pathlib.Path, content: bytes) -> None:
        """Writes under a temporary name, then renames. A killed process leaves the temporary."""
        handle, part = tempfile.mkstemp(dir=self._path, prefix="part_", suffix=_SUFFIX)
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.replace(part, path)
        except OSError:
            os.unlink(part)
            raise

    def _make_room(self) -> None:
        found = []
        for path in self._path.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        found.sort(reverse=True)
        total = 0
        for _, size, path in found:
            total += size
            if total > self._most_bytes:
                path.unlink(missing_ok=True)

    def _report(self, error: OSError) -> None:
        log, self._log = self._log, None
        if log:
            log(
                f"{self._path}: {error.strerror}; programs are compiled again at every start; try "
                "another --config.train.compilation_cache"
            )
