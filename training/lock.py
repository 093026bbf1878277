"""One run a folder: a second one would tidy away what the first is saving."""

import fcntl
import os
from typing import IO


class LockError(Exception):
    """One line: the folder is in use, or cannot be written to."""


def lock(workdir: str) -> IO[str]:
    """Locks the folder, made where it is missing, until the file is closed or the process ends.

    Raises:
        LockError: another process holds the lock, or the folder cannot be written to or locked.
    """
    try:
        os.makedirs(workdir, exist_ok=True)
        file = open(os.path.join(workdir, ".lock"), "a")  # noqa: SIM115
    except OSError as error:
        raise _failure(workdir, f"cannot write there ({error.strerror}); try another") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _failure(
            workdir, "another run is using it; wait for its end, or try another"
        ) from None
    except OSError as error:
        raise _failure(
            workdir,
            f"its file system has no locks ({error.strerror}); try a local folder, and this one as "
            "config.checkpoint.directory",
        ) from None
    return file


def _failure(workdir: str, text: str) -> LockError:
    return LockError(f"--workdir={workdir}: {text}")
