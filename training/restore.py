"""Where the first state comes from: the newest checkpoint, --init_from, or the seed.

`load_params` reads the parameters of any run alone: no data, no optimizer.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from checkpoints.manager import CheckpointError, Manager
from checkpoints.retention import Retention
from configs import base
from errors import UserError
from model.checks import check_mesh
from model.config import ModelConfig
from model.params import init_params, param_shardings, param_specs
from training import goodput, process, resume
from training.build import Parts, model_config
from training.lock import owner
from training.state import TrainState, empty_carry, flatten, init_state, unflatten
from training.weights import is_folder_of_weights, read_folder

Log = Callable[[str], None]
Arrays = dict[str, jax.Array]
Metadata = dict[str, Any]  # JSON, saved with each checkpoint: see `metadata`


@dataclasses.dataclass(frozen=True)
class LoadedParams:
    """Parameters of a checkpoint on a mesh, with their model and metadata."""

    params: Any
    model: ModelConfig
    metadata: Metadata
    step: int
    directory: str


def metadata(parts: Parts) -> Metadata:
    """The metadata saved with a checkpoint's arrays; all processes call this together."""
    return {
        "config": parts.config.to_dict(),
        "vocab_size": parts.model.vocab_size,
        "data": parts.loader.state(),
        "goodput": parts.goodput.seconds(),
        "tokens_seen": parts.progress.tokens_seen,
    }


def saved_config(metadata: Metadata) -> ConfigDict:
    """The config that a checkpoint was trained with."""
    return ConfigDict(metadata["config"])


def checkpoint_folder(directory: str, workdir: str) -> str:
    """An absolute path, or, unchanged, one with a scheme such as gs://."""
    folder = directory or os.path.join(workdir, "checkpoints")
    return folder if "://" in folder else os.path.abspath(folder)


def open_checkpoints(parts: Parts, log: Log) -> Manager:
    """The manager of this run's checkpoints."""
    options = parts.config.checkpoint
    retention = Retention(options.keep_last, options.keep_every, options.keep_best)
    return Manager(
        checkpoint_folder(options.directory, parts.workdir),
        retention,
        log,
        verify=options.verify,
        owner=owner(parts.workdir) if jax.process_index() == 0 else "",
        on_whole=process.note_saved,
    )


def first_state(parts: Parts, manager: Manager, init_from: str, log: Log) -> tuple[TrainState, int]:
    """(state, steps done)."""
    restored = manager.restore_latest(
        lambda metadata: _resume_target(parts, metadata, log), parts.config.checkpoint.damaged
    )
    if restored is not None:
        manager.move_broken(restored.step)
        lived = goodput.read(os.path.join(parts.workdir, "goodput.json"))
        parts.goodput.resume(restored.metadata["goodput"], lived)
        parts.progress.tokens_seen = restored.metadata["tokens_seen"]
        log(f"resumed from step {restored.step} of {manager.directory}")
        saved = restored.metadata["config"]
        if jump := resume.rate_jump(saved, parts.config.to_dict(), restored.step):
            log(jump)
        return unflatten(parts.shapes, _with_carry(parts, restored.arrays)), restored.step
    state = _seeded_state(parts)
    if init_from:
        state = unflatten(state, flatten(state) | _other_params(parts, init_from, log))
    return state, 0


def load_params(
    folder: str, mesh: Mesh, log: Log = print, *, damaged: str = "stop"
) -> LoadedParams:
    """The parameters of a run's newest whole checkpoint.

    Args:
        folder: workdir of a run, or the folder of its checkpoints, local or gs://bucket/path.
        mesh: where the parameters are placed. damaged: as config.checkpoint.damaged.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        UserError: the model does not fit the mesh.
    """
    models: list[ModelConfig] = []

    def target(metadata: Metadata) -> dict[str, jax.ShapeDtypeStruct]:
        model = model_config(saved_config(metadata), metadata["vocab_size"])
        check_mesh(model, mesh.shape)
        models.append(model)
        return flatten({"params": _param_shapes(model, mesh)})

    manager = _reader(folder, log)
    restored = manager.restore_latest(target, damaged)
    if restored is None:
        raise CheckpointError(f"{folder}: there is no checkpoint in {manager.directory}")
    params = unflatten({"params": _param_shapes(models[-1], mesh)}, restored.arrays)["params"]
    return LoadedParams(
        params, models[-1], restored.metadata, restored.step, str(manager.directory)
    )


@dataclasses.dataclass(frozen=True)
class StoredParams:
    """Parameters of a run's newest whole checkpoint, which are read one at a time."""

    model: ModelConfig
    metadata: Metadata
    step: int
    directory: str
    manager: Manager
    shapes: dict[str, jax.ShapeDtypeStruct]

    def read(self, path: str) -> jax.Array:
        """The parameter of this path ("blocks/0/mixer/q").

        Raises:
            CheckpointError: it cannot be read.
        """
        name = f"params/{path}"
        restored = self.manager.restore(self.step, lambda metadata: self.shapes, (name,))
        return restored.arrays[name]


def stored_params(folder: str, mesh: Mesh, log: Log = print) -> StoredParams:
    """Like `load_params`, but reads only the smallest parameter."""
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    models: list[ModelConfig] = []

    def target(metadata: Metadata) -> dict[str, jax.ShapeDtypeStruct]:
        model = model_config(saved_config(metadata), metadata["vocab_size"])
        models.append(model)
        shapes.update(flatten({"params": _param_shapes(model, mesh)}))
        return shapes

    manager = _reader(folder, log)
    found = manager.restore_latest(target, "stop", ("params/final_norm",))
    if found is None:
        raise CheckpointError(f"{folder}: there is no checkpoint in {manager.directory}")
    directory = str(manager.directory)
    return StoredParams(models[-1], found.metadata, found.step, directory, manager, shapes)


def _param_shapes(model: ModelConfig, mesh: Mesh) -> Any:
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        param_shardings(model, mesh),
    )


def _reader(folder: str, log: Log) -> Manager:
    """Opens the checkpoints of another run, which may still be training."""
    inner = checkpoint_folder("", folder)
    return Manager(inner if os.path.isdir(inner) else checkpoint_folder(folder, ""), None, log)


def _seeded_state(parts: Parts) -> TrainState:
    train, data = parts.config.train, parts.config.data
    return init_state(
        parts.model,
        parts.mesh,
        parts.make_optimizer(parts.tunables),
        data.global_batch_size,
        train.spike_window,
        train.seed,
    )


def _resume_target(parts: Parts, metadata: Metadata, log: Log) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays to restore. Moves the loader to the checkpoint's position.

    Raises:
        CheckpointError: of another model; or of other data, with
            config.data.on_data_change="refuse".
    """
    found = _differences(metadata, parts)
    advice = "try the config that wrote it, or another --workdir"
    if found.model:
        raise CheckpointError(f"the checkpoint is of another model: {found.model[0]}; {advice}")
    if found.state:
        folder = checkpoint_folder(parts.config.checkpoint.directory, parts.workdir)
        raise CheckpointError(
            f"the checkpoint's state is of another kind: {found.state[0]}; {advice}, with "
            f"--init_from={folder} to start from its parameters"
        )
    if found.other:
        log("changed since the checkpoint: " + "; ".join(found.other))
    wanted = flatten(parts.shapes)
    try:
        changed = parts.loader.restore(metadata["data"])
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if not changed:
        return wanted
    log(f"{changed}; the carried state starts empty")
    return {name: array for name, array in wanted.items() if not name.startswith("carry/")}


def _differences(metadata: Metadata, parts: Parts) -> resume.Differences:
    meanings = {name: option.on_resume for name, _, option in base.all_options()}
    saved = resume.with_defaults(metadata["config"], base.get_config().to_dict())
    return resume.differences(saved, parts.config.to_dict(), meanings)


def check_same_parameters(folder: str, theirs: ModelConfig, ours: ModelConfig) -> None:
    """Refuses parameters that this run's model would read as something else.

    Raises:
        UserError: naming the first option or parameter that differs.
    """
    for name in _options_without_shapes(ours):
        saved, here = getattr(theirs, name), getattr(ours, name)
        if saved != here:
            raise UserError(
                f"{folder}: config.model.{name} is {saved!r} there and {here!r} here; "
                f"try --config.model.{name}={saved}"
            )
    saved_shapes = {name: spec.shape for name, spec in flatten(param_specs(theirs)).items()}
    shapes = {name: spec.shape for name, spec in flatten(param_specs(ours)).items()}
    for name in {**shapes, **saved_shapes}:
        if saved_shapes.get(name) != shapes.get(name):
            raise UserError(
                f"{folder}: parameter {name} is {saved_shapes.get(name)} there and "
                f"{shapes.get(name)} here; try the config that it was trained with"
            )


def _options_without_shapes(cfg: ModelConfig) -> list[str]:
    """Options of a model's layers that change its function and no parameter's shape."""
    names = ["pattern", "norm_eps", "decay_gate"]
    if "kda" in cfg.mixers:
        names.append("negative_eigenvalues")
    if "mla" in cfg.mixers:
        names.append("mla_rotation_base")
    if "experts" in cfg.ffns:
        names += ["experts_per_token", "router_scale"]
    return names


def _with_carry(parts: Parts, arrays: Arrays) -> Arrays:
    """The arrays, with an empty carry where none was restored."""
    if flatten(parts.shapes).keys() == arrays.keys():
        return arrays
    carry = empty_carry(parts.model, parts.mesh, parts.config.data.global_batch_size)()
    return {**arrays, **flatten({"carry": carry})}


def _other_params(parts: Parts, folder: str, log: Log) -> Arrays:
    """The parameters of --init_from, which must be of this run's model and tokenizer."""
    if is_folder_of_weights(folder):
        params, theirs = read_folder(folder, parts.mesh, like=parts.model)
        check_same_parameters(f"--init_from={folder}", theirs, parts.model)
        log(f"parameters from {folder}")
        return flatten({"params": params})

    def target(metadata: Metadata) -> dict[str, jax.ShapeDtypeStruct]:
        found = _differences(metadata, parts)
        if found.model:
            raise CheckpointError(f"another model, {found.model[0]}")
        if metadata["data"]["data"]["tokenizer"] != parts.loader.tokenizer.fingerprint:
            raise CheckpointError(
                "its tokens mean something else: config.data.tokenizer was "
                f"{metadata['config']['data']['tokenizer']!r} there"
            )
        return {n: a for n, a in flatten(parts.shapes).items() if n.startswith("params/")}

    try:
        manager = _reader(folder, log)
        restored = manager.restore_latest(target, parts.config.checkpoint.damaged)
    except CheckpointError as error:
        raise CheckpointError(f"--init_from={folder}: {error}") from None
    if restored is None:
        raise CheckpointError(
            f"--init_from={folder}: there is no checkpoint in {manager.directory}"
        )
    log(f"parameters from step {restored.step} of {manager.directory}")
    return restored.arrays
