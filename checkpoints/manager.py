"""The checkpoints of one run: what is saved and kept, and from which step a restart continues.

A save counts, and older steps are removed, only after the new step has been read back. Two runs
cannot save to the same folder: a local folder is locked by the caller (training/lock.py), a folder
in a bucket has a lease.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints import folder
from checkpoints.errors import (
    CheckpointError,
    DamagedError,
    IncompleteError,
    first_line,
    one_line,
    reason,
)
from checkpoints.lease import Lease
from checkpoints.retention import Retention, finite
from checkpoints.store import Json, Record, Shapes, Store, compare_trees, describe

__all__ = [
    "CheckpointError",
    "DamagedError",
    "IncompleteError",
    "Manager",
    "Restored",
    "Retention",
    "first_line",
]

BROKEN = "broken"  # folder to which broken steps are moved, so that nothing is overwritten
_TRIAL = ".trial"
_READ_BYTES = 2**28  # per device, in addition to the training state, while a save is read back
_STEP = re.compile(r"(\d+)(\.orbax-checkpoint-tmp.*)?")  # a step's folder, complete or not

type Target = Callable[[Json], Shapes]


@dataclasses.dataclass(frozen=True)
class Restored:
    """step; arrays by name, with the requested shardings; the metadata saved with them."""

    step: int
    arrays: dict[str, jax.Array]
    metadata: Json


class Manager:
    """The checkpoints of one run, in one folder. All processes call every method together.

    Args:
        directory: local path, or gs://bucket/path.
        retention: what to keep. None: read-only, nothing is created or removed.
        log: called with one line for the user.
        verify: what of a save is read back before it counts. "sizes": its record, the index of its
            arrays, which has checksums, and the sizes of the files that the index refers to.
            "digests": every array as well, up to 256 MiB per device at a time.
        owner: names this run in the lease of a folder in a bucket; see Lease.
        on_whole: called with each step that is restored, or saved and read back.
    """

    def __init__(
        self,
        directory: str,
        retention: Retention | None = None,
        log: Callable[[str], None] = print,
        *,
        verify: str = "sizes",
        owner: str = "",
        on_whole: Callable[[int], None] = lambda step: None,
    ):
        self.directory = folder.find(directory)
        self._log, self._verify, self._retention = log, verify, retention
        self._on_whole = on_whole
        self._saving: int | None = None
        self._shapes: Shapes = {}  # of the save in progress
        self._scores: dict[int, float | None] = {}  # of steps whose record has been read
        self._lease: Lease | None = None
        if retention is None:
            with self._access("read"):
                if not self.directory.exists():
                    raise CheckpointError(f"{directory}: there is no such checkpoint folder")
                self._store = Store.open(self.directory, read_only=True)
            return
        with self._access("write"):
            self._prepare(directory, owner)
            self._store = Store.open(self.directory, read_only=False)
        if not self._store.orbax.all_steps():
            self._try_saving()

    def steps(self) -> list[int]:
        """Steps on disk in ascending order, both complete and broken ones."""
        with self._access("read"):
            self._store.orbax.reload()
        return sorted(self._store.orbax.all_steps())

    def record(self, step: int) -> Record:
        """The record saved with the arrays of a step; see Store.record."""
        return self._store.record(step)

    def save(
        self,
        step: int,
        arrays: Mapping[str, jax.Array],
        metadata: Json,
        score: float | None = None,
    ) -> None:
        """Starts saving; returns when the arrays may be changed. An existing step is kept.

        Args:
            arrays: by name. metadata: JSON values; those of process 0 are saved. score: lower is
                better; a score that is not finite counts as None.

        Raises:
            CheckpointError: this save could not start, or an earlier one failed.
        """
        if step in self._store.orbax.all_steps():
            return
        self.wait()
        if self._lease:
            self._lease.check()
        self._saving = step
        self._shapes = {
            name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
            for name, a in arrays.items()
        }
        with self._failures():
            self._store.save(step, arrays, metadata, score if finite(score) else None)

    def check(self) -> None:
        """Raises CheckpointError if a save in the background has failed. Never waits."""
        with self._failures():
            self._store.orbax.check_for_errors()

    def wait(self) -> None:
        """Waits for the background save, reads it back, and removes old steps.

        Raises:
            CheckpointError: the save failed, or cannot be read back. Nothing was removed.
        """
        with self._failures():
            self._store.wait()
        if self._saving is None:
            return
        step, self._saving = self._saving, None
        self._read_back(step)
        self._on_whole(step)
        self._remove_old()

    def restore_latest(
        self, target: Target, damaged: str, only: Collection[str] | None = None
    ) -> Restored | None:
        """Restores the newest complete step; returns None if there are no steps.

        Args:
            target: maps the metadata of a step to the arrays to read, with shardings; raises to
                refuse the step.
            damaged: what to do with a step whose content has changed, "stop" or "skip".
            only: names of the arrays to read of those of `target`, which are all compared with the
                step's. None: all.

        Raises:
            CheckpointError: no step is complete, the format is unknown, the arrays are of another
                model, or a step is damaged.
        """
        reasons = []
        steps = self.steps()
        for older, step in zip([None, *steps][-2::-1], reversed(steps)):
            try:
                return self.restore(step, target, only)
            except IncompleteError as error:
                text = str(error)
            except DamagedError as error:
                if damaged == "stop":
                    raise CheckpointError(_advice(str(error), older)) from None
                text = str(error)
            reasons.append(text)
            self._log(f"skipped {text}")
        if reasons:
            raise CheckpointError(
                f"{self.directory}: none of its {len(reasons)} checkpoints is usable "
                f"({reasons[0]}); nothing was changed; try another --workdir to start a new run"
            )
        return None

    def restore(self, step: int, target: Target, only: Collection[str] | None = None) -> Restored:
        """Verifies and restores one step. See `restore_latest` for arguments and errors."""
        record = self._store.shared_record(step)
        wanted = target(record["metadata"])
        compare_trees(self._store.place(step), record["tree"], describe(wanted))
        self._store.verify(step, record)
        if only is not None:
            wanted = {name: wanted[name] for name in only}
        arrays = self._store.read(step, record, wanted)
        self._on_whole(step)
        return Restored(step, arrays, record["metadata"])

    def move_broken(self, newest_whole: int) -> None:
        """Moves steps newer than the restored one to `broken`, so that they can be saved again."""
        later = [step for step in self.steps() if step > newest_whole]
        if jax.process_index() == 0:
            for step in later:
                with self._access("write"):
                    self._move_aside(step)
        if later and jax.process_count() > 1:
            multihost_utils.sync_global_devices("broken checkpoints moved")
        if later:
            self.steps()

    def close(self) -> None:
        """Waits for the last save and closes. Raises CheckpointError if that save failed."""
        try:
            self.wait()
        finally:
            self._store.orbax.close()
            if self._lease:
                self._lease.release()

    def _prepare(self, directory: str, owner: str) -> None:
        folder.make(self.directory)
        if jax.process_index() == 0:
            folder.try_writing(self.directory)
            if directory.startswith("gs://"):
                self._lease = Lease(directory, owner)
            self._remove_interrupted()
        if jax.process_count() > 1:
            folder.check_shared(self.directory)
            multihost_utils.sync_global_devices("checkpoint folder tidied")

    def _try_saving(self) -> None:
        """Saves, reads and deletes a small step, in a folder where nothing has been saved yet.

        Anything that prevents checkpoints there (a name that a library misreads, a file system that
        lacks what Orbax needs) is reported before training starts.
        """
        place = self.directory / _TRIAL
        advice = "try another --workdir or config.checkpoint.directory"
        try:
            folder.make(place)
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("trial folder made")
            _save_and_read(place)
            if jax.process_index() == 0:
                place.rmtree()
        except Exception as error:
            raise CheckpointError(
                f"{self.directory}: cannot save there ({reason(error)}); {advice}"
            ) from None

    def _read_back(self, step: int) -> None:
        """Reads a new step as a restore would."""
        try:
            record = self._store.shared_record(step)
            compare_trees(self._store.place(step), record["tree"], describe(self._shapes))
            self._store.verify(step, record)
            if self._verify == "digests":
                for group in _groups(self._shapes):
                    self._store.read(step, record, group)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; it was just saved and cannot be read back; older steps were kept; "
                "try another --workdir or config.checkpoint.directory"
            ) from None

    def _remove_old(self) -> None:
        """Removes the steps that are not kept, but never one whose record cannot be read."""
        if self._retention is None:
            return
        scores: dict[int, float | None] = {}
        for step in self._store.orbax.all_steps():
            if step not in self._scores:
                try:
                    self._scores[step] = self._store.score(step)
                except CheckpointError:
                    continue
            scores[step] = self._scores[step]
        with self._failures():
            for step in self._retention.removes(scores):
                self._store.orbax.delete(step)
                del self._scores[step]

    def _remove_interrupted(self) -> None:
        """Removes unfinished saves. Orbax would do so in a thread that an early exit cuts short."""
        for path in sorted(self.directory.iterdir()):
            step = _STEP.fullmatch(path.name)
            if step and not ocp.utils.is_checkpoint_finalized(path):
                self._log(
                    f"skipped {self.directory}/{step[1]}: its save was interrupted "
                    f"({path.name}); it will be saved again"
                )
                path.rmtree()
            elif path.name == _TRIAL:
                path.rmtree()

    def _move_aside(self, step: int) -> None:
        broken = self.directory / BROKEN
        folder.make(broken)
        taken = {path.name for path in broken.iterdir()}
        name = next(n for n in (f"{step}-{i}" for i in range(len(taken) + 1)) if n not in taken)
        (self.directory / str(step)).rename(broken / name)

    def _failures(self) -> one_line:
        return one_line(
            f"{self.directory}: saving step {self._saving} failed",
            "the steps saved before are untouched; try freeing space, or another --workdir or "
            "config.checkpoint.directory",
        )

    def _access(self, way: str) -> one_line:
        """way: "read" or "write"."""
        return one_line(
            f"{self.directory}: cannot {way} there",
            "try another --workdir or config.checkpoint.directory",
        )


def _groups(shapes: Shapes) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """Yields groups of arrays of at most _READ_BYTES per device, or of a single array."""
    group: dict[str, jax.ShapeDtypeStruct] = {}
    used = 0
    for name, shape in shapes.items():
        assert shape.sharding is not None
        size = math.prod(shape.sharding.shard_shape(shape.shape)) * shape.dtype.itemsize
        if group and used + size > _READ_BYTES:
            yield group
            group, used = {}, 0
        group[name] = shape
        used += size
    if group:
        yield group


def _save_and_read(place: epath.Path) -> None:
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("all",)), PartitionSpec())
    values = {"trial": jax.make_array_from_callback((8,), everywhere, np.arange(8).__getitem__)}
    shapes = {"trial": jax.ShapeDtypeStruct((8,), values["trial"].dtype, sharding=everywhere)}
    store = Store.open(place, read_only=False)
    try:
        store.save(0, values, {}, None)
        store.wait()
        record = store.shared_record(0)
        store.verify(0, record)
        store.read(0, record, shapes)
    finally:
        store.orbax.close()


def _advice(text: str, older: int | None) -> str:
    if older is None:
        return f"{text}; nothing was changed; try another --workdir to start a new run"
    return (
        f"{text}; nothing was changed; try --config.checkpoint.damaged=skip "
        f"to continue from step {older}"
    )
