"""Attention compiles for every chip and head size, forward and gradient, without a TPU."""

import os

os.environ.update(
    TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1"
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.attention import Memory, attention
from kernels.segments import plan_segments

V7X, V6E, V5P, V5E = "tpu7x:2x2x1", "v6e:2x2", "v5p:2x2x1", "v5e:2x2"


def compiled(topology, ranks, *, length=1024, heads=(4, 2), size=128, memory=0, dtype="bfloat16"):
    """Gradient of attention with `length` tokens per rank; two rows, and memory if it is given."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:ranks]), ("context",))
    keys, tokens = P(None, None, "context"), P(None, "context")

    def attend(q, k, v, before, ids):
        segments = plan_segments(ids, "context")
        given = before if memory else None
        out, after = attention(q, k, v, segments, memory=given, axis_name="context")
        return out, after if memory else before

    specs = Memory(keys, keys, tokens)
    island = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(keys, keys, keys, specs, tokens),
        out_specs=(keys, specs),
        check_vma=False,
    )

    def loss(q, k, v, before, ids):
        out, after = island(q, k, v, before, ids)
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in (out, after.k, after.v))

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def streams(heads, length):
        return array((2, heads, length * ranks, size), dtype, keys)

    before = streams(heads[1], memory or 1)
    valid = array((2, before.shape[2]), bool, tokens)
    arguments = (
        streams(heads[0], length),
        *[streams(heads[1], length)] * 2,
        Memory(before, before, valid),
        array((2, length * ranks), jnp.int32, tokens),
    )
    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    return step.lower(*arguments).compile()


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("topology", "ranks", "size", "memory"),
    [
        (V6E, 4, 128, 256),
        slow(V6E, 1, 128, 0),
        slow(V6E, 2, 256, 256),
        slow(V5E, 4, 64, 0),
        slow(V5E, 4, 256, 256),
        slow(V5P, 4, 128, 256),
        slow(V7X, 4, 256, 256),
    ],
)
def test_chips_ranks_and_head_sizes(topology, ranks, size, memory):
    """The forward, dq and dkv kernels, chosen by the mesh's devices."""
    text = compiled(topology, ranks, size=size, memory=memory).as_text()
    calls = [line for line in text.splitlines() if "tpu_custom_call" in line]
    for kernel in ("splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv"):
        assert sum(kernel in line for line in calls) == 1, calls


def test_float32_products_are_float32():
    """The kernels would round their inputs to bfloat16, so the blockwise form is chosen."""
    text = compiled(V6E, 2, length=256, heads=(1, 1), dtype="float32").as_text()
    assert "tpu_custom_call" not in text


@pytest.mark.slow
@pytest.mark.parametrize("topology", [V5E, V7X])
def test_rows_of_a_million_tokens(topology):
    """Blocks grow, so that their tables fit into scalar memory."""
    text = compiled(topology, 4, length=262144, heads=(1, 1)).as_text()
    assert text.count("tpu_custom_call") >= 3


@pytest.mark.slow
def test_memory_is_linear_in_the_row_length():
    """At lengths at which nothing is kept in VMEM between kernels."""
    short, long = (
        compiled(V6E, 4, length=length).memory_analysis().temp_size_in_bytes
        for length in (32768, 131072)
    )
    assert long < 4 * 1.1 * short
