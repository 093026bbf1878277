"""Checkpoints: the arrays of one step and the facts that belong to them, saved as one unit.

Orbax writes them, asynchronously and sharded. A whole step is renamed into place in a local folder;
in a bucket, which knows no rename, a last object marks it as whole. Added here: every array carries
a digest, a step is compared with what it shall become before it is read, a step counts as saved,
and older ones are removed, only after it has been read back, and every failure is one line. Only
arrays and JSON are read: nothing in a checkpoint is ever executed.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from checkpoints import folder
from checkpoints.digest import digests
from checkpoints.folder import (
    CheckpointError,
    DamagedError,
    IncompleteError,
    OneLine,
    check_reached,
    first_line,
    reason,
)
from checkpoints.lease import Lease
from checkpoints.retention import Retention, finite

FORMAT = 2
VERIFY = ("manifest", "digests")
BROKEN = "broken"  # folder that broken steps are moved to, so that nothing is overwritten
_STEP = re.compile(r"(\d+)(\.orbax-checkpoint-tmp.*)?")  # a step's folder, whole or not


@dataclasses.dataclass(frozen=True)
class Restored:
    """step; arrays by name, placed as asked for; the facts that were saved with them."""

    step: int
    arrays: dict[str, jax.Array]
    facts: dict[str, Any]


class Manager:
    """The checkpoints of one run, in one folder.

    Every method is called by all processes together.

    Args:
        directory: local path, or gs://bucket/path.
        retention: what to keep. None: only reading, nothing is created or tidied.
        say: takes one line for the user.
        verify: how a save is read back before it counts. "manifest": its record, and the metadata
            of every array through the index that restoring uses, whose blocks have checksums; a few
            requests an array. "digests": every array as well, one at a time; reads all bytes.
        owner: who saves, for the lease that a folder in a bucket gets: host and workdir.
    """

    def __init__(
        self,
        directory: str,
        retention: Retention | None = None,
        say: Callable[[str], None] = print,
        *,
        verify: str = "manifest",
        owner: str = "",
    ):
        self.directory = folder.find(directory)
        self._say, self._verify, self._retention = say, verify, retention
        self._saving: int | None = None
        self._target: dict[str, jax.ShapeDtypeStruct] = {}  # of the save under way
        self._scores: dict[int, float | None] = {}
        self._lease: Lease | None = None
        reading = retention is None
        with self._access("read" if reading else "write"):
            if reading and not self.directory.exists():
                raise CheckpointError(f"{directory}: there is no such checkpoint folder")
            if not reading:
                folder.make(self.directory)
                if jax.process_index() == 0:
                    self._try_writing()
                    if directory.startswith("gs://"):
                        self._lease = Lease(directory, owner)
                    self._remove_interrupted()
                if jax.process_count() > 1:
                    folder.check_shared(self.directory)
                    multihost_utils.sync_global_devices("checkpoint folder tidied")
            self._orbax = _open_orbax(self.directory, read_only=reading)

    def steps(self) -> list[int]:
        """Steps on disk in ascending order, whole ones and those that only look so."""
        with self._access("read"):
            self._orbax.reload()
        return sorted(self._orbax.all_steps())

    def save(
        self,
        step: int,
        arrays: dict[str, jax.Array],
        facts: dict[str, Any],
        score: float | None = None,
    ) -> None:
        """Starts saving; returns when the arrays may be changed. `wait` or `check` tell the end.

        Args:
            arrays: by name. facts: JSON-able; the first process's are kept. score: lower is better.

        Raises:
            CheckpointError: this save could not start, or an earlier one failed.
        """
        if step in self._orbax.all_steps():
            return  # restored from this very step, or saved since: it is there
        self.wait()
        if self._lease:
            self._lease.check()
        record = {
            "format": FORMAT,
            "step": step,
            "tree": describe(arrays),
            "digests": digests(arrays),
            "score": score if finite(score) else None,
            "facts": facts,
        }
        self._saving = step
        self._target = {
            name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
            for name, a in arrays.items()
        }
        with self._failures():
            self._orbax.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(arrays), record=ocp.args.JsonSave(record)
                ),
                force=True,
            )

    def check(self) -> None:
        """Raises CheckpointError if a save in the background has failed. Never waits."""
        with self._failures():
            self._orbax.check_for_errors()

    def wait(self) -> None:
        """Waits for the save in the background, reads it back, and removes steps that need not
        stay.

        Raises:
            CheckpointError: the save failed, or cannot be read back. Nothing was removed.
        """
        with self._failures():
            self._orbax.wait_until_finished()
            self._orbax.check_for_errors()
        if self._saving is None:
            return
        step, self._saving = self._saving, None
        self._read_back(step)
        self._tidy()

    def _read_back(self, step: int) -> None:
        """Reads a new step as restoring would."""
        try:
            record = self._together(lambda: self.record(step))
            compare_trees(f"{self.directory}/{step}", record["tree"], describe(self._target))
            self._together(lambda: self._check_manifest(step))
            if self._verify == "digests":
                for name, array in self._target.items():
                    self._check_digests(step, record, {name: array})
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; it was just saved and cannot be read back; older steps were kept; "
                "try another --workdir or config.checkpoint.directory"
            ) from None

    def _check_manifest(self, step: int) -> None:
        """Opens every array of a step, without reading its elements."""
        place = f"{self.directory}/{step}"
        try:
            found = self._orbax.item_metadata(step)["state"]
            saved = {name: [list(a.shape), np.dtype(a.dtype).name] for name, a in found.items()}
        except Exception as error:
            check_reached(place, error)
            raise IncompleteError(f"{place}: incomplete, {first_line(error)}") from None
        compare_trees(place, saved, describe(self._target))

    def _tidy(self) -> None:
        """Removes the steps that retention does not keep; never one whose record is unreadable."""
        if self._retention is None:
            return
        scores: dict[int, float | None] = {}
        for step in self._orbax.all_steps():
            if step not in self._scores:
                try:
                    self._scores[step] = self._together(functools.partial(self._score, step))
                except CheckpointError:
                    continue
            scores[step] = self._scores[step]
        with self._failures():
            for step in self._retention.removes(scores):
                self._orbax.delete(step)
                del self._scores[step]

    def restore_latest(
        self, target: Callable[[dict[str, Any]], dict[str, jax.ShapeDtypeStruct]], damaged: str
    ) -> Restored | None:
        """The newest whole step, or None where there is no step at all.

        Args:
            target: facts of a step -> the arrays wanted from it, with shardings; raises to refuse.
            damaged: "stop" or "skip": what to do with a step whose content has changed.

        Raises:
            CheckpointError: no step is whole, the format is unknown, the arrays are of another
                model, or a step is damaged.
        """
        reasons = []
        steps = self.steps()
        for older, step in zip([None, *steps][-2::-1], reversed(steps)):
            try:
                return self.restore(step, target)
            except IncompleteError as error:
                reason = str(error)
            except DamagedError as error:
                if damaged == "stop":
                    raise CheckpointError(_advice(str(error), older)) from None
                reason = str(error)
            reasons.append((step, reason))
            self._say(f"passed over {reason}")
        if reasons:
            raise CheckpointError(
                f"{self.directory}: none of its {len(reasons)} checkpoints is whole "
                f"({reasons[0][1]}); nothing was changed; try another --workdir to start anew"
            )
        return None

    def restore(
        self,
        step: int,
        target: Callable[[dict[str, Any]], dict[str, jax.ShapeDtypeStruct]],
    ) -> Restored:
        """One step, verified. See `restore_latest` for `target` and the errors."""
        record = self._together(lambda: self.record(step))
        wanted = target(record["facts"])
        place = f"{self.directory}/{step}"
        compare_trees(place, record["tree"], describe(wanted))
        return Restored(step, self._check_digests(step, record, wanted), record["facts"])

    def _check_digests(
        self, step: int, record: dict[str, Any], wanted: dict[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        """Reads arrays and compares them with what was saved."""
        arrays = self._together(lambda: self._read_arrays(step, wanted))
        found = digests(arrays)
        changed = [name for name in wanted if found[name] != record["digests"][name]]
        if changed:
            raise DamagedError(
                f"{self.directory}/{step}: damaged, {changed[0]} is not what was saved"
            )
        return arrays

    def move_broken(self, newest_whole: int) -> None:
        """Moves steps newer than the one restored aside, so that they can be saved again."""
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
            self._orbax.close()
            if self._lease:
                self._lease.release()

    def _score(self, step: int) -> float | None:
        """None for a step without arrays: its removal was interrupted."""
        record = self.record(step)
        with self._access("read"):
            whole = (self.directory / str(step) / "state").exists()
        return record.get("score") if whole else None

    def _try_writing(self) -> None:
        """Retention deletes, so that is tried as well."""
        probe = self.directory / ".writable"
        probe.write_text("")
        probe.unlink()

    def _remove_interrupted(self) -> None:
        """Orbax can do this too, but in a thread that a run which ends at once does not outlive."""
        for path in sorted(self.directory.iterdir()):
            step = _STEP.fullmatch(path.name)
            if step and not ocp.utils.is_checkpoint_finalized(path):
                self._say(
                    f"passed over {self.directory}/{step[1]}: its save was interrupted "
                    f"({path.name}); it will be saved again"
                )
                path.rmtree()

    def _move_aside(self, step: int) -> None:
        broken = self.directory / BROKEN
        folder.make(broken)
        taken = {path.name for path in broken.iterdir()}
        name = next(n for n in (f"{step}-{i}" for i in range(len(taken) + 1)) if n not in taken)
        (self.directory / str(step)).rename(broken / name)

    def record(self, step: int) -> dict[str, Any]:
        """What stands beside the arrays of a step: format, tree, digests, facts."""
        place = f"{self.directory}/{step}"
        path = self.directory / str(step) / "record"
        with self._access("read"):
            if not path.exists() or not any(path.iterdir()):
                raise IncompleteError(f"{place}: incomplete, it has no record")
        try:
            restored = self._orbax.restore(
                step, args=ocp.args.Composite(record=ocp.args.JsonRestore())
            )
            record = restored["record"]
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DamagedError(f"{place}: damaged, its record is no JSON ({error})") from None
        except Exception as error:
            check_reached(place, error)
            raise IncompleteError(f"{place}: incomplete, {reason(error)}") from None
        known = isinstance(record, dict) and record.get("format") == FORMAT
        if not known:
            found = record.get("format") if isinstance(record, dict) else "none"
            raise CheckpointError(
                f"{place}: checkpoint format {found!r} is unknown; needs format {FORMAT}; "
                "try the version of this trainer that wrote it, or another --workdir"
            )
        return record

    def _read_arrays(
        self, step: int, wanted: dict[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        place = f"{self.directory}/{step}"
        with self._access("read"):
            if not (self.directory / str(step) / "state").exists():
                raise IncompleteError(f"{place}: incomplete, it has no arrays")
        restore_args = {
            name: ocp.ArrayRestoreArgs(
                sharding=array.sharding, global_shape=array.shape, dtype=array.dtype
            )
            for name, array in wanted.items()
        }
        arguments = ocp.args.PyTreeRestore(
            item=wanted, restore_args=restore_args, partial_restore=True
        )
        try:
            return self._orbax.restore(step, args=ocp.args.Composite(state=arguments))["state"]
        except Exception as error:
            check_reached(place, error)
            text = first_line(error)
            missing = isinstance(error, FileNotFoundError) or "NOT_FOUND" in text
            if missing:
                raise IncompleteError(f"{place}: incomplete, {text}") from None
            raise DamagedError(f"{place}: damaged, {text}") from None

    def _together(self, read: Callable[[], Any]) -> Any:
        """Reads; where one process fails, all fail in the same way, so that none waits."""
        kinds: list[type[CheckpointError] | None] = [
            None,
            IncompleteError,
            DamagedError,
            CheckpointError,
        ]
        result, failure = None, None
        try:
            result = read()
        except CheckpointError as error:
            failure = error
        mine = kinds.index(type(failure)) if failure else 0
        if jax.process_count() > 1:
            everyone = multihost_utils.process_allgather(np.int32(mine))
            worst = int(np.max(everyone))
        else:
            worst = mine
        if failure and mine == worst:
            raise failure
        kind = kinds[worst]
        if kind is not None:
            raise kind(f"{self.directory}: another process could not read its part")
        return result

    def _failures(self) -> OneLine:
        return OneLine(
            f"{self.directory}: saving step {self._saving} failed",
            "the steps saved before are untouched; try freeing space, or another --workdir or "
            "config.checkpoint.directory",
        )

    def _access(self, way: str) -> OneLine:
        """way: "read" or "write"."""
        return OneLine(
            f"{self.directory}: cannot {way} there",
            "try another --workdir or config.checkpoint.directory",
        )


def _open_orbax(directory: epath.Path, *, read_only: bool) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(
            read_only=read_only,
            create=False,
            # No process waits for another that died for longer than this (seconds).
            async_options=ocp.AsyncOptions(timeout_secs=600),
        ),
        item_names=("state", "record"),
        item_handlers={
            "state": ocp.PyTreeCheckpointHandler(),
            "record": ocp.JsonCheckpointHandler(),
        },
    )


def describe(arrays: dict[str, Any]) -> dict[str, list]:
    """{name: [shape, dtype]}: what makes two sets of arrays exchangeable."""
    return {name: [list(a.shape), np.dtype(a.dtype).name] for name, a in arrays.items()}


def compare_trees(place: str, saved: dict, wanted: dict) -> None:
    """Refuses arrays of another shape, type or name.

    Args:
        place: the checkpoint's path, for the message. A group of arrays (the name up to its first
            "/") of which none is wanted may be left behind.

    Raises:
        CheckpointError: naming the first array that differs.
    """
    text = None
    for name, what in wanted.items():
        if name not in saved:
            text = f"it has no {name}"
        elif saved[name] != what:
            text = f"{name} is {saved[name]} there and {what} here"
        if text:
            break
    groups = {name.split("/")[0] for name in wanted}
    surplus = [n for n in saved if n not in wanted and n.split("/")[0] in groups]
    if text is None and surplus:
        text = f"it has {surplus[0]}, which is not here"
    if text:
        raise CheckpointError(
            f"{place}: a checkpoint of another model or optimizer, {text}; "
            "try the config that wrote it, or another --workdir"
        )


def _advice(text: str, older: int | None) -> str:
    if older is None:
        return f"{text}; nothing was changed; try another --workdir to start anew"
    return (
        f"{text}; nothing was changed; try --config.checkpoint.damaged=skip "
        f"to go on from step {older}"
    )
