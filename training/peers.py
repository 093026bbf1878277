"""Reports in one line that another process of the run has died, or never connected.

JAX's coordination service detects a lost process 0 immediately, and any other process after a few
missed heartbeats. Its client then prints several lines and aborts; it offers no Python handler. So
file descriptor 2 becomes a pipe: a thread forwards what libraries print to it. When it reads that
the client aborts, it ends the process with one line and exit code 1.
"""

import contextlib
import ctypes
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator

from training import process

HEARTBEAT_SECONDS = 10  # a process silent for this long is considered dead, and the others stop
_NOTICE = re.compile(rb"coordination_service|coordination service|JAX distributed service")
_GIVES_UP = b"Terminating process because the JAX distributed service"
_REST_SECONDS = 0.3  # for the lines that follow, with the cause
_SECONDS_TO_PRINT = 1.0  # for the other processes, before process 0 ends and they with it

_number: int | None = None  # of this process, if it is one of several; -1 while unknown


def watch(number: int) -> None:
    """Starts watching for the end of other processes. number: of this one, -1 while unknown."""
    set_number(number)
    before = sys.stderr
    before.flush()
    terminal = os.dup(2)
    source, sink = os.pipe()
    os.dup2(sink, 2)
    os.close(sink)
    sys.stderr = open(  # noqa: SIM115
        terminal, "w", encoding=before.encoding, errors="backslashreplace", buffering=1
    )
    threading.Thread(target=_pass_on, args=(source, terminal), name="peers", daemon=True).start()
    _hold_aborts()


def set_number(number: int) -> None:
    """The number of this process, which JAX may have detected."""
    global _number
    _number = number


def _hold_aborts() -> None:
    """Makes a thread that aborts sleep first, so that `_pass_on` can read what it has printed.

    The handler is the C library's sleep, called with the signal's number (6) as the seconds.
    Python's handlers run too late for a signal that a library raises to end the process.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _pass_on(source: int, terminal: int) -> None:
    while True:
        text = os.read(source, 1 << 16)
        if _NOTICE.search(text):
            text += _rest(source)
            if _GIVES_UP in text:
                cause = cause_of(text.decode(errors="replace"))
                process.end(f"error: process {_number}: {cause}; {process.resume_hint()}", 1)
        os.write(terminal, text)


def _rest(source: int) -> bytes:
    """Reads until nothing arrives for a moment."""
    text, until = b"", time.monotonic() + 10 * _REST_SECONDS
    while time.monotonic() < until and select.select([source], [], [], _REST_SECONDS)[0]:
        text += os.read(source, 1 << 16)
    return text


def cause_of(text: str) -> str:
    """Which process is lost, and how, from the output of JAX's coordination service."""
    if twice := re.search(r"(\d+) unexpectedly tried to connect", text):
        return f"a second process was started with --process_id={twice[1]}"
    if silent := re.search(r"stopped sending heartbeats\):\s*((?:\d+[\s,]+)+)", text):
        names = " and ".join(f"process {n}" for n in re.findall(r"\d+", silent[1]))
        return f"{names} died or did not answer for {HEARTBEAT_SECONDS} s"
    if "leader task" in text:
        return "process 0 has died"
    return "another process has died or cannot be reached"


def wait_for_cause() -> None:
    """Waits after a failure that another process's end may have caused: `watch` would then end this
    process and report which one it was. Returns if nothing is detected in time."""
    if _number is not None:
        time.sleep(HEARTBEAT_SECONDS)


def let_others_print() -> None:
    """Called before this process ends with an error that all processes have found together."""
    if _number == 0:
        time.sleep(_SECONDS_TO_PRINT)


@contextlib.contextmanager
def limit(seconds: float, line: str) -> Iterator[None]:
    """Ends the process with this line and exit code 1 if the block takes longer."""
    timer = threading.Timer(seconds, process.end, (f"error: {line}", 1))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
