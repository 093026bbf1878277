"""Lines that say how long something has been going on."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

SECONDS = 30.0  # from one line to the next


@contextlib.contextmanager
def elapsed(what: str, log: Callable[[str], None], every: float = SECONDS) -> Iterator[None]:
    """Logs "compiling ... 30 s" and so on, from another thread, until the block ends."""
    began, done = time.monotonic(), threading.Event()

    def report() -> None:
        while not done.wait(every):
            log(f"{what} ... {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=report, name=f"progress of {what}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
