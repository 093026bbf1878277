"""Carried keys and values: rows with memory are one long row while the memory covers it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.config import ModelConfig
from model.decoder import carry_shardings, forward, init_carry
from model.generate import Generator
from model.loss import logits, loss_sums
from model.params import param_shardings
from tests.compiling import fast_jit
from tests.model_cases import MIXED, make_batch, make_mesh, make_params, random_carry, row
from tests.model_cases import worst_error as worst
from tests.tolerances import MODEL_FLOAT32, MODEL_FLOAT32_GRADIENT

WINDOW, WINDOWS = 32, 4
T = WINDOW * WINDOWS
COVERS = dataclasses.replace(MIXED, pattern="attention", attention_memory=T, num_repeats=2)
HYBRID = dataclasses.replace(COVERS, pattern="kda,attention")
# A document over all windows after a short one; one that ends in a row's middle, then padding, and
# one that starts after it.
IDS = np.stack(
    [row((1, 7), (2, T - 7)), row((1, 50), (0, 14), (2, 40), (3, 24)), row((1, 96), (0, 32))]
)


def continues(rows: int) -> np.ndarray:
    """[W, B]: the row's first document is the last one before it, with IDS cut into rows."""
    flags = np.zeros((rows, len(IDS)), bool)
    for b, ids in enumerate(IDS):
        parts = [part[part != 0] for part in np.split(ids, rows)]
        last = 0
        for w, part in enumerate(parts):
            if len(part):
                flags[w, b] = part[0] == last
                last = part[-1]
    return flags


@functools.cache
def results(cfg: ModelConfig, rows: int, flag: bool = True, **mesh_sizes: int):
    """(loss, hidden at real tokens, gradients of the parameters) of IDS, each cut into rows."""
    mesh = make_mesh(**mesh_sizes)
    batch = make_batch(IDS)
    flags = continues(rows) & flag

    def cut(x):
        return jnp.moveaxis(x.reshape(x.shape[0], rows, -1), 1, 0)

    parts = {name: cut(x) for name, x in batch.items() if name != "continues"}

    def loss(params, carry):
        def window(carry, part):
            arrays = (part["tokens"], part["segment_ids"], part["continues"])
            hidden, carry, _ = forward(params, cfg, *arrays, carry, mesh)
            sums = loss_sums(params, cfg, hidden, part["targets"], part["loss_weights"], mesh)
            return carry, (sums.nll, hidden)

        _, (nll, hidden) = jax.lax.scan(window, carry, parts | {"continues": flags})
        return nll.sum(), jnp.moveaxis(hidden, 0, 1).reshape(*IDS.shape, -1)

    params = jax.device_put(make_params(cfg, slow=True), param_shardings(cfg, mesh))
    carry = jax.device_put(init_carry(cfg, len(IDS)), carry_shardings(cfg, mesh))
    (value, hidden), grads = fast_jit(jax.value_and_grad(loss, has_aux=True))(params, carry)
    return jax.tree.map(np.asarray, (value, hidden[IDS != 0], grads))


def check_equal(found, expected):
    error, where = worst(found[:2], expected[:2])
    assert error < MODEL_FLOAT32, where
    error, where = worst(found[2], expected[2])
    assert error < MODEL_FLOAT32_GRADIENT, where


@pytest.mark.parametrize(
    ("cfg", "mesh"),
    [
        (COVERS, {}),
        (COVERS, {"context": 2, "tensor": 2}),
        (COVERS, {"context": 4}),
        pytest.param(HYBRID, {"context": 4}, marks=pytest.mark.slow),
    ],
)
def test_rows_with_memory_equal_one_long_row(cfg, mesh):
    check_equal(results(cfg, WINDOWS, **mesh), results(cfg, 1))


@pytest.mark.slow
def test_memory_flags_and_length_matter():
    """Else the test above proves nothing."""
    expected = results(COVERS, 1)
    for other in (
        results(dataclasses.replace(COVERS, attention_memory=0), WINDOWS),
        results(dataclasses.replace(COVERS, attention_memory=WINDOW), WINDOWS),
        results(COVERS, WINDOWS, False),
    ):
        assert worst(other[1], expected[1])[0] > 1e-3


@pytest.mark.slow
def test_a_short_memory_is_the_same_on_every_mesh():
    short = dataclasses.replace(COVERS, attention_memory=12)
    check_equal(results(short, WINDOWS, context=4), results(short, WINDOWS))


def test_tokens_generated_one_by_one_have_the_logits_of_the_whole_row():
    """The model was trained without memory; the generator gives it one."""
    cfg, mesh = dataclasses.replace(COVERS, attention_memory=0), make_mesh()
    params, tokens = make_params(cfg), np.arange(40, dtype=np.int32)
    ids, start = jnp.ones((1, 40), jnp.int32), jnp.zeros(1, bool)
    hidden = forward(params, cfg, tokens[None], ids, start, init_carry(cfg, 1), mesh)[0]
    expected = logits(params, cfg, hidden, mesh)[0]
    generator = Generator(params, cfg, mesh, piece=16, attention_memory=64)
    done = generator.prefill([tokens[:37]])
    for number in range(37, 40):
        assert worst(done.logits[0], expected[number - 1])[0] < MODEL_FLOAT32
        done = generator.append(done, jnp.asarray(tokens[number : number + 1]))


@pytest.mark.parametrize("context", [1, 4])
def test_a_row_of_padding_hands_keys_and_values_on(context):
    cfg, mesh = COVERS, make_mesh(context=context)
    ids = jnp.asarray(np.stack([np.zeros(WINDOW, int), row((1, WINDOW))]), jnp.int32)
    carry = jax.device_put(random_carry(cfg, 2), carry_shardings(cfg, mesh))
    params = jax.device_put(make_params(cfg), param_shardings(cfg, mesh))
    flags = jnp.asarray([True, True])
    step = fast_jit(lambda p, c: forward(p, cfg, ids, ids, flags, c, mesh)[1])
    after = step(params, carry)
    for old, new in zip(jax.tree.leaves(carry), jax.tree.leaves(after)):
        np.testing.assert_array_equal(new[:, 0], old[:, 0])
        assert (np.asarray(new)[:, 1] != np.asarray(old)[:, 1]).any()
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attention_memory": -1}, "needs a number >= 0"),
        ({"carry": False}, "config.model.carry is"),
    ],
)
def test_options_that_do_not_fit(change, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(COVERS, **change)
