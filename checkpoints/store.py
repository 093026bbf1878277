"""Steps in a folder: arrays and a record of them, saved and verified as one unit.

Orbax writes them, asynchronously and sharded. In a local folder a complete step is renamed into
place; in a bucket, which has no rename, a final object marks it as complete. This module adds a
digest of every array, and verification. Only arrays and JSON are read: nothing in a checkpoint is
ever executed.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from checkpoints import index
from checkpoints.digest import digests
from checkpoints.errors import (
    CheckpointError,
    DamagedError,
    IncompleteError,
    check_reached,
    first_line,
    one_line,
    reason,
)

FORMAT = 2

type Json = dict[str, Any]  # any JSON values: config, data position, time spent
type Shapes = Mapping[str, jax.ShapeDtypeStruct]  # with shardings, by name
type Tree = dict[str, list]  # {name: [shape, dtype]}


class Record(TypedDict):
    """The JSON saved with the arrays of a step."""

    format: int
    step: int
    tree: Tree
    digests: dict[str, int]
    score: float | None
    metadata: Json


@dataclasses.dataclass(frozen=True)
class Store:
    """The steps in one folder. All processes call every method together, except `record`.

    Attributes:
        directory: an existing folder. orbax: Orbax's manager, open on that folder.
    """

    directory: epath.Path
    orbax: ocp.CheckpointManager

    @classmethod
    def open(cls, directory: epath.Path, *, read_only: bool) -> "Store":
        options = ocp.CheckpointManagerOptions(
            read_only=read_only,
            create=False,
            # Seconds that a process waits for the others, one of which may have died.
            async_options=ocp.AsyncOptions(timeout_secs=600),
        )
        handlers = {
            "state": ocp.PyTreeCheckpointHandler(),
            "record": ocp.JsonCheckpointHandler(),
        }
        return cls(
            directory,
            ocp.CheckpointManager(
                directory, options=options, item_names=tuple(handlers), item_handlers=handlers
            ),
        )

    def place(self, step: int) -> str:
        """The step's folder, for messages."""
        return f"{self.directory}/{step}"

    def save(
        self, step: int, arrays: Mapping[str, jax.Array], metadata: Json, score: float | None
    ) -> None:
        """Starts saving; returns when the arrays may be changed."""
        record = Record(
            format=FORMAT,
            step=step,
            tree=describe(arrays),
            digests=digests(dict(arrays)),
            score=score,
            metadata=metadata,
        )
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(dict(arrays)), record=ocp.args.JsonSave(record)
        )
        self.orbax.save(step, args=items, force=True)

    def wait(self) -> None:
        """Waits for the background save; raises its exception if it failed."""
        self.orbax.wait_until_finished()
        self.orbax.check_for_errors()

    def record(self, step: int) -> Record:
        """Returns the record of a step.

        Raises:
            IncompleteError, DamagedError: it cannot be read. CheckpointError: the format is
                unknown, or the storage could not be reached.
        """
        place = self.place(step)
        path = self.directory / str(step) / "record"
        with one_line(f"{self.directory}: cannot read there", "try another --workdir"):
            if not path.exists() or not any(path.iterdir()):
                raise IncompleteError(f"{place}: incomplete, it has no record")
        try:
            args = ocp.args.Composite(record=ocp.args.JsonRestore())
            record = self.orbax.restore(step, args=args)["record"]
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DamagedError(f"{place}: damaged, its record is not JSON ({error})") from None
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

    def shared_record(self, step: int) -> Record:
        """Like `record`, but if it fails on one process, it fails on all."""
        return self._together(lambda: self.record(step))

    def score(self, step: int) -> float | None:
        """A step's score; None if its arrays are missing, as after an interrupted removal."""
        return self._together(lambda: self._score(step))

    def verify(self, step: int, record: Record) -> None:
        """Checks, on process 0, that every array can be opened and that all its bytes exist.

        Reads the index of the arrays, whose nodes have checksums, and the sizes of the files that
        it refers to. It does not read the arrays; `read` does, and compares their digests.

        Raises:
            IncompleteError, DamagedError: it cannot be restored.
        """
        self._together(lambda: self._verify(step, record) if jax.process_index() == 0 else None)

    def read(self, step: int, record: Record, wanted: Shapes) -> dict[str, jax.Array]:
        """Reads arrays with the requested shardings, and compares their digests.

        Raises:
            IncompleteError, DamagedError: they cannot be read, or are not those that were saved.
        """
        arrays = self._together(lambda: self._read(step, wanted))
        found = digests(arrays)
        changed = [name for name in wanted if found[name] != record["digests"][name]]
        if changed:
            raise DamagedError(f"{self.place(step)}: damaged, {changed[0]} is not what was saved")
        return arrays

    def _score(self, step: int) -> float | None:
        record = self.record(step)
        with one_line(f"{self.directory}: cannot read there", "try another --workdir"):
            whole = (self.directory / str(step) / "state").exists()
        return record["score"] if whole else None

    def _verify(self, step: int, record: Record) -> None:
        place, state = self.place(step), self.directory / str(step) / "state"
        self._check_exists(state, step)
        try:
            index.check_files(state)
            found = self.orbax.item_metadata(step)["state"]
            tree = {name: [list(a.shape), np.dtype(a.dtype).name] for name, a in found.items()}
        except CheckpointError:
            raise
        except Exception as error:
            raise self._unreadable(place, error) from None
        if tree != record["tree"]:
            raise DamagedError(f"{place}: damaged, its arrays are not those of its record")

    def _read(self, step: int, wanted: Shapes) -> dict[str, jax.Array]:
        self._check_exists(self.directory / str(step) / "state", step)
        restore_args = {
            name: ocp.ArrayRestoreArgs(
                sharding=array.sharding, global_shape=array.shape, dtype=array.dtype
            )
            for name, array in wanted.items()
        }
        arguments = ocp.args.PyTreeRestore(
            item=dict(wanted), restore_args=restore_args, partial_restore=True
        )
        try:
            return self.orbax.restore(step, args=ocp.args.Composite(state=arguments))["state"]
        except Exception as error:
            raise self._unreadable(self.place(step), error) from None

    def _check_exists(self, state: epath.Path, step: int) -> None:
        with one_line(f"{self.directory}: cannot read there", "try another --workdir"):
            if not state.exists():
                raise IncompleteError(f"{self.place(step)}: incomplete, it has no arrays")

    def _unreadable(self, place: str, error: Exception) -> CheckpointError:
        check_reached(place, error)
        text = first_line(error)
        missing = isinstance(error, FileNotFoundError) or "NOT_FOUND" in text
        kind = IncompleteError if missing else DamagedError
        return kind(f"{place}: {'incomplete' if missing else 'damaged'}, {text}")

    def _together[T](self, read: Callable[[], T]) -> T:
        """Calls `read`; if it fails on one process, all raise its error, so that none waits."""
        kinds = (CheckpointError, DamagedError, IncompleteError)  # the most severe first
        failure: CheckpointError | None = None
        try:
            result = read()
        except CheckpointError as error:
            failure = error
        mine = kinds.index(type(failure)) if failure else len(kinds)
        worst = mine
        if jax.process_count() > 1:
            worst = int(np.min(multihost_utils.process_allgather(np.int32(mine))))
        if failure and mine == worst:
            raise failure
        if worst < len(kinds):
            raise kinds[worst](f"{self.directory}: another process could not read its part")
        return result


def describe(arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> Tree:
    """{name: [shape, dtype]}: sets of arrays with equal descriptions are interchangeable."""
    return {name: [list(a.shape), np.dtype(a.dtype).name] for name, a in arrays.items()}


def compare_trees(place: str, saved: Tree, wanted: Tree) -> None:
    """Refuses arrays with other shapes, dtypes or names.

    Args:
        place: the checkpoint's path, for the message. saved: may have additional groups of arrays
            (the group is the name up to its first "/"), if no array of such a group is wanted.

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
            f"{place}: a checkpoint of another model or optimizer: {text}; "
            "try the config that wrote it, or another --workdir"
        )
