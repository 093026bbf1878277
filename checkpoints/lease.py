"""A lease that admits one run at a time to a bucket folder: an object with owner and heartbeat.

A bucket has no locks, but an object can be written on condition that its version is still the one
that was read (`ifGenerationMatch`), so only one of two competing runs gets the lease. The owner
renews it every minute and before each save. A lease that has not been renewed for ten minutes, by
the storage service's clock, is considered to belong to a dead run and is taken over. A lease of the
same owner is also taken over: that is a restart after a crash, which holds the local lock of its
workdir.
"""

import contextlib
import dataclasses
import datetime
import email.utils
import json
import threading
import uuid

import fsspec

from checkpoints.errors import CheckpointError

NAME = ".lease"
RENEW_SECONDS = 60.0
STALE_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class _Found:
    """The lease object: generation 0 if there is none; age in seconds since it was renewed."""

    generation: int
    owner: str = ""
    holder: str = ""  # unique to a Lease instance
    age: float = 0.0


class Lease:
    """Held from `__init__` until `release`, or until ten minutes after the process dies.

    Args:
        directory: gs://bucket/path.
        owner: names the holder in messages; equal only for restarts of the same run.

    Raises:
        CheckpointError: another run holds it.
    """

    def __init__(self, directory: str, owner: str):
        self._directory, self._owner = directory, owner
        self._bucket, _, path = directory.removeprefix("gs://").partition("/")
        self._name = "/".join(part for part in (*path.split("/"), NAME) if part)
        self._fs = fsspec.filesystem("gs")
        self._holder = uuid.uuid4().hex
        self._lock = threading.Lock()  # of _generation and _lost
        self._lost = False
        found = self._read()
        if found.generation and found.owner != owner and found.age < STALE_SECONDS:
            raise self._taken(found.owner)
        self._generation = self._write(found.generation)
        if not self._generation:
            raise self._taken("another run, which started at the same moment,")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="checkpoint lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Renews the lease; raises CheckpointError if another run has taken it over."""
        with contextlib.suppress(Exception):  # unreachable: the save will fail and report it
            self._renew()
        if self._lost:
            raise self._taken(self._read().owner)

    def release(self) -> None:
        """Releases the lease. A failure is ignored, because the lease will expire."""
        self._ended.set()
        self._thread.join(10)
        if not self._lost:
            with contextlib.suppress(Exception):
                self._fs.call(
                    "DELETE",
                    "b/{}/o/{}",
                    self._bucket,
                    self._name,
                    ifGenerationMatch=self._generation,
                )

    def _keep(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with contextlib.suppress(Exception):  # the network is down: retried
                self._renew()

    def _renew(self) -> None:
        with self._lock:
            if not self._lost:
                generation = self._write(self._generation)
                self._lost = not generation
                self._generation = generation

    def _read(self) -> _Found:
        try:
            headers, content = self._fs.call("GET", "b/{}/o/{}", self._bucket, self._name)
        except FileNotFoundError:
            return _Found(0)
        info = json.loads(content)
        now = email.utils.parsedate_to_datetime(headers["Date"])
        age = now - datetime.datetime.fromisoformat(info["updated"])
        try:
            lease = json.loads(self._fs.cat_file(f"{self._bucket}/{self._name}"))
            owner, holder = str(lease["owner"]), str(lease["holder"])
        except (ValueError, KeyError, TypeError):
            owner, holder = "someone with an unreadable lease", ""
        return _Found(int(info["generation"]), owner, holder, age.total_seconds())

    def _write(self, generation: int) -> int:
        """Writes the lease if its generation is still this one; returns the new one, or 0."""
        content = {"owner": self._owner, "holder": self._holder}
        try:
            written = self._fs.call(
                "POST",
                self._fs.base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o",
                self._bucket,
                uploadType="media",
                name=self._name,
                ifGenerationMatch=generation,
                data=json.dumps(content).encode(),
                json_out=True,
            )
        except FileExistsError:  # gcsfs raises it if the condition does not hold
            # gcsfs also repeats a request whose response was lost: this may be our own lease.
            found = self._read()
            return found.generation if found.holder == self._holder else 0
        return int(written["generation"])

    def _taken(self, owner: str) -> CheckpointError:
        return CheckpointError(
            f"{self._directory}: {owner} is saving there; try another "
            f"config.checkpoint.directory; if that run is dead, wait {STALE_SECONDS / 60:.0f} "
            f"minutes or delete {self._directory.rstrip('/')}/{NAME}"
        )
