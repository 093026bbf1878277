"""Worker processes that read, tokenize and pack, each for its share of a host's streams.

The parent and a worker share one pipe. The parent sends the work, then the number of rows that the
worker may prepare ahead; rows come back in order. If either side dies, the other finds the pipe
closed. This alone suffices to detect a dead worker at any time, even in the middle of a row, and to
end a worker with its parent. A pipe takes two descriptors per worker, and needs neither shared
memory nor semaphores, for which a container's /dev/shm may be too small.
"""

import atexit
import contextlib
import errno
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from errors import DataError, TrainerError

# Signals that a terminal, Slurm or systemd sends to the whole process group. Only the parent
# handles them: it decides what to finish.
_FOR_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_AGAIN = "start the same command again to continue from the last checkpoint"
# Reasons why a process cannot be started, and what to do about them.
_CAUSES = {
    errno.EMFILE: "this process may not open more files; raise the limit that ulimit -n shows",
    errno.ENFILE: "the machine has too many open files",
    errno.EAGAIN: "no more processes are allowed; raise the limit that ulimit -u shows",
    errno.ENOMEM: "memory is used up",
    errno.ENOSPC: "/dev/shm or /tmp is full",
}

# A picklable function that returns an endless iterator of items.
type Work = Callable[[], Iterator[Any]]


class Workers:
    """An iterator over the items of several works in turn; each work runs in its own process."""

    def __init__(self, works: Sequence[Work], ahead: int):
        """ahead: items that each worker may prepare before they are requested."""
        self._works = works
        self._ahead = ahead
        self._turn = 0
        self._sent = False
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        # Runs before multiprocessing's own exit handler, which would wait for the processes.
        atexit.register(self.kill)
        try:
            with _parents_signals_blocked():
                for _ in works:
                    self._start_one()
        except OSError as error:
            self.close()
            cause = _CAUSES.get(error.errno or 0, error.strerror or str(error))
            raise DataError(
                f"config.data.workers={len(works)}: worker {len(self._processes)} cannot be "
                f"started: {cause}; or try fewer workers"
            ) from None

    def _start_one(self) -> None:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        with theirs:
            self._pipes.append(mine)
            # The work is not passed as an argument: that would be written while both ends of the
            # pipe are open here, so the write would wait forever for a worker that has died.
            process = context.Process(target=_run, args=(theirs,), daemon=True)
            process.start()
        self._processes.append(process)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        pipe = self._pipes[self._turn]
        try:
            if not self._sent:
                self._send_works()
            sentinels = [process.sentinel for process in self._processes]
            done = connection.wait([pipe, *sentinels])
            if any(sentinel in done for sentinel in sentinels):
                raise EOFError
            item = pipe.recv()
            pipe.send(1)
        except (EOFError, OSError) as error:
            raise self._died(error) from None
        if isinstance(item, Exception):
            raise item
        self._turn = (self._turn + 1) % len(self._pipes)
        return item

    def _send_works(self) -> None:
        self._sent = True
        for pipe, work in zip(self._pipes, self._works):
            pipe.send(work)
            pipe.send(self._ahead)

    def _died(self, error: Exception) -> DataError:
        for number, process in enumerate(self._processes):
            process.join(1.0)
            if process.exitcode is not None:
                return DataError(
                    f"config.data.workers: worker {number} of {len(self._processes)} has ended "
                    f"({_exit_reason(process.exitcode)}); {_AGAIN}"
                )
        return DataError(f"config.data.workers: a worker's pipe failed ({error}); {_AGAIN}")

    def kill(self) -> None:
        """Kills the processes immediately; they hold no state."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """Stops the processes. No thread may be waiting for an item; see `kill`."""
        self.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        atexit.unregister(self.kill)


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    memory = ", which the kernel sends when memory runs out" if name == "SIGKILL" else ""
    return f"by {name}{memory}"


@contextlib.contextmanager
def _parents_signals_blocked() -> Iterator[None]:
    """New processes inherit the mask, so these signals cannot arrive before they are ignored."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_PARENT)
    try:
        # multiprocessing's helper process inherits it too; starting that unblocks two signals.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_PARENT)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(pipe: Connection) -> None:
    """The main function of a worker process."""
    for number in _FOR_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):  # the parent has gone
        items = _made(pipe.recv())
        allowed = 0
        while True:
            while not allowed or pipe.poll():
                allowed += pipe.recv()
            pipe.send(next(items))
            allowed -= 1
    os._exit(0)


def _made(work: Work) -> Iterator[Any]:
    """Yields the items, and after an exception that exception forever."""
    try:
        yield from work()
    except TrainerError as error:
        while True:
            yield error
    except Exception:  # a bug: its exception may not be picklable
        bug = RuntimeError(traceback.format_exc())
        while True:
            yield bug
