"""Calls of `kda` on simulated ranks, and comparisons of their results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kernels.kda.cases import Case, Result, call_of, errors, limits, numbers, with_gradients
from tests.compiling import fast_jit


def run(case: Case, *, ranks: int = 1, check_vma: bool = True, implementation="chunked", **more):
    """`kda` on `ranks` simulated devices, and its gradients taken outside the shard_map."""
    function = compiled(
        tuple(sorted((case.options | more).items())), tuple(case.arrays), ranks, check_vma,
        implementation, case.max_segments, True,
    )  # fmt: skip
    cotangents = jnp.asarray(case.d_out, case.arrays["v"].dtype), case.d_final
    return numbers(*function(case.arrays, jnp.asarray(case.ids), cotangents))


def forward(case: Case, *, ranks=1, check_vma=True, implementation="chunked", **more):
    """The same without gradients."""
    function = compiled(
        tuple(sorted((case.options | more).items())), tuple(case.arrays), ranks, check_vma,
        implementation, case.max_segments, False,
    )  # fmt: skip
    return numbers(*function(case.arrays, jnp.asarray(case.ids)), {})


@functools.cache
def compiled(options, names, ranks, check_vma, implementation, max_segments, gradients):
    """Jitted (arrays, ids, cotangents) -> (out, final, gradients), or (arrays, ids) -> (out,
    final); cached, so that cases that differ only in their data share a compilation."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("context",)) if ranks > 1 else None
    call = call_of(
        dict(options), names, max_segments, mesh=mesh, check_vma=check_vma,
        implementation=implementation,
    )  # fmt: skip
    # Programs of interpreted kernels are larger and would overflow the compiler's stack this way.
    return (jax.jit if implementation == "mosaic_tpu" else fast_jit)(
        with_gradients(call) if gradients else call
    )


def check(result: Result, reference: Result, bounds: dict) -> None:
    """Compares with bounds {"out": ., "gradient": ., "decay": .}; reports by how much it fails."""
    found = errors(result, reference)
    allowed = limits(found, bounds)
    wrong = {n: f"{e:.1e} > {allowed[n]}" for n, e in found.items() if not e <= allowed[n]}
    assert not wrong, f"{wrong}; all errors: { {n: f'{e:.1e}' for n, e in found.items()} }"
