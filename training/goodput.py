"""Accounts for a run's wall time, across restarts.

Every second since a process started belongs to one kind. The time of steps that a restart loses,
those since the last checkpoint, counts as restart time.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator

KINDS = ("training", "compilation", "data", "checkpoint", "evaluation", "restart")


class Goodput:
    """Seconds of each kind. Time counts as restart time from the start of the process on.

    Args:
        path: file to which `write` saves the seconds; "": none. age: seconds since the process
            started.
    """

    def __init__(self, path: str = "", age: float = 0.0):
        self._path = path
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._kind = "restart"
        self._since = time.monotonic() - age

    def resume(self, saved: dict[str, float], lived: dict[str, float]) -> None:
        """Continues from a checkpoint's seconds.

        Args:
            saved: seconds at the checkpoint. lived: seconds as last written before the process
                ended; the excess over `saved` was lost.
        """
        lost = max(0.0, sum(lived.values()) - sum(saved.values()))
        for kind in KINDS:
            self._seconds[kind] += saved.get(kind, 0.0)
        self._seconds["restart"] += lost

    def switch(self, kind: str) -> str:
        """Counts time as this kind from now on. Returns the previous kind."""
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not one of {KINDS}")
        now = time.monotonic()
        self._seconds[self._kind] += now - self._since
        before, self._kind, self._since = self._kind, kind, now
        return before

    @contextlib.contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Counts time inside the block as this kind, and afterwards as the previous kind."""
        before = self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def seconds(self) -> dict[str, float]:
        """Seconds of each kind up to now, of all processes of this run."""
        self.switch(self._kind)
        return dict(self._seconds)

    def metrics(self) -> dict[str, float]:
        """The reported values: seconds, and the share of training time."""
        seconds = self.seconds()
        total = sum(seconds.values())
        values = {f"goodput/{kind}_seconds": value for kind, value in seconds.items()}
        values["goodput/productive_share"] = seconds["training"] / total if total else 0.0
        return values

    def write(self) -> None:
        """Atomically replaces the file by the seconds up to now."""
        if not self._path:
            return
        part = f"{self._path}.part"
        with open(part, "w") as file:
            json.dump(self.seconds(), file)
        os.replace(part, self._path)


def read(path: str) -> dict[str, float]:
    """The seconds last written; empty if there is no such file or it is invalid."""
    try:
        with open(path) as file:
            found = dict(json.load(file))
        return {k: float(v) for k, v in found.items() if k in KINDS}
    except (OSError, ValueError, TypeError):
        return {}
