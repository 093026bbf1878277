"""What a run is made of before anything is compiled: mesh, loaders, model, optimizer."""

import dataclasses
import functools
import os
import time

import jax
import optax
import psutil
from ml_collections import ConfigDict

from data.loader import Loader, make_loader
from data.options import DataConfig
from errors import UserError
from model.checks import check_mesh
from model.config import ModelConfig
from model.mixers.registry import reads_positions
from model.params import param_count
from options import wrong
from training import devices
from training.goodput import Goodput
from training.optimizer import make_optimizer, make_schedule, options_of
from training.report import Progress
from training.state import TrainState, state_shapes


@dataclasses.dataclass(frozen=True)
class Parts:
    """Everything that the options determine; `shapes` is a state of jax.ShapeDtypeStruct."""

    config: ConfigDict
    workdir: str
    mesh: jax.sharding.Mesh
    model: ModelConfig
    loader: Loader
    validation: Loader
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    shapes: TrainState
    goodput: Goodput
    progress: Progress


def build(config: ConfigDict, workdir: str) -> Parts:
    """Raises UserError: one line, naming an option that cannot work with these data or devices."""
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
    options = options_of(config.optimizer, train.steps)
    optimizer = make_optimizer(options, model, mesh)
    shapes = state_shapes(model, mesh, optimizer, data.global_batch_size, train.spike_window)
    schedule = make_schedule(options)
    return Parts(
        config,
        workdir,
        mesh,
        model,
        loader,
        validation,
        optimizer,
        schedule,
        shapes,
        goodput,
        Progress(),
    )


def model_config(config: ConfigDict, vocab_size: int) -> ModelConfig:
    """config.model as the frozen record that the model takes."""
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
    """What is trained on what, in one line."""
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
