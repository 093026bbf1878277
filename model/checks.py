"""Refuses a model with unknown layers, or one that does not fit its mesh, before compilation."""

from collections.abc import Mapping

from jax.sharding import Mesh

from model.axes import FSDP, TENSOR, MeshNeed
from model.config import ModelConfig, divisors_text
from model.ffn.registry import feed_forwards_of
from model.mixers.registry import mixers_of
from options import wrong

HOST_MEMORY = "pinned_host"  # JAX's name for it


def check_mesh(cfg: ModelConfig, mesh_shape: Mapping[str, int]) -> None:
    """Checks the names of the layers, and that mesh axes divide the sizes that they split.

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


def check_host_memory(cfg: ModelConfig, mesh: Mesh) -> None:
    """Refuses to offload activations to host memory that the devices cannot address.

    Raises:
        OptionError: naming config.model.remat.
    """
    device = mesh.devices.flat[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if cfg.remat == "offload" and HOST_MEMORY not in kinds:
        needed = f"devices that address their host's memory ({HOST_MEMORY}); {device.device_kind}"
        has = ", ".join(sorted(kinds)) or "none"
        raise wrong("config.model.remat", cfg.remat, f"{needed} has {has}", "full")
