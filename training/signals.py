"""Being told to stop (SIGTERM, SIGINT, SIGHUP) or to profile (SIGUSR1), at any moment.

The main thread spends its time inside XLA, where Python runs no signal handlers. The interpreter
writes each signal's number to a socket at once, and a thread reads it there: so a second signal
ends the process even during a long compilation.
"""

import os
import signal
import socket
import sys
import threading
import time

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# make, shells and launchers pass on what their whole group was sent: one wish, heard twice.
ECHO_SECONDS = 1.0


class Signals:
    """Installed when made, in the main thread. Ask `stop`, or `take_profile`."""

    def __init__(self):
        self._stop: signal.Signals | None = None
        self._told = 0.0  # time.monotonic() of it
        self._profile = threading.Event()
        self._reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._writer = writer  # kept: the interpreter holds only its number
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (*_STOP, signal.SIGUSR1):
            # Without a Python handler the system's own action would end the process. nohup has
            # SIGHUP ignored, and so it stays.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    @property
    def stop(self) -> str | None:
        """The signal's name once the process was asked to stop, else None."""
        return self._stop.name if self._stop else None

    def take_profile(self) -> bool:
        """Whether a profile was asked for since the last call."""
        if not self._profile.is_set():
            return False  # one that is asked for now must not be cleared
        self._profile.clear()
        return True

    def _listen(self) -> None:
        while True:
            for number in self._reader.recv(64):
                if number == signal.SIGUSR1:
                    self._profile.set()
                elif number in _STOP:
                    self._stop_or_end(signal.Signals(number))

    def _stop_or_end(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._stop and now < self._told + ECHO_SECONDS:
            return
        if self._stop:
            print(f"{number.name} again: ending at once", file=sys.stderr, flush=True)
            os._exit(128 + number)
        self._stop, self._told = number, now
        print(
            f"{number.name}: stopping after the step in flight and a checkpoint; "
            "again to end at once",
            file=sys.stderr,
            flush=True,
        )
