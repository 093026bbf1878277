"""Options of XLA's TPU compiler for compiling a training step, by TPU generation.

The loop over layers starts gathers and reduce-scatters a repeat before their results are needed
(model/layer_loop.py), which avoids waiting only if they run concurrently with other work. v6e and
tpu7x run them on the SparseCores: v6e only with these options, and both one at a time unless they
may queue. Other generations have no such options, and their collectives are synchronous. Without
these options the step of 1.08B parameters on v6e:2x2 (context 4, 8,192 tokens) peaks at 4.91 GB,
with them at 5.29 GB (libtpu 0.0.52, 2026-12-01).
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
