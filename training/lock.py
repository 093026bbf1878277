"""One run a folder: a second one would tidy away what the first is saving."""

import errno
import fcntl
import os
from typing import IO


class LockError(Exception):
    """One line: the folder is in use, or cannot be written to."""


def lock(workdir: str) -> IO[str]:
    """Locks the folder, made where it is missing, until the file is closed or the process ends.

    Raises:
        LockError: another process holds the lock, or the folder cannot be written to.
    """
    try:
        os.makedirs(workdir, exist_ok=True)
        file = open(os.path.join(workdir, ".lock"), "a")  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            raise LockError(
                f"--workdir={workdir}: another run is using it; wait for its end, or try another"
            ) from None
        raise LockError(
            f"--workdir={workdir}: cannot write there ({error.strerror}); try another"
        ) from None
    return file
