"""The run's own process: its output streams, and how it ends."""

import io
import logging
import os
import sys
import threading
import warnings
from typing import Any, NoReturn

_speaking = threading.RLock()  # never released: held by the thread that reports the end
_resume_hint = "the same command starts again"


def open_streams() -> None:
    """Reopens a closed stdout or stderr, whose descriptor the next opened file would get."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115
        # Characters that the terminal's encoding lacks are escaped; they must not end a run.
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def mute_native_stdout() -> None:
    """Drops what libraries write directly to file descriptor 1: Gloo's lines about connections,
    which several threads would mix with our output. sys.stdout gets a separate descriptor."""
    before = sys.stdout
    before.flush()
    ours, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = open(  # noqa: SIM115
        ours, "w", encoding=before.encoding, errors="backslashreplace", buffering=1
    )


def quiet_libraries() -> None:
    """Silences libraries on stderr, so that it has one line per error: they also raise it."""
    for library in ("absl", "asyncio", "fsspec", "gcsfs"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    # Writes of a failed save that had not started.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)

    def hook(unraisable: Any) -> None:
        # If one array of a save fails, Orbax raises its error and closes its event loop. Threads of
        # TensorStore that are still writing the others would then each print that it is closed. If
        # arrays cannot be read, Orbax raises the first error, and each other array would print one.
        known = ("Event loop is closed", "Encountered error while reading array index")
        if not str(unraisable.exc_value).startswith(known):
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = hook


def note_saved(step: int) -> None:
    """Notes that a checkpoint of this step is complete on disk; see `resume_hint`."""
    global _resume_hint
    _resume_hint = f"the same command resumes from step {step}, or a later one that is whole"


def resume_hint() -> str:
    """What the same command does next, as part of the message about the end of the process."""
    return _resume_hint


def claim_last_line() -> None:
    """Lets only the first thread with a reason to end the process report it. For other threads this
    never returns, because the process is about to end."""
    if not _speaking.acquire(blocking=False):
        threading.Event().wait()


def end(line: str, code: int) -> NoReturn:
    """Ends the process immediately, from any thread, with one line on stderr."""
    claim_last_line()
    print(line, file=sys.stderr, flush=True)
    os._exit(code)


def leave(code: int) -> NoReturn:
    """Ends the process. A failed run ends immediately: one of several processes must not block in
    the shutdown barrier, and the remains of a failed save would print more errors."""
    if code and "jax" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
