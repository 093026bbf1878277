"""Builds the parts of a run, before anything is compiled: mesh, loaders, model, optimizer."""

import dataclasses
import functools
import os
import time

import jax
import psutil
from ml_collections import ConfigDict

from data.loader import Loader, make_loader
from data.options import DataConfig
from errors import UserError
from model.checks import check_host_memory, check_mesh
from model.config import ModelConfig
from model.mixers.registry import reads_positions
from model.params import param_count
from options import wrong
from training import devices
from training.goodput import Goodput
from training.optimizer import MakeOptimizer, make_optimizer, options_of
from training.report import Progress
from training.state import TrainState, state_shapes
from training.tunables import Tunables, tunables_of


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a run; `shapes` is a state of jax.ShapeDtypeStruct, and `tunables` are numbers
    on the host."""

    config: ConfigDict
    workdir: str
    mesh: jax.sharding.Mesh
    model: ModelConfig
    loader: Loader
    validation: Loader
    make_optimizer: MakeOptimizer
    tunables: Tunables
    shapes: TrainState
    goodput: Goodput
    progress: Progress


def build(config: ConfigDict, workdir: str) -> Parts:
    """Builds all parts. Raises UserError if an option cannot work with these data or devices."""
    goodput = _goodput(workdir)
    mesh = devices.make_mesh(config.mesh)
    data, train = DataConfig(**config.data), config.train
    load = functools.partial(
        make_loader,
        data,
        mesh=mesh,
        seed=train.seed,
        positions=reads_positions(config.model),
    )
    loader = load(split="train", windows=train.tbptt_windows)
    validation = load(split="eval", max_batches=config.eval.batches)
    model = model_config(config, loader.tokenizer.vocab_size)
    check_mesh(model, mesh.shape)
    check_host_memory(model, mesh)
    options = options_of(config.optimizer, train.steps)
    tunables = tunables_of(options, train.z_loss)
    make = functools.partial(make_optimizer, options, model, mesh)
    rows = data.global_batch_size
    shapes = state_shapes(model, mesh, make(tunables), rows, train.spike_window)
    return Parts(
        config,
        workdir,
        mesh,
        model,
        loader,
        validation,
        make,
        tunables,
        shapes,
        goodput,
        Progress(),
    )


def model_config(config: ConfigDict, vocab_size: int) -> ModelConfig:
    """config.model as the frozen record that the model uses."""
    options = dict(config.model)
    given = options.pop("vocab_size")
    if given and given < vocab_size:
        needs = f"0 or at least the tokenizer's {vocab_size} ids"
        raise wrong("config.model.vocab_size", given, needs, 0)
    if options["kda_implementation"] == "mosaic_tpu" and jax.default_backend() != "tpu":
        raise UserError(
            "config.model.kda_implementation='mosaic_tpu': needs a TPU; there is "
            f"{jax.devices()[0].device_kind}; try auto"
        )
    return ModelConfig(vocab_size=given or vocab_size, **options)


def describe(parts: Parts) -> str:
    """The model, devices and batch in one line."""
    data, mesh = parts.config.data, parts.mesh.shape
    return (
        f"{param_count(parts.model):,} parameters on {jax.device_count()} x "
        f"{jax.devices()[0].device_kind} ({', '.join(f'{k} {n}' for k, n in mesh.items())}); "
        f"a step takes {data.global_batch_size} rows x {data.sequence_length} tokens"
        + (f" x {n} windows" if (n := parts.config.train.tbptt_windows) > 1 else "")
    )


def _goodput(workdir: str) -> Goodput:
    age = time.time() - psutil.Process().create_time()
    path = os.path.join(workdir, "goodput.json") if jax.process_index() == 0 else ""
    return Goodput(path, age)
