"""Refuses a model that does not exist, or that does not fit its mesh, before anything compiles."""

from collections.abc import Mapping

from model.axes import FSDP, TENSOR, MeshNeed
from model.config import ModelConfig, divisors_text
from model.ffn.registry import feed_forwards_of
from model.mixers.registry import mixers_of
from options import wrong


def check_mesh(cfg: ModelConfig, mesh_shape: Mapping[str, int]) -> None:
    """Checks the names of the layers, and that mesh axes divide what they cut.

    Args:
        mesh_shape: ranks of each mesh axis, e.g. `mesh.shape`.

    Raises:
        OptionError: naming config.mesh.X, the size that it must divide, and values that do.
    """
    needs = [MeshNeed(FSDP, "d_model", cfg.d_model)]
    needs += [need for ffn in feed_forwards_of(cfg) for need in ffn.mesh_needs(cfg)]
    needs += [need for mixer in mixers_of(cfg) for need in mixer.mesh_needs(cfg)]
    needs.append(MeshNeed(TENSOR, "vocab_size (padded)", cfg.padded_vocab_size))
    for axis, name, size in needs:
        ranks = mesh_shape[axis]
        if size % ranks:
            needed = f"a divisor of config.model.{name} ({size})"
            raise wrong(f"config.mesh.{axis}", ranks, needed, divisors_text(size))
