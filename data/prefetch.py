"""A thread that prepares items ahead of their use, and a wait for them with a time limit."""

import collections
import threading
from collections.abc import Callable

# A thread that hangs while it reads a dead file system is abandoned: it is a daemon thread.
_JOIN_SECONDS = 5.0


class Prefetcher[T]:
    """Calls `make` in a thread until it raises, and keeps at most `ahead` items."""

    def __init__(self, make: Callable[[], T], ahead: int):
        self._make = make
        self._ahead = ahead
        self._made: collections.deque[T | BaseException] = collections.deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        item: T | BaseException
        while not self._stopped:
            try:
                item = self._make()
            except BaseException as error:  # raised by take()
                item = error
            with self._changed:
                self._changed.wait_for(lambda: len(self._made) < self._ahead or self._stopped)
                self._made.append(item)
                self._changed.notify_all()
            if isinstance(item, BaseException):
                return

    def ready(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds for the next item or error; returns whether it is there."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._made), timeout)

    def error_within(self, items: int, timeout: float) -> tuple[bool, BaseException | None]:
        """Waits up to `timeout` seconds for the next items (at most `ahead`).

        Returns (whether they, or an error among them, are there; that error).
        """
        with self._changed:
            known = self._changed.wait_for(
                lambda: self._error() or len(self._made) >= items, timeout
            )
            error = self._error() if len(self._made) <= items else None
            return bool(known), error

    def _error(self) -> BaseException | None:
        """The error that ended the thread, if any; it is always the last item."""
        last = self._made[-1] if self._made else None
        return last if isinstance(last, BaseException) else None

    def take(self) -> T:
        """Returns the next item, or raises the exception that `make` raised."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._made))
            item = self._made[0]
            if isinstance(item, BaseException):
                raise item
            self._made.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Stops the thread once it has finished its current item."""
        with self._changed:
            self._stopped = True
            self._made.clear()
            self._changed.notify_all()
        self._thread.join(_JOIN_SECONDS)
