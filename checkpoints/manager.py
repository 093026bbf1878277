"""Checkpoints: the arrays of one step and the facts that belong to them, saved as one unit.

Orbax writes them, asynchronously and sharded. A whole step is renamed into place in a local folder;
in a bucket, which knows no rename, a last object marks it as whole. Added here: every array carries
a digest, a step is compared with what it shall become before it is read, and every failure is one
line. Only arrays and JSON are read: nothing in a checkpoint is ever executed.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

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

FORMAT = 1
BROKEN = "broken"  # folder that broken steps are moved to, so that nothing is overwritten
_STEP = re.compile(r"(\d+)(\.orbax-checkpoint-tmp.*)?")  # a step's folder, whole or not


def _score(metrics: dict[str, float]) -> float:
    return metrics["score"]


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which steps stay: the last `last`, multiples of `every` (0: none), the `best` lowest scores.

    Units: checkpoints, steps, checkpoints. The newest whole step always stays.
    """

    last: int = 3
    every: int = 0
    best: int = 0

    def policy(self) -> checkpoint_managers.PreservationPolicy:
        policies: list[checkpoint_managers.PreservationPolicy] = [
            checkpoint_managers.LatestN(self.last)
        ]
        if self.every:
            policies.append(checkpoint_managers.EveryNSteps(self.every))
        if self.best:
            policies.append(
                checkpoint_managers.BestN(
                    get_metric_fn=_score,
                    reverse=True,  # the list is sorted downwards and its end is kept: the lowest
                    n=self.best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        return checkpoint_managers.AnyPreservationPolicy(policies)


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
    """

    def __init__(
        self,
        directory: str,
        retention: Retention | None = None,
        say: Callable[[str], None] = print,
    ):
        self.directory = folder.find(directory)
        self._say = say
        self._saving: int | None = None
        reading = retention is None
        with self._access("read" if reading else "write"):
            if reading and not self.directory.exists():
                raise CheckpointError(f"{directory}: there is no such checkpoint folder")
            if not reading:
                folder.make(self.directory)
                if jax.process_index() == 0:
                    self._try_writing()
                    self._remove_interrupted()
                if jax.process_count() > 1:
                    folder.check_shared(self.directory)
                    multihost_utils.sync_global_devices("checkpoint folder tidied")
            self._orbax = _open_orbax(self.directory, retention)

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
        record = {
            "format": FORMAT,
            "step": step,
            "tree": describe(arrays),
            "digests": digests(arrays),
            "facts": facts,
        }
        self._saving = step
        with self._failures():
            self._orbax.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(arrays), record=ocp.args.JsonSave(record)
                ),
                metrics=None if score is None else {"score": score},
                force=True,
            )

    def check(self) -> None:
        """Raises CheckpointError if a save in the background has failed. Never waits."""
        with self._failures():
            self._orbax.check_for_errors()

    def wait(self) -> None:
        """Waits for the save in the background; raises CheckpointError if it failed."""
        with self._failures():
            self._orbax.wait_until_finished()
            self._orbax.check_for_errors()
        self._saving = None

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
        arrays = self._together(lambda: self._read_arrays(step, wanted))
        found = digests(arrays)
        changed = [name for name in wanted if found[name] != record["digests"][name]]
        if changed:
            raise DamagedError(f"{place}: damaged, {changed[0]} is not what was saved")
        return Restored(step, arrays, record["facts"])

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
        self.wait()
        self._orbax.close()

    def _try_writing(self) -> None:
        """Retention deletes, so that is tried as well."""
        probe = self.directory / ".writable"
        probe.write_text("")
        probe.unlink()

    def _remove_interrupted(self) -> None:
        """Orbax can do this too, but in a thread that a run which ends at once does not outlive."""
        for path in sorted(self.directory.iterdir()):
            step = _STEP.fullmatch(path.name)
            if step and ocp.utils.is_checkpoint_finalized(path):
                _check_score(path)
            elif step:
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


def _open_orbax(directory: epath.Path, retention: Retention | None) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(
            preservation_policy=retention.policy() if retention else None,
            # The policy's metric is written into the step only where this names one, too.
            best_fn=_score,
            best_mode="min",
            read_only=retention is None,
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


def _check_score(step: epath.Path) -> None:
    """Orbax reads each step's score as it opens the folder, and would not say whose is damaged."""
    try:
        _score(json.loads((step / "metrics" / "metrics").read_bytes()))
    except FileNotFoundError:
        pass  # it was saved without one
    except (ValueError, KeyError, TypeError):
        raise DamagedError(
            f"{step}: damaged, its score cannot be read; nothing was changed; "
            f"try to delete {step}/metrics, without which it is no longer among the best"
        ) from None


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
