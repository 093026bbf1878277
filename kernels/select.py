"""Chooses the implementation for the device; the only module that queries the device."""

import jax

IMPLEMENTATIONS = ("mosaic_tpu", "chunked", "recurrent")


def choose(implementation: str | None, like: jax.Array | None = None) -> str:
    """The implementation to run: the named one, or for None "mosaic_tpu" on TPU and "chunked"
    elsewhere.

    The device is that of the mesh in context (inside `jax.shard_map` or `jax.set_mesh`), else of
    the mesh over which `like` (an operand) is sharded, else JAX's default device. A mesh gives the
    right answer even when compiling for an absent TPU.

    Raises:
        ValueError: for an unknown name.
    """
    if implementation is None:
        return "mosaic_tpu" if platform(like) == "tpu" else "chunked"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"kda: implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}"
        )
    return implementation


def platform(like: jax.Array | None) -> str:
    meshes = [jax.sharding.get_abstract_mesh()]
    if like is not None:
        meshes.append(jax.typeof(like).sharding.mesh)
    for mesh in meshes:
        if mesh.abstract_device is not None:
            return mesh.abstract_device.platform
    return jax.default_backend()
