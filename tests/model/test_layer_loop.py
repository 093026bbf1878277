"""What the loop over layers exchanges between context ranks, read from compiled programs."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from model.axes import MESH_AXES
from model.decoder import forward, init_carry
from model.loss import loss_sums
from model.params import block_specs, param_shardings
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
    gradient = jax.jit(jax.grad(loss, has_aux=True))
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
