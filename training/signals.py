"""Handles requests to stop (SIGTERM, SIGINT, SIGHUP) or to profile (SIGUSR1) at any time.

The main thread spends its time inside XLA, where Python runs no signal handlers. The interpreter
immediately writes each signal's number to a socket, which a thread reads. A signal is therefore
noticed during a long compilation, or during a wait for another process. If everything is already
saved during a wait (see `Signals.waiting`), this thread ends the process.
"""

import contextlib
import dataclasses
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

from training import process

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# make, shells and launchers forward signals that the whole group received, so one request may
# arrive twice.
ECHO_SECONDS = 1.0
_POLL_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Wait:
    """A wait of the main thread that a stop request may end.

    what: for the message, with what is lost. seconds: how long it may last after the request.
    code: exit code. since: time.monotonic() when it began.
    """

    what: str
    seconds: float
    code: int
    since: float = dataclasses.field(default_factory=time.monotonic)


class Signals:
    """Installs handlers when created, in the main thread. Poll `stop` and `take_profile`.

    Until `started` is called there is nothing to save, and a request ends the process immediately.
    """

    def __init__(self) -> None:
        self._wait: Wait | None = Wait(
            "before the first step of this start: there is nothing more to save", 0.0, 0
        )
        self._stop: signal.Signals | None = None
        self._told = 0.0  # time.monotonic() of it
        self._profile = threading.Event()
        self._reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._writer = writer  # keeps it open: the interpreter holds only its descriptor
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (*_STOP, signal.SIGUSR1):
            # Without a Python handler the default action would end the process. Under nohup SIGHUP
            # is ignored, and stays ignored.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def started(self) -> None:
        """From now on the loop handles stop requests, and saves."""
        self._wait = None

    @contextlib.contextmanager
    def waiting(self, what: str, seconds: float) -> Iterator[None]:
        """A wait that this process cannot end by itself; see `Wait`."""
        before, self._wait = self._wait, Wait(what, seconds, 1)
        try:
            yield
        finally:
            self._wait = before

    @property
    def stop(self) -> str | None:
        """The signal's name if the process was asked to stop, else None."""
        return self._stop.name if self._stop else None

    def take_profile(self) -> bool:
        """Whether a profile was requested since the last call."""
        if not self._profile.is_set():
            return False  # a request that arrives now must not be cleared
        self._profile.clear()
        return True

    def _listen(self) -> None:
        self._reader.settimeout(_POLL_SECONDS)
        while True:
            self._end_wait()
            try:
                numbers = self._reader.recv(64)
            except TimeoutError:
                continue
            for number in numbers:
                if number == signal.SIGUSR1:
                    self._profile.set()
                elif number in _STOP:
                    self._stop_or_end(signal.Signals(number))

    def _stop_or_end(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._stop and now < self._told + ECHO_SECONDS:
            return
        if self._stop:
            process.end(f"{number.name} again: ending immediately", 128 + number)
        self._stop, self._told = number, now
        self._end_wait()
        print(
            f"{number.name}: stopping after the step in flight and a checkpoint; "
            "again to end immediately",
            file=sys.stderr,
            flush=True,
        )

    def _end_wait(self) -> None:
        """Ends the process if it was asked to stop and has waited for too long."""
        wait, stop = self._wait, self._stop
        if stop is None or wait is None:
            return
        if time.monotonic() < max(self._told, wait.since) + wait.seconds:
            return
        process.end(f"stopped by {stop.name} {wait.what}; {process.resume_hint()}", wait.code)
