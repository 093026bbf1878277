"""Locks a folder for one run: a second run would remove what the first is saving."""

import fcntl
import os
import re
import socket
import uuid
from typing import IO

from errors import RunError

_RUN_ID = re.compile("[0-9a-f]{12}")


class LockError(RunError):
    """One line: the folder is in use, or cannot be written to."""


def lock(folder: str, option: str, *, needed: bool = True) -> IO[str]:
    """Locks the folder that an option names until the returned file is closed or the process ends.
    Creates the folder if it is missing.

    Args:
        needed: whether a file system without locks is an error; otherwise the folder is not locked.

    Raises:
        LockError: another process holds the lock, or the folder cannot be written to or locked.
    """
    place = f"{option}={folder}"
    try:
        os.makedirs(folder, exist_ok=True)
        file = open(os.path.join(folder, ".lock"), "a")  # noqa: SIM115
    except OSError as error:
        raise _failure(place, f"cannot write there ({error.strerror}); try another") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _failure(
            place, "another run is using it; wait until it ends, or try another"
        ) from None
    except OSError as error:
        if not needed:
            return file
        raise _failure(
            place,
            f"its file system has no locks ({error.strerror}); try a local folder, and this one as "
            "config.checkpoint.directory",
        ) from None
    return file


def owner(workdir: str) -> str:
    """The name of a workdir's run, for the lease of a bucket: host, path, and an id stored in the
    workdir, since containers may share host names and paths."""
    with open(os.path.join(workdir, ".run_id"), "a+", encoding="ascii", errors="replace") as file:
        file.seek(0)
        number = file.read().strip()
        if not _RUN_ID.fullmatch(number):  # new, or the file was damaged
            number = uuid.uuid4().hex[:12]
            file.truncate(0)
            file.write(number)
    return f"{socket.gethostname()}:{os.path.abspath(workdir)} (run {number})"


def _failure(place: str, text: str) -> LockError:
    return LockError(f"{place}: {text}")
