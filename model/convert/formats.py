"""Descriptions of published layouts: which tensor is which part of which parameter.

A tensor belongs to one layer and stores matrices as (output, input). A parameter here stacks the
layers of one position of the pattern and stores matrices as (input, output). Nothing in this
package touches a file or a device: see training/weights.py.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from errors import UserError
from model.config import ModelConfig

Json = dict[str, Any]  # a config.json
Layer = tuple[str, str]  # names of a layer's mixer and feed-forward layer


class ConvertError(UserError):
    """One line: what the format or the model cannot express."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """theirs: converts our array of one layer to theirs. ours: converts theirs to our shape."""

    theirs: Callable[[np.ndarray], np.ndarray]
    ours: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]


SAME = Layout(lambda x: x, lambda x, shape: x)
TRANSPOSED = Layout(lambda x: x.T, lambda x, shape: x.T)
TAPS = Layout(lambda x: x.T[:, None], lambda x, shape: x[:, 0].T)  # [W, D] <-> [D, 1, W]
FLAT = Layout(lambda x: x.reshape(-1), lambda x, shape: x.reshape(shape))

Names = Mapping[str, tuple[str, Layout]]  # our name -> theirs and the layout


@dataclasses.dataclass(frozen=True)
class Part:
    """A mixer or feed-forward layer: its prefix inside a layer, and its names for a model.

    of_expert: names of an expert's tensors, in which "{expert}" is its number.
    """

    prefix: str
    names: Callable[[ModelConfig], Names]
    of_expert: Names = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Format:
    """One published layout.

    Attributes:
        mixers, ffns: by our name of the layer. norms: of a layer. embedding: its tensor's name.
        zeros: tensors of a layer that the model here lacks, with their shapes: written as zeros,
            and refused if they are not zero.
        ties: whether readers of the format can share the embedding with the head. If not, the head
            is written as a copy, and read back as an untied head.
        config, options: convert a model to config.json, and config.json to model options.
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
        index: of the parameter's leading axes: (repeat,), (repeat, expert), or () outside layers.
        layout: converts between the two. float32: exported as float32 always.
    """

    name: str
    path: str
    index: tuple[int, ...]
    layout: Layout
    float32: bool = False


# These stay float32 in an export: logarithms of rates and biases lose too much in bfloat16.
_FLOAT32 = ("a_log", "dt_bias", "router_bias")


def tensors(fmt: Format, cfg: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of a model in this format, in the order of its layers.

    Raises:
        ConvertError: the format has no such layer.
    """
    vocabulary = _vocabulary(cfg.vocab_size, transposed=False)
    yield Tensor(fmt.embedding, "embedding", (), vocabulary)
    for layer, (position, repeat) in enumerate(cfg.places):
        path = f"blocks/{position}"
        for ours, (theirs, layout) in fmt.norms.items():
            yield Tensor(f"model.layers.{layer}.{theirs}", f"{path}/{ours}", (repeat,), layout)
        mixer = _part(fmt, fmt.mixers, cfg.mixers[position])
        ffn = _part(fmt, fmt.ffns, cfg.ffns[position])
        for kind, part in (("mixer", mixer), ("ffn", ffn)):
            prefix = f"model.layers.{layer}.{part.prefix}"
            for ours, (theirs, layout) in part.names(cfg).items():
                full = f"{path}/{kind}/{ours}"
                yield Tensor(f"{prefix}.{theirs}", full, (repeat,), layout, ours in _FLOAT32)
            for ours, (theirs, layout) in part.of_expert.items():
                for expert in range(cfg.num_experts):
                    name = f"{prefix}.{theirs.format(expert=expert)}"
                    yield Tensor(name, f"{path}/{kind}/{ours}", (repeat, expert), layout)
    yield Tensor("model.norm.weight", "final_norm", (), SAME)
    if not cfg.tie_embeddings:
        yield Tensor("lm_head.weight", "head", (), _vocabulary(cfg.vocab_size, transposed=True))
    elif not fmt.ties:
        yield Tensor("lm_head.weight", "embedding", (), vocabulary)


def zero_tensors(fmt: Format, cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of the format that this model lacks and writes as zeros: name -> shape."""
    return {
        f"model.layers.{layer}.{name}": shape(cfg)
        for layer in range(cfg.layers)
        for name, shape in fmt.zeros.items()
    }


class Repeats(NamedTuple):
    """Layers as a prefix, a repeated pattern, and a suffix."""

    prefix: Sequence[Layer]
    pattern: Sequence[Layer]
    repeats: int
    suffix: Sequence[Layer]

    @property
    def options(self) -> Json:
        """As options of `ModelConfig`."""
        parts = {"prefix": self.prefix, "pattern": self.pattern, "suffix": self.suffix}
        names = {name: ",".join(mixer for mixer, _ in part) for name, part in parts.items()}
        ffns = [ffn for part in parts.values() for _, ffn in part]
        ffn = ffns[0] if len(set(ffns)) == 1 else ",".join(ffns)
        return names | {"num_repeats": self.repeats, "ffn": ffn}


def repeated(layers: Sequence[Layer]) -> Repeats:
    """The shortest form that gives these layers; without prefix and suffix if there are several."""
    if not layers:
        raise ConvertError("it has no layers")

    def ways() -> Iterator[Repeats]:
        for length in range(1, len(layers) + 1):
            for begin in range(len(layers) - length + 1):
                pattern, end = layers[begin : begin + length], begin + length
                while layers[end : end + length] == pattern:
                    end += length
                yield Repeats(layers[:begin], pattern, (end - begin) // length, layers[end:])

    def cost(way: Repeats) -> tuple[int, int]:
        around = len(way.prefix) + len(way.suffix)
        return around + len(way.pattern), around

    return min(ways(), key=cost)


def needs(config: Json, **values: object) -> None:
    """Refuses a config.json in which a field is present with another value.

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
    """The embedding or the head, without the padding of the vocabulary, which is unused."""

    def theirs(x: np.ndarray) -> np.ndarray:
        return (x.T if transposed else x)[:size]

    def ours(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        rows = shape[-1] if transposed else shape[0]
        x = np.pad(x, ((0, rows - size), (0, 0)))
        return x.T if transposed else x

    return Layout(theirs, ours)
