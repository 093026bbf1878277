"""train.py --eval_only: the loss of saved parameters on any data, without a training step."""

import json
import os

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from checkpoints.manager import CheckpointError
from data.loader import Loader, make_loader
from data.options import DataConfig
from model.checks import check_mesh
from model.config import ModelConfig
from model.mixers.registry import reads_positions
from model.params import param_shardings
from training import devices
from training.build import model_config
from training.evaluate import Evaluator
from training.goodput import Goodput
from training.restore import Log, check_same_parameters, checkpoint_folder, load_params
from training.weights import is_folder_of_weights, read_folder


def evaluate(config: ConfigDict, workdir: str, source: str, log: Log) -> dict[str, float]:
    """eval/loss (nats per token) and eval/bits_per_byte over config.eval.batches of the validation
    data; the run itself is only read.

    Args:
        workdir: of the run whose newest checkpoint is evaluated. source: instead of it, another
            run's workdir, a folder of checkpoints, or a Hugging Face folder (--init_from).
            The model's structure comes from there; how it is computed, the row length, the carry
            and attention's memory come from the config.

    Raises:
        UserError: there are no such parameters, or they belong to another model.
    """
    mesh = devices.make_mesh(config.mesh)
    loader = make_loader(
        DataConfig(**config.data),
        split="eval",
        mesh=mesh,
        seed=config.train.seed,
        max_batches=config.eval.batches,
        positions=reads_positions(config.model),
    )
    try:
        model = model_config(config, loader.tokenizer.vocab_size)
        check_mesh(model, mesh.shape)
        folder = source or checkpoint_folder(config.checkpoint.directory, workdir)
        params = _load(folder, config, model, mesh, loader, log)
        evaluator = Evaluator(
            model,
            mesh,
            loader,
            config.data.global_batch_size,
            Goodput(),
            reads_bytes=config.data.tokenizer == "bytes",
        )
        values = evaluator(params, lambda: None)
    finally:
        loader.close()
    log(
        f"loss {values['eval/loss']:.4f}  bits/byte {values['eval/bits_per_byte']:.4f}  "
        f"accuracy {values['eval/accuracy']:.4f}"
    )
    if evaluator.gzip:
        bits, size = evaluator.gzip
        log(f"gzip -9 on the same {size:,} bytes: {bits:.4f} bits/byte")
    return values


def write_json(path: str, values: dict[str, float]) -> None:
    """Writes the results atomically."""
    if not path or jax.process_index():
        return
    part = f"{path}.part"
    with open(part, "w", encoding="utf-8") as file:
        json.dump(values, file, indent=2)
        file.write("\n")
    os.replace(part, path)


def _load(
    folder: str, config: ConfigDict, model: ModelConfig, mesh: Mesh, loader: Loader, log: Log
) -> object:
    if is_folder_of_weights(folder):
        params, theirs = read_folder(folder, mesh, like=model)
        log(f"parameters from {folder}")
    else:
        loaded = load_params(folder, mesh, log, damaged=config.checkpoint.damaged)
        params, theirs = loaded.params, loaded.model
        saved = loaded.metadata["data"]["data"]["tokenizer"]
        if saved != loader.tokenizer.fingerprint:
            raise CheckpointError(
                f"{folder}: trained with another tokenizer; try the config.data.tokenizer that it "
                "was trained with"
            )
        log(f"parameters from step {loaded.step} of {loaded.directory}")
    check_same_parameters(folder, theirs, model)
    return jax.device_put(params, param_shardings(model, mesh))
