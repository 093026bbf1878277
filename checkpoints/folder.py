"""Where checkpoints lie, a local folder or one in a bucket, and errors of one line about it."""

import glob
import re
import time

import fsspec
import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from errors import RunError

# What TensorStore's errors begin with where the way to the data is at fault, not the data.
_UNREACHABLE = re.compile(
    "PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|RESOURCE_EXHAUSTED"
)


class CheckpointError(RunError):
    """A checkpoint cannot be saved or used. The message is one line that says what to do."""


class IncompleteError(CheckpointError):
    """A step was not written to its end; an older one may do."""


class DamagedError(CheckpointError):
    """A step was written to its end, and its content has changed since."""


class OneLine:
    """Turns whatever is raised inside into a CheckpointError of one line."""

    def __init__(self, what: str, advice: str):
        self._what, self._advice = what, advice

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, Exception) and not isinstance(error, CheckpointError):
            raise CheckpointError(f"{self._what} ({reason(error)}); {self._advice}") from None


def find(directory: str) -> epath.Path:
    """Raises CheckpointError where it is neither a local path nor one in a bucket, or has a name
    that Orbax or TensorStore could not use."""
    scheme, separator, rest = directory.partition("://")
    if separator and (scheme != "gs" or rest[:1] in ("", "/")):
        raise CheckpointError(f"{directory}: needs a local path or gs://bucket/path; try one")
    if glob.has_magic(directory):
        raise CheckpointError(
            f"{directory}: contains one of * ? [, which Orbax would read as a pattern, and the "
            "checkpoint could not be restored; try --workdir or config.checkpoint.directory "
            "without them"
        )
    try:
        directory.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{directory}: is not valid UTF-8, and arrays cannot be written there; try --workdir "
            "or config.checkpoint.directory with another name"
        ) from None
    # gcsfs remembers folders that it has listed, and would not see what others write into them:
    # TensorStore, and the other processes.
    fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False
    return epath.Path(directory)


def make(path: epath.Path) -> None:
    """A folder in a bucket is there as long as an object is in it."""
    if not str(path).startswith("gs://"):
        path.mkdir(parents=True, exist_ok=True)
    elif jax.process_index() == 0:
        try:
            (path / ".folder").write_text("")
        except FileNotFoundError:
            raise CheckpointError(f"{path}: there is no such bucket; try to create it") from None


def check_shared(path: epath.Path) -> None:
    """Raises CheckpointError where processes of one run do not all see process 0's folder: their
    first save would wait ten minutes for each other, and fail."""
    token = str(multihost_utils.broadcast_one_to_all(np.int32(time.time_ns() % 2**31)))
    mark = path / ".shared"
    if jax.process_index() == 0:
        mark.write_text(token)
    multihost_utils.sync_global_devices("checkpoint folder marked")
    sees = mark.exists() and mark.read_text() == token
    blind = np.flatnonzero(~multihost_utils.process_allgather(np.array(sees)).reshape(-1))
    if jax.process_index() == 0:
        mark.unlink()
    if len(blind):
        raise CheckpointError(
            f"{path}: process {blind[0]} does not see the folder of process 0; needs one that all "
            "hosts reach; try --workdir on a network folder, or "
            "config.checkpoint.directory=gs://bucket/path"
        )


def check_reached(place: str, error: Exception) -> None:
    """A step that cannot be reached may be whole: it stops the run and is not passed over."""
    library = type(error).__module__.partition(".")[0]
    if isinstance(error, OSError):
        unreachable = not isinstance(error, (FileNotFoundError, NotADirectoryError))
    else:
        unreachable = library in ("aiohttp", "gcsfs", "google", "requests")
    if unreachable or _UNREACHABLE.search(str(error)):
        raise CheckpointError(
            f"{place}: cannot be read ({reason(error)}); nothing was changed; "
            "try again, or another --workdir to start anew"
        ) from None


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]


def reason(error: Exception) -> str:
    """What went wrong, without the path or address that stands in our own line already."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    address, _, text = str(error).partition("\n")
    return first_line(OSError(text) if address.startswith("Forbidden: ") and text else error)
