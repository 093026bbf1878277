"""What a published layout is: which tensor is which part of which parameter.

A tensor belongs to one layer and holds matrices as (output, input); here a parameter stacks the
layers of one position of the pattern, matrices as (input, output). Nothing in this package touches
a file or a device: see training/weights.py.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from errors import UserError
from model.config import ModelConfig

Json = dict[str, Any]  # a config.json


class ConvertError(UserError):
    """One line: what the format or the model cannot express."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """theirs: our array of one layer -> theirs. ours: theirs and our shape -> our array."""

    theirs: Callable[[np.ndarray], np.ndarray]
    ours: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]


SAME = Layout(lambda x: x, lambda x, shape: x)
TRANSPOSED = Layout(lambda x: x.T, lambda x, shape: x.T)
TAPS = Layout(lambda x: x.T[:, None], lambda x, shape: x[:, 0].T)  # [W, D] <-> [D, 1, W]
FLAT = Layout(lambda x: x.reshape(-1), lambda x, shape: x.reshape(shape))

Names = Mapping[str, tuple[str, Layout]]  # our name -> theirs and the layout


@dataclasses.dataclass(frozen=True)
class Part:
    """A mixer or feed-forward layer: its prefix inside a layer, and the names of a model's."""

    prefix: str
    names: Callable[[ModelConfig], Names]


@dataclasses.dataclass(frozen=True)
class Format:
    """One published layout.

    Attributes:
        mixers, ffns: by our name of the layer. norms: of a layer. embedding: its tensor's name.
        zeros: tensors of a layer that we do not have, with their shape: written as zeros, and
            refused where they are anything else.
        ties: whether readers of the format share the embedding with the head; where not, the head
            is written as a copy, and read back as a head that is no longer tied.
        config, options: config.json of a model, and the model options of a config.json.
    """

    name: str
    mixers: Mapping[str, Part]
    ffns: Mapping[str, Part]
    norms: Names
    embedding: str
    zeros: Mapping[str, Callable[[ModelConfig], tuple[int, ...]]]
    ties: bool
    config: Callable[[ModelConfig], Json]
    options: Callable[[Json], Json]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a folder.

    Attributes:
        name: in the folder. path: of our parameter, as in checkpoints ("blocks/0/mixer/q").
        repeat: index of the parameter's leading axis, None outside layers.
        layout: how one becomes the other. float32: kept in float32 in every export.
    """

    name: str
    path: str
    repeat: int | None
    layout: Layout
    float32: bool = False


# These stay float32 in an export: logarithms of rates and biases lose too much in bfloat16.
_FLOAT32 = ("a_log", "dt_bias")


def tensors(fmt: Format, cfg: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of a model in this format, in the order of its layers.

    Raises:
        ConvertError: the format has no such layer.
    """
    vocabulary = _vocabulary(cfg.vocab_size, transposed=False)
    yield Tensor(fmt.embedding, "embedding", None, vocabulary)
    for layer, (position, repeat) in enumerate(cfg.places):
        path = f"blocks/{position}"
        for ours, (theirs, layout) in fmt.norms.items():
            yield Tensor(f"model.layers.{layer}.{theirs}", f"{path}/{ours}", repeat, layout)
        mixer = _part(fmt, fmt.mixers, cfg.mixers[position])
        ffn = _part(fmt, fmt.ffns, cfg.ffns[position])
        for kind, part in (("mixer", mixer), ("ffn", ffn)):
            for ours, (theirs, layout) in part.names(cfg).items():
                name, full = f"model.layers.{layer}.{part.prefix}.{theirs}", f"{path}/{kind}/{ours}"
                yield Tensor(name, full, repeat, layout, ours in _FLOAT32)
    yield Tensor("model.norm.weight", "final_norm", None, SAME)
    if not cfg.tie_embeddings:
        yield Tensor("lm_head.weight", "head", None, _vocabulary(cfg.vocab_size, transposed=True))
    elif not fmt.ties:
        yield Tensor("lm_head.weight", "embedding", None, vocabulary)


def zero_tensors(fmt: Format, cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of the format, by name, that this model has only as zeros, and their shapes."""
    return {
        f"model.layers.{layer}.{name}": shape(cfg)
        for layer in range(cfg.layers)
        for name, shape in fmt.zeros.items()
    }


def repeated(layers: Sequence[str]) -> tuple[list[str], int]:
    """The shortest pattern that gives these layers when repeated, and how often."""
    for length in range(1, len(layers) + 1):
        count, rest = divmod(len(layers), length)
        if not rest and list(layers[:length]) * count == list(layers):
            return list(layers[:length]), count
    raise ConvertError("it has no layers")


def needs(config: Json, **values: object) -> None:
    """Refuses a config.json in which a field is given and is not this value.

    Raises:
        ConvertError: naming the field.
    """
    for name, needed in values.items():
        if config.get(name, needed) not in (needed, None):
            raise ConvertError(f"config.json has {name}={config[name]!r}; only {needed!r} works")


def _part(fmt: Format, table: Mapping[str, Part], name: str) -> Part:
    if name not in table:
        raise ConvertError(
            f"format {fmt.name!r} has no layer like {name!r}; it has {', '.join(table)}"
        )
    return table[name]


def _vocabulary(size: int, *, transposed: bool) -> Layout:
    """The embedding or the head, without the padding of the vocabulary, which never counts."""

    def theirs(x: np.ndarray) -> np.ndarray:
        return (x.T if transposed else x)[:size]

    def ours(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        rows = shape[-1] if transposed else shape[0]
        x = np.pad(x, ((0, rows - size), (0, 0)))
        return x.T if transposed else x

    return Layout(theirs, ours)
