"""Logs how long something has been running."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

SECONDS = 30.0  # between logged lines
REDRAWN = 1.0  # seconds between updates of the line on a terminal
_ERASE = "\r\x1b[K"


@contextlib.contextmanager
def elapsed(what: str, log: Callable[[str], None], every: float = SECONDS) -> Iterator[None]:
    """Reports "compiling ... 30 s" from another thread until the block ends: on a terminal as one
    line of stderr that is redrawn, and erased at the end; otherwise with `log`, every `every`
    seconds.
    """
    terminal = sys.stderr.isatty()
    show, seconds = (_draw, REDRAWN) if terminal else (log, every)
    began, done = time.monotonic(), threading.Event()

    def report() -> None:
        while not done.wait(seconds):
            show(f"{what} ... {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=report, name=f"progress of {what}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if terminal:
            _write(_ERASE)


def _draw(line: str) -> None:
    # The cursor goes back, so that any other line, such as a signal's, takes this one's place.
    _write(f"{_ERASE}{line}\r")


def _write(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
