"""Runs checks one by one in a worker process, so that a crash or hang ends only that check.

Only the worker touches devices: a TPU belongs to one process at a time.
"""

import contextlib
import dataclasses
import os
import pathlib
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from training.progress import elapsed
from training.tpu_check.outcome import Machine, Outcome, Status
from training.tpu_check.table import Row
from training.tpu_check.worker import MARK

PATIENCE = 5.0  # seconds from SIGTERM to SIGKILL
EVERY = 20.0  # seconds between progress lines of a slow check


@dataclasses.dataclass(frozen=True)
class Limits:
    """Maximum seconds for a worker to start, and for a check to finish."""

    start: float
    check: float


class Gone(Exception):
    """The worker ended, or was terminated, without an answer; the text says how."""


class Worker:
    """One worker process; its stderr goes to a file."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: pathlib.Path,
        folder: pathlib.Path,
    ):
        self._log = log
        self._stderr = log.open("w")
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            start_new_session=True,  # Ctrl-C is for the driver alone
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            if line.startswith(MARK):
                self._lines.put(line.removeprefix(MARK))
        self._lines.put(None)

    def ask(self, question: str, seconds: float) -> str:
        """Sends a line, "" for none, and waits for the answer.

        Raises:
            Gone: the process ended, or took longer.
        """
        assert self._process.stdin is not None
        try:
            if question:
                self._process.stdin.write(question + "\n")
                self._process.stdin.flush()
            answer = self._lines.get(timeout=seconds)
        except queue.Empty:
            self.close()
            raise Gone(f"no answer within {seconds:.0f} s; the process was ended") from None
        except OSError:
            answer = None
        if answer is None:
            self.close()
            raise Gone(f"the process ended ({_ending(self._process.returncode)}){self._last()}")
        return answer

    def _last(self) -> str:
        """The last line of the log, where a library usually names the cause."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines()]
        lines = [line for line in lines if line]
        return f": {lines[-1][:200]}" if lines else ""

    def close(self) -> None:
        """Ends the process and its children, by force if necessary."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._stderr.close()


def _ending(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code and code < 0 else f"code {code}"


class Driver:
    """Starts workers as needed. start: creates one."""

    def __init__(self, start: Callable[[], Worker], limits: Limits, say: Callable[[str], None]):
        self._start, self._limits, self._say = start, limits, say
        self._worker: Worker | None = None
        self.machine = Machine()

    def open(self) -> None:
        """Starts a worker.

        Raises:
            Gone: it did not start.
        """
        self.close()
        worker = self._start()
        try:
            with elapsed("starting", self._say, EVERY):
                found = Machine.from_json(worker.ask("", self._limits.start))
            if found.error:
                raise Gone(found.error)
        except BaseException:  # also on Ctrl-C, which the worker does not receive
            worker.close()
            raise
        self._worker, self.machine = worker, found

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def run(self, name: str, fresh: bool = False) -> Outcome:
        """Runs one check; replaces a worker that has died. fresh: use a new process."""
        try:
            if fresh or self._worker is None:
                self.open()
            assert self._worker is not None
            with elapsed(f"  {name}", self._say, EVERY):
                return Outcome.from_json(self._worker.ask(name, self._limits.check))
        except Gone as gone:
            self._worker = None
            return Outcome(Status.ERROR, str(gone))


def run_all(
    driver: Driver, names: Sequence[str], fresh: set[str], report: Callable[[Row], None]
) -> tuple[list[Row], bool]:
    """Rows of all checks, each reported when it ends, and whether Ctrl-C ended them early."""
    rows: list[Row] = []
    try:
        for name in names:
            began = time.monotonic()
            outcome = driver.run(name, name in fresh)
            rows.append(Row(name, outcome, time.monotonic() - began))
            report(rows[-1])
    except KeyboardInterrupt:
        return [*rows, *_not_run(names[len(rows) :])], True
    finally:
        driver.close()
    return rows, False


def _not_run(names: Sequence[str]) -> Iterator[Row]:
    for name in names:
        yield Row(name, Outcome(Status.NOT_RUN, "stopped by Ctrl-C"), 0.0)
