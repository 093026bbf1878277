"""Checkpoint errors, each with a one-line message."""

import re
from types import TracebackType

from errors import RunError

# Status codes in TensorStore's errors that mean a failed connection, not bad data.
_UNREACHABLE = re.compile(
    "PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|RESOURCE_EXHAUSTED"
)
_NETWORK = ("aiohttp", "gcsfs", "google", "requests")


class CheckpointError(RunError):
    """A checkpoint cannot be saved or used; the message is one line that says what to try."""


class IncompleteError(CheckpointError):
    """A step was not written completely; an older one may be usable."""


class DamagedError(CheckpointError):
    """A step was written completely, and its content has changed since."""


class one_line:
    """Context manager that converts any exception to a CheckpointError with a one-line message."""

    def __init__(self, what: str, advice: str):
        self._what, self._advice = what, advice

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, CheckpointError):
            raise CheckpointError(f"{self._what} ({reason(error)}); {self._advice}") from error


def check_reached(place: str, error: Exception) -> None:
    """Raises CheckpointError if the storage could not be reached.

    A step that cannot be reached may be intact, so it is not skipped like a broken one.
    """
    if isinstance(error, OSError):
        unreachable = not isinstance(error, (FileNotFoundError, NotADirectoryError))
    else:
        unreachable = type(error).__module__.partition(".")[0] in _NETWORK
    if unreachable or _UNREACHABLE.search(str(error)):
        raise CheckpointError(
            f"{place}: cannot be read ({reason(error)}); nothing was changed; "
            "try again, or another --workdir to start a new run"
        ) from None


def first_line(error: BaseException) -> str:
    """Returns the first non-empty line of an error's text, at most 200 characters of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]


def reason(error: Exception) -> str:
    """Returns the cause, without the path or address, which the caller's message already names."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    address, _, text = str(error).partition("\n")
    return first_line(OSError(text) if address.startswith("Forbidden: ") and text else error)
