"""Every option, collected from the records that declare them.

A config is a file whose get_config() starts from the one here and overrides some options. Any
option can be set from the command line: --config.train.steps=20. All of them are listed in
docs/configuration.md and by `python train.py --help`.
"""

import dataclasses
from collections.abc import Iterator

from ml_collections import ConfigDict

from data.options import DataConfig
from model.config import ModelConfig
from options import Option, declared
from training.options import (
    CheckpointOptions,
    EvalOptions,
    LogOptions,
    MeshOptions,
    OptimizerOptions,
    ProfileOptions,
    TrainOptions,
)

RECORDS: dict[str, type] = {
    "train": TrainOptions,
    "mesh": MeshOptions,
    "data": DataConfig,
    "model": ModelConfig,
    "optimizer": OptimizerOptions,
    "eval": EvalOptions,
    "checkpoint": CheckpointOptions,
    "log": LogOptions,
    "profile": ProfileOptions,
}


def get_config() -> ConfigDict:
    """All options with their defaults, locked."""
    groups = {
        group: {field.name: field.default for field, _ in declared(record)}
        for group, record in RECORDS.items()
    }
    return ConfigDict(groups).lock()


def all_options() -> Iterator[tuple[str, dataclasses.Field, Option]]:
    """(dotted name, field, metadata) of every option."""
    for group, record in RECORDS.items():
        for field, metadata in declared(record):
            yield f"{group}.{field.name}", field, metadata
