"""Options of XLA's TPU compiler that a training step is compiled with, by TPU generation.

The loop over layers gathers parameters and reduces gradients a repeat away from their use
(model/layer_loop.py). That saves waiting only where gathers and reduce-scatters run beside the
work. v6e and tpu7x give them to the SparseCores; on v6e only if told to, and one at a time unless
they may queue. Other generations have no such options: their collectives are synchronous.
"""

from jax.sharding import Mesh

_QUEUED = {
    "xla_tpu_enable_sparse_core_offload_queuing_in_lhs": "true",
    "xla_tpu_sparse_core_offload_queuing_overlap_limit": "64",
}
_OPTIONS = {
    "TPU v6 lite": {
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
        **_QUEUED,
    },
    "TPU7x": _QUEUED,
}


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """Options for `jax.jit` of a program on these devices; {} where there are none."""
    return _OPTIONS.get(mesh.devices.flat[0].device_kind, {})
