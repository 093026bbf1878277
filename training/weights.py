"""Parameters to and from Hugging Face folders: config.json and safetensors files.

model/convert/ describes the names and layouts, checkpoints/safetensors_io.py reads and writes the
files. Tensors are converted one at a time, so host memory holds one tensor (writing), or a device's
part of one parameter (reading).
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from checkpoints.safetensors_io import Reader, Spec, WeightsError, Writer
from model.axes import Arrays
from model.checks import check_mesh
from model.config import ModelConfig
from model.convert.formats import ConvertError, Format, Tensor, tensors, zero_tensors
from model.convert.registry import read_config
from model.params import param_shardings, param_specs
from training.state import flatten, unflatten

FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The begin and end ids of a document, for generation_config.json."""

    bos_id: int
    eos_id: int


def write_folder(
    folder: str,
    read: Callable[[str], jax.Array],
    cfg: ModelConfig,
    fmt: Format,
    special: SpecialTokens,
    dtype: np.dtype = FLOAT32,
) -> int:
    """Writes config.json, generation_config.json and the weights. Returns the number of tensors.

    Args:
        read: returns a parameter by its path ("blocks/0/mixer/q"), float32, on any mesh of this
            process. It is called once per parameter, after the previous one has been released.
        dtype: float32 or bfloat16; tensors that the format keeps in float32 stay float32.

    Raises:
        ConvertError: the format cannot express this model.
    """
    config = fmt.config(cfg)
    shapes: dict[str, tuple[int, ...]] = {n: s.shape for n, s in flatten(param_specs(cfg)).items()}
    by_path = _by_path(tensors(fmt, cfg))
    table = [tensor for tensors in by_path.values() for tensor in tensors]
    zeros = zero_tensors(fmt, cfg)
    specs = [
        Spec(t.name, _their_shape(t, shapes[t.path]), FLOAT32 if t.float32 else dtype)
        for t in table
    ]
    specs += [Spec(name, shape, FLOAT32) for name, shape in zeros.items()]
    with Writer(folder, specs) as writer:
        for path, parts in by_path.items():
            _write_parts(writer, np.asarray(read(path)), parts)
        for name, shape in zeros.items():
            writer.add(name, np.zeros(shape, np.float32))
    ids = dataclasses.asdict(special)
    tokens = {name.replace("_id", "_token_id"): value for name, value in ids.items()}
    _write_json(folder, "generation_config.json", tokens)
    # transformers' default padding id may be outside a small vocabulary.
    padding = {"pad_token_id": special.eos_id}
    _write_json(folder, "config.json", config | tokens | padding | {"dtype": dtype.name})
    return len(specs)


def read_folder(
    folder: str,
    mesh: Mesh,
    options: Mapping[str, object] | None = None,
    like: ModelConfig | None = None,
) -> tuple[Arrays, ModelConfig]:
    """The parameters of a folder, float32 and placed on the mesh, and their model.

    Args:
        options: of `ModelConfig`, which override config.json or add to it.
        like: its division of layers into prefix, pattern and suffix is used if the folder's model
            has the same layers; otherwise the one with the fewest positions.

    Raises:
        WeightsError: files are missing or damaged, or tensors are missing, unknown or have the
            wrong shape.
        ConvertError: config.json describes an unsupported model.
    """
    fmt, cfg = _read_config(folder, options or {})
    if like is not None and like.layer_names == cfg.layer_names:
        names = ("prefix", "pattern", "suffix", "num_repeats", "ffn")
        cfg = dataclasses.replace(cfg, **{name: getattr(like, name) for name in names})
    check_mesh(cfg, mesh.shape)
    reader = Reader(folder)
    table = list(tensors(fmt, cfg))
    specs = flatten(param_specs(cfg))
    _check(reader, table, {name: spec.shape for name, spec in specs.items()})
    _check_zeros(reader, zero_tensors(fmt, cfg), {t.name for t in table})
    by_path = {
        path: {tensor.index: tensor for tensor in parts} for path, parts in _by_path(table).items()
    }
    arrays = {
        path: jax.make_array_from_callback(
            specs[path].shape, sharding, _Parts(reader, by_path[path], specs[path].shape)
        )
        for path, sharding in flatten(param_shardings(cfg, mesh)).items()
    }
    return unflatten(param_specs(cfg), arrays), cfg


def _by_path(table: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Tensors by the parameter that they are part of."""
    found: dict[str, list[Tensor]] = {}
    for tensor in table:
        found.setdefault(tensor.path, []).append(tensor)
    return found


def _write_parts(writer: Writer, array: np.ndarray, parts: Sequence[Tensor]) -> None:
    """Writes all tensors that one parameter holds."""
    for tensor in parts:
        writer.add(tensor.name, tensor.layout.theirs(array[tensor.index]))


def is_folder_of_weights(folder: str) -> bool:
    """Whether a folder holds Hugging Face weights rather than a run."""
    return os.path.isfile(os.path.join(folder, "config.json"))


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Callback of `jax.make_array_from_callback`: reads one device's part of a parameter."""

    reader: Reader
    by_index: dict[tuple[int, ...], Tensor]
    shape: tuple[int, ...]

    def __call__(self, index: tuple[slice, ...] | None) -> np.ndarray:
        return self._read((), index or tuple(slice(None) for _ in self.shape))

    def _read(self, leading: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
        """What `index` selects after the leading axes."""
        if (tensor := self.by_index.get(leading)) is not None:
            array = self.reader.read(tensor.name).astype(np.float32)
            return tensor.layout.ours(array, self.shape[len(leading) :])[index]
        numbers = range(*index[0].indices(self.shape[len(leading)]))
        return np.stack([self._read((*leading, number), index[1:]) for number in numbers])


def _read_config(folder: str, options: Mapping[str, object]) -> tuple[Format, ModelConfig]:
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: cannot be read ({error}); try another folder") from None
    if not isinstance(config, dict):
        raise WeightsError(f"{path}: is not a JSON object; try downloading it again")
    try:
        return read_config(config, **options)
    except ConvertError as error:
        raise ConvertError(f"{path}: {error}") from None


def _their_shape(tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    shape = shape[len(tensor.index) :]
    # A broadcast zero has the shape but takes no memory.
    return tensor.layout.theirs(np.broadcast_to(np.float32(0), shape)).shape


def _check(reader: Reader, table: list[Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    for tensor in table:
        entry = reader.entries.get(tensor.name)
        if entry is None:
            raise WeightsError(
                f"{reader.folder}: has no tensor {tensor.name}; config.json needs it"
            )
        needed = _their_shape(tensor, shapes[tensor.path])
        if entry.shape != needed:
            raise WeightsError(
                f"{reader.folder}: {tensor.name} has shape {list(entry.shape)}; config.json needs "
                f"{list(needed)}"
            )


def _check_zeros(reader: Reader, zeros: dict[str, tuple[int, ...]], known: set[str]) -> None:
    """Refuses tensors that this model cannot use."""
    for name in reader.entries:
        if name in known:
            continue
        if name not in zeros:
            raise WeightsError(f"{reader.folder}: has a tensor {name}, which this model lacks")
        if np.any(reader.read(name)):
            raise WeightsError(f"{reader.folder}: {name} is not zero; this model lacks it")


def _write_json(folder: str, name: str, content: dict) -> None:
    part = os.path.join(folder, name + ".part")
    with open(part, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
    os.replace(part, os.path.join(folder, name))
