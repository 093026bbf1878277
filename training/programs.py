"""Compiled programs on disk, kept from one start to the next.

JAX decides what is kept and under which key: the program, the versions of jaxlib and the compiler,
flags, devices and the instruction set of the CPU. The folder is ours, because JAX writes a program
in place and never again: another run may read half of it, and what a killed run left unfinished
stays so. Here a file appears whole, under its own name, with a digest that is checked when it is
read. A folder that cannot be read or written costs one line and a compilation, never a run.
"""

import contextlib
import hashlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable

import jax

# Private: nothing public takes another folder. test_programs.py fails where JAX changes this.
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

DIRECTORY = "kda-trainer"
MOST_BYTES = 4 * 2**30  # of a folder; the programs that were used longest ago are removed first
LEAST_SECONDS = 0.5  # of a compilation whose program is kept
_DIGEST_BYTES = hashlib.sha256().digest_size
_SUFFIX = ".program"


def default_folder() -> str:
    """DIRECTORY in the user's folder for caches: $XDG_CACHE_HOME, or ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    caches = given if os.path.isabs(given) else os.path.expanduser("~/.cache")
    return os.path.join(caches, DIRECTORY)


def keep(folder: str) -> None:
    """From now on programs are looked up in this folder, and kept there."""
    programs = Programs(folder, lambda line: print(line, file=sys.stderr, flush=True))
    compilation_cache.reset_cache()
    compilation_cache.get_file_cache = lambda path: (programs, path)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)


class Programs(CacheInterface):
    """A folder of programs by key, which several processes may read and write at once.

    Args:
        log: gets one line, about the first file that cannot be read or written.
    """

    def __init__(self, folder: str, log: Callable[[str], None], most_bytes: int = MOST_BYTES):
        self._path = pathlib.Path(folder)  # the name that JAX's interface wants
        self._log: Callable[[str], None] | None = log
        self._most_bytes = most_bytes

    def get(self, key: str) -> bytes | None:
        """The program, None where there is none that is whole."""
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
        """Keeps a program, unless the disk refuses."""
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)  # programs are trusted
            self._write(self._file(key), hashlib.sha256(value).digest() + value)
            self._make_room()
        except OSError as error:
            self._report(error)

    def clear(self) -> None:
        """Part of JAX's interface: forgets what is known of the folder, which is nothing."""

    def _file(self, key: str) -> pathlib.Path:
        return self._path / f"{key}{_SUFFIX}"

    def _write(self, path: pathlib.Path, content: bytes) -> None:
        """Under another name first. A process that is killed leaves that one behind."""
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
                f"{self._path}: {error.strerror}; programs are compiled anew at every start; try "
                "another --config.train.compilation_cache"
            )
