"""What a run does to its own process: the streams it speaks through, and how it ends."""

import io
import logging
import os
import sys
import warnings
from typing import Any, NoReturn


def open_streams() -> None:
    """A closed stdout or stderr would lend its number to the next file that is opened."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115
        # A path or a text that the terminal's encoding lacks is escaped; it must not end a run.
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def mute_native_stdout() -> None:
    """Drops what libraries print on file descriptor 1 without Python: Gloo's lines about
    connections, which several threads write into ours. sys.stdout gets a separate descriptor."""
    before = sys.stdout
    before.flush()
    ours, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = open(  # noqa: SIM115
        ours, "w", encoding=before.encoding, errors="backslashreplace", buffering=1
    )


def quiet_libraries() -> None:
    """Keeps stderr to our one line: what a library logs as an error it also raises."""
    for library in ("absl", "asyncio", "fsspec", "gcsfs"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    # Writes of a failed save that had not begun.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)

    def hook(unraisable: Any) -> None:
        # Where one array of a save fails, Orbax raises that and closes its event loop; threads of
        # TensorStore, still writing the others, then each print that they found it closed.
        # Of arrays that cannot be read it raises the first; each other one would say so as well.
        known = ("Event loop is closed", "Encountered error while reading array index")
        if not str(unraisable.exc_value).startswith(known):
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = hook


def leave(code: int) -> NoReturn:
    """Ends the process. A run that failed ends at once: one of several must not wait for the others
    at the door, and what is left of a failed save would say so again, object by object."""
    if code and "jax" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
