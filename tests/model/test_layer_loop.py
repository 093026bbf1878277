"""What the loop over layers exchanges between context ranks, read from compiled programs."""

import dataclasses
import functools
import math
import os
import re
from types import SimpleNamespace

os.environ.update(
    TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1"
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

from model.ahead import Ahead
from model.axes import MESH_AXES, ParamSpec
from model.checks import check_host_memory
from model.decoder import forward, init_carry
from model.layer_loop import run_layers, run_layers_recomputed
from model.loss import loss_sums
from model.params import block_specs, param_shardings
from options import OptionError
from tests.compiling import fast_jit
from tests.model_cases import KDA, make_batch, make_mesh, make_params, row

RANKS = 4
_OPERATION = re.compile(r"= (.*?) (all-reduce|reduce-scatter|collective-permute)(?:-start)?\(")


def loop_operations(text: str, kind: str) -> list[str]:
    """Result types of a kind of collective in every computation but the program's entry."""
    found, entry = [], False
    for line in text.splitlines():
        if line.endswith("{") and " = " not in line:
            entry = line.startswith("ENTRY")
        operation = _OPERATION.search(line)
        alone = "{'tensor'}" in line  # one rank
        if operation and not entry and not alone and operation.group(2) == kind:
            found.append(operation.group(1))
    return found


@pytest.fixture(scope="module")
def program() -> str:
    """HLO of the loss's gradient on four context ranks, with carry."""
    mesh, batch = make_mesh(context=RANKS), make_batch(jnp.stack([jnp.asarray(row((1, 64)))]))
    assert MESH_AXES[3] == "context"

    def loss(params, carry):
        arrays = batch["tokens"], batch["segment_ids"], batch["continues"]
        hidden, carry, _ = forward(params, KDA, *arrays, carry, mesh)
        sums = loss_sums(params, KDA, hidden, batch["targets"], batch["loss_weights"], mesh)
        return sums.nll, carry

    params = jax.device_put(make_params(KDA), param_shardings(KDA, mesh))
    gradient = fast_jit(jax.grad(loss, has_aux=True))
    return gradient.lower(params, init_carry(KDA, 1)).compile().as_text()


def test_only_gradients_of_matrices_are_summed_over_ranks_within_the_loop(program):
    """They are reduce-scattered. Carry, convolution inputs, taps, gains and gates leave the loop as
    shares."""
    assert not loop_operations(program, "all-reduce")
    types = " ".join(loop_operations(program, "reduce-scatter"))
    sizes = [tuple(map(int, s.split(","))) for s in re.findall(r"f32\[([\d,]+)\]", types)]
    matrices = [x for x in jax.tree.leaves(block_specs(KDA)) if x.is_matrix]
    assert sum(map(math.prod, sizes)) * RANKS == sum(math.prod(x.shape) for x in matrices), types


def test_a_layer_passes_states_once_forward_and_cotangents_once_back(program):
    """A state is [heads, K, V] and a halo [1, W - 1, channels]: each travels in one place of the
    forward's loop and one of the backward's, where recomputation would add a third."""
    moved = loop_operations(program, "collective-permute")
    states = [x for x in moved if f"{KDA.key_dim},{KDA.value_dim}]" in x]
    halos = [x for x in moved if f",{KDA.conv_kernel_size - 1}," in x]
    assert (len(states), len(halos)) == (2, 2), moved


def toy(params, hidden, carry, plan, entry):
    """A layer with a carry and an entry that is given back."""
    entry = jax.lax.stop_gradient(hidden[:, :1]) if entry is None else entry
    hidden = hidden + jnp.tanh(hidden @ params["matrix"]) * (1 + entry) + carry
    return hidden, carry + hidden.mean(), entry, {}


@functools.cache
def toy_gradients(run, scan: bool):
    """jitted (params [R, D, D] of each of two positions, hidden [B, T, D]) -> gradients."""

    def loss(params, hidden):
        carry = (jnp.zeros(params[0].shape[0]),) * 2
        params = tuple({"matrix": x} for x in params)
        hidden, (ends, _) = run([toy, toy], params, hidden, carry, None, scan)
        return jnp.sum(hidden**2) + sum(jnp.sum(end) for end in ends)

    return jax.jit(jax.grad(loss, (0, 1)))


AT_REST = ParamSpec((8, 8), ("width", "whole"), init=None, decays=True, cast=True, muon=False)
NONE_AHEAD = Ahead(({"matrix": AT_REST},) * 2, KDA, make_mesh(), repeats=3)
FULL = functools.partial(run_layers_recomputed, NONE_AHEAD)
OFFLOAD = functools.partial(run_layers_recomputed, NONE_AHEAD, to_host=True)


@pytest.mark.parametrize("scan", [True, False])
def test_what_is_kept_on_the_host_comes_back(scan):
    """The bits of `full`; JAX's own gradient of the plain loop is the oracle of both."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = tuple(jax.random.normal(key, (3, 8, 8)) / 4 for key in keys[:2])
    hidden = jax.random.normal(keys[2], (2, 4, 8))
    plain, full, host = (
        jax.tree.leaves(toy_gradients(run, scan)(params, hidden))
        for run in (run_layers, FULL, OFFLOAD)
    )
    for expected, kept, offloaded in zip(plain, full, host):
        np.testing.assert_array_equal(offloaded, kept)
        largest = float(jnp.abs(expected).max())
        np.testing.assert_allclose(offloaded, expected, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.slow
def test_a_tpu_copies_what_is_kept_while_it_computes():
    """Compiled for a v6e chip: the stacks are in the host's memory, and products run between the
    start and the end of the copies, in the forward and in the backward."""
    described = topologies.get_topology_desc(platform="tpu", topology_name="v6e:1x1")
    mesh = Mesh(np.array(described.devices[:1]), ("all",))
    shape = functools.partial(
        jax.ShapeDtypeStruct, dtype=jnp.float32, sharding=jax.NamedSharding(mesh, jax.P())
    )
    arguments = (shape((6, 512, 512)),) * 2, shape((4, 2048, 512))
    compiled = toy_gradients(OFFLOAD, True).lower(*arguments).compile()
    stacks, memory = 2 * 6 * 4 * 2048 * 512 * 4, compiled.memory_analysis()
    assert memory.host_temp_size_in_bytes >= stacks and memory.temp_size_in_bytes < stacks / 3
    for copy in ("dynamic-update-slice", "dynamic-slice"):
        assert overlapped(compiled.as_text(), copy), copy


def overlapped(text: str, copy: str) -> bool:
    """Whether any copy to or from the host has a fusion between start and end, in scheduled HLO."""
    lines = text.splitlines()
    for begin, line in enumerate(lines):
        if match := re.search(rf"%({copy}-start[.\d]*) = ", line):
            ends = (n for n, x in enumerate(lines) if f"-done(%{match.group(1)})" in x)
            if any(" fusion(" in x for x in lines[begin : next(ends)]):
                return True
    return False


def test_offload_needs_a_host_memory_that_devices_address():
    memories = [SimpleNamespace(kind="device")]
    device = SimpleNamespace(device_kind="abacus", addressable_memories=lambda: memories)
    mesh = SimpleNamespace(devices=np.array([device]))
    check_host_memory(KDA, mesh)
    offload = dataclasses.replace(KDA, remat="offload")
    check_host_memory(offload, make_mesh())
    with pytest.raises(
        OptionError, match=r"remat='offload': needs .*; abacus has device; try full"
    ):
        check_host_memory(offload, mesh)
