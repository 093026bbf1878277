"""Random calls of `attention`, and their results in float64 from the whole matrix of scores.

For tests, and for the check of the kernels on a TPU (training/tpu_check).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.attention.api import Memory, attention
from kernels.attention.reference import attention_reference
from kernels.cases import number
from kernels.segments import plan_segments

KEYS = P(None, None, "context")
TOKENS = P(None, "context")


@dataclasses.dataclass(frozen=True)
class Case:
    """segments: ids of each row. heads: (H, G). memory: tokens before the row, 0 for none."""

    segments: tuple[np.ndarray, ...]
    heads: tuple[int, int]
    size: int = 8
    memory: int = 0

    @property
    def ids(self) -> np.ndarray:
        return np.stack(self.segments)


def make_inputs(case: Case, dtype: str = "float32"):
    """q, k, v, memory's k and v, and the output's cotangent; then memory's validity."""
    random = np.random.default_rng(0)
    (rows, length), (heads, groups) = case.ids.shape, case.heads
    queries, keys = (rows, heads, length, case.size), (rows, groups, length, case.size)
    before = (rows, groups, case.memory, case.size)
    shapes = (queries, keys, keys, before, before, queries)
    arrays = tuple(jnp.asarray(2 * random.normal(size=shape), dtype) for shape in shapes)
    valid = random.random((rows, case.memory)) < 0.8
    valid[:1] = False  # a row that does not continue
    return arrays, valid


def oracle(case: Case, dtype: str = "float32"):
    """(out, gradients) in float64, on the host."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        arrays, valid = make_inputs(case, dtype)
        q, k, v, memory_k, memory_v, d_out = (jnp.asarray(np.asarray(x, "float64")) for x in arrays)
        q_index = jnp.asarray(np.stack([number(row)[0] for row in case.ids]))
        k_index = jnp.concatenate([jnp.where(valid, 0, -1), q_index], 1)

        def run(q, k, v, memory_k, memory_v):
            k, v = jnp.concatenate([memory_k, k], 2), jnp.concatenate([memory_v, v], 2)
            return attention_reference(q, k, v, q_index, k_index)

        out, pull = jax.vjp(run, q, k, v, memory_k, memory_v)
        return jax.tree.map(np.asarray, (out, pull(d_out)))


def step_of(case: Case, mesh: Mesh, block: int, implementation: str | None) -> Callable:
    """(arrays, valid) -> (out, gradients, next memory), to be jitted; axis "context" divides T."""
    axis_name = "context" if mesh.shape["context"] > 1 else None

    def attend(q, k, v, memory_k, memory_v, valid, ids):
        memory = Memory(memory_k, memory_v, valid) if case.memory else None
        out, after = attention(
            q, k, v, plan_segments(ids, axis_name),
            memory=memory, axis_name=axis_name, block=block, implementation=implementation,
        )  # fmt: skip
        return out, after if case.memory else Memory(memory_k, memory_v, valid)

    after: Any = Memory(*(KEYS, KEYS, TOKENS))  # type: ignore[arg-type]  # specs in its places
    island: Callable = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(KEYS,) * 5 + (TOKENS,) * 2,
        out_specs=(KEYS, after),
        check_vma=implementation != "mosaic_tpu",
    )
    ids = jnp.asarray(case.ids, jnp.int32)

    def step(arrays, valid):
        *arrays, d_out = arrays

        def run(*arrays):
            return island(*arrays, valid, ids)

        out, pull, after = jax.vjp(run, *arrays, has_aux=True)
        return out, pull(d_out), after

    return step
