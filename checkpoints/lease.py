"""One run at a time in a folder of a bucket: a lease object with owner and heartbeat.

A bucket has no locks, but an object can be written on condition that it still is the version that
was read (`ifGenerationMatch`), so of two runs that want the lease one gets it. The owner renews it
every minute. A lease that was not renewed for ten minutes belongs to a run that died, and is taken
over; so is one of the same owner, which restarts after a crash and holds the local lock of its
workdir. Clocks of different hosts may differ by some minutes.
"""

import contextlib
import dataclasses
import json
import threading
import time

import fsspec

from checkpoints.folder import CheckpointError

NAME = ".lease"
RENEW_SECONDS = 60.0
STALE_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class _Found:
    """The lease object: generation 0 where there is none."""

    generation: int
    owner: str = ""
    renewed: float = 0.0


class Lease:
    """Held from `__init__` until `release`, or the end of the process and ten minutes more.

    Args:
        directory: gs://bucket/path. owner: who holds it: host and workdir of the run.

    Raises:
        CheckpointError: another run holds it.
    """

    def __init__(self, directory: str, owner: str):
        self._directory, self._owner = directory, owner
        self._bucket, _, path = directory.removeprefix("gs://").partition("/")
        self._name = "/".join(part for part in (path.strip("/"), NAME) if part)
        self._fs = fsspec.filesystem("gs")
        self.lost = False
        found = self._read()
        fresh = time.time() - found.renewed < STALE_SECONDS
        if found.generation and found.owner != owner and fresh:
            raise self._taken(found.owner)
        self._generation = self._write(found.generation)
        if not self._generation:
            raise self._taken("another run, which started at the same moment")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="checkpoint lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises CheckpointError once another run has taken the lease over."""
        if self.lost:
            raise self._taken(self._read().owner)

    def release(self) -> None:
        """Gives the lease back; a failure is not worth an error, the lease goes stale by itself."""
        self._ended.set()
        self._thread.join()
        if not self.lost:
            with contextlib.suppress(Exception):
                self._fs.call("DELETE", "b/{}/o/{}", self._bucket, self._name,
                              ifGenerationMatch=self._generation)  # fmt: skip

    def _keep(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            with contextlib.suppress(Exception):  # a network that is down: tried again
                generation = self._write(self._generation)
                self.lost = not generation
                self._generation = generation
            if self.lost:
                return

    def _read(self) -> _Found:
        try:
            info = self._fs.call("GET", "b/{}/o/{}", self._bucket, self._name, json_out=True)
            content = json.loads(self._fs.cat_file(f"{self._bucket}/{self._name}"))
            return _Found(int(info["generation"]), content["owner"], float(content["renewed"]))
        except FileNotFoundError:
            return _Found(0)
        except (ValueError, KeyError, TypeError):  # not a lease: somebody else's file
            return _Found(int(info["generation"]), "an unreadable lease", time.time())

    def _write(self, generation: int) -> int:
        """Writes the lease where it still has this generation; its new one, 0 if it has not."""
        content = {"owner": self._owner, "renewed": time.time()}
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
        except FileExistsError:  # what gcsfs makes of a condition that does not hold
            return 0
        return int(written["generation"])

    def _taken(self, owner: str) -> CheckpointError:
        return CheckpointError(
            f"{self._directory}: {owner} is saving there; try another "
            f"config.checkpoint.directory; if that run is dead, wait {STALE_SECONDS / 60:.0f} "
            f"minutes or delete {self._directory.rstrip('/')}/{NAME}"
        )
