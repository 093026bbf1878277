"""Where a run's wall time went, continued across restarts.

Every second since a process started belongs to one kind. What a restart throws away, the steps done
since the last checkpoint, is restart time as well.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator

KINDS = ("training", "compilation", "data", "checkpoint", "evaluation", "restart")


class Goodput:
    """Seconds of each kind. The clock runs from the start of the process, as restart time.

    Args:
        path: where `write` keeps the seconds; "": nowhere. age: seconds since the process started.
    """

    def __init__(self, path: str = "", age: float = 0.0):
        self._path = path
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._kind = "restart"
        self._since = time.monotonic() - age

    def resume(self, saved: dict[str, float], lived: dict[str, float]) -> None:
        """Continues from a checkpoint's seconds.

        Args:
            saved: as of the checkpoint. lived: as last written before the process ended; what it
                has more than `saved` was lost.
        """
        lost = max(0.0, sum(lived.values()) - sum(saved.values()))
        for kind in KINDS:
            self._seconds[kind] += saved.get(kind, 0.0)
        self._seconds["restart"] += lost

    def switch(self, kind: str) -> str:
        """From now on time is of this kind. Returns the kind before."""
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not one of {KINDS}")
        now = time.monotonic()
        self._seconds[self._kind] += now - self._since
        before, self._kind, self._since = self._kind, kind, now
        return before

    @contextlib.contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Time inside is of this kind, and afterwards of the kind before."""
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
        """As they are reported: seconds, and the share of them that trained."""
        seconds = self.seconds()
        total = sum(seconds.values())
        values = {f"goodput/{kind}_seconds": value for kind, value in seconds.items()}
        values["goodput/productive_share"] = seconds["training"] / total if total else 0.0
        return values

    def write(self) -> None:
        """Replaces the file by the seconds up to now, whole or not at all."""
        if not self._path:
            return
        part = f"{self._path}.part"
        with open(part, "w") as file:
            json.dump(self.seconds(), file)
        os.replace(part, self._path)


def read(path: str) -> dict[str, float]:
    """The seconds last written; none where there is no such file, or no sense in it."""
    try:
        with open(path) as file:
            found = dict(json.load(file))
        return {k: float(v) for k, v in found.items() if k in KINDS}
    except (OSError, ValueError, TypeError):
        return {}
