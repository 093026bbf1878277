"""The carried state: windows of a document are the document; what does not continue is fresh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.decoder import carry_shardings, forward, init_carry
from model.loss import logits, loss_sums
from model.params import param_shardings
from tests.compiling import fast_jit
from tests.model_cases import (
    KDA,
    compiled,
    make_batch,
    make_mesh,
    make_params,
    random_carry,
    row,
    worst_error,
)
from tests.tolerances import FINITE_DIFFERENCE, MODEL_FLOAT32, MODEL_FLOAT32_GRADIENT

CFG = dataclasses.replace(KDA, learned_initial_state=True)
OFF = dataclasses.replace(CFG, carry=False)
WINDOW, WINDOWS = 32, 6
CONTEXTS = [pytest.param(1, marks=pytest.mark.slow), 4]
# A document of five windows and a bit, after and before others; and a document that is cut by a
# window of padding and has two tokens (fewer than the convolution's taps) before the first edge.
LONG = np.stack(
    [
        row((1, 7), (2, 5 * WINDOW + 9), (3, 16)),
        row((1, 20), (2, 10), (3, 34), (0, 32), (3, 60), (0, 4), (4, 32)),
    ]
)
# The same rows with padding moved to the end. A window of padding is nothing to the document it
# cuts, while inside a row the convolution counts places, padded or not.
COMPACT = np.argsort(LONG == 0, axis=1, kind="stable")


@functools.cache
def windowed(cfg, context: int):
    """jitted (params, carry, batch [B, W * T]) -> (loss, logits, new carry), window by window."""
    mesh = make_mesh(context=context)

    def cut(x):
        return jnp.moveaxis(x.reshape(x.shape[0], WINDOWS, WINDOW), 1, 0)

    def loss(params, carry, batch, continues):
        def window(carry, part):
            arrays = (part["tokens"], part["segment_ids"], part["continues"])
            hidden, carry, _ = forward(params, cfg, *arrays, carry, mesh)
            sums = loss_sums(params, cfg, hidden, part["targets"], part["loss_weights"], mesh)
            return carry, (sums.nll, logits(params, cfg, hidden, mesh))

        parts = {name: cut(x) for name, x in batch.items() if name != "continues"}
        carry, (nll, scores) = jax.lax.scan(window, carry, parts | {"continues": continues})
        scores = jnp.moveaxis(scores, 0, 1).reshape(*batch["tokens"].shape, -1)
        return nll.sum() / batch["loss_weights"].sum(), (scores, carry)

    step = fast_jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    def run(params, carry, batch, continues):
        params = jax.device_put(params, param_shardings(cfg, mesh))
        carry = jax.device_put(carry, carry_shardings(cfg, mesh))
        (value, (scores, end)), grads = step(params, carry, batch, jnp.asarray(continues))
        return jax.tree.map(
            np.asarray, {"loss": value, "logits": scores, "carry": end, "grads": grads}
        )

    return run


def window_flags(segment_ids: np.ndarray) -> np.ndarray:
    """continues [W, B]: the window's first document is the last one before it."""
    flags = np.zeros((WINDOWS, len(segment_ids)), bool)
    for b, ids in enumerate(segment_ids):
        for w in range(1, WINDOWS):
            before, after = ids[: w * WINDOW], ids[w * WINDOW :][:WINDOW]
            before, after = before[before != 0], after[after != 0]
            flags[w, b] = len(after) > 0 and before[-1] == after[0]
    return flags


@pytest.fixture(scope="module")
def whole_rows():
    """(batch, results of its rows as they are in one piece, in the places of the compact rows)."""
    batch = make_batch(LONG)
    compact = {
        name: x if name == "continues" else jnp.take_along_axis(x, COMPACT, axis=1)
        for name, x in batch.items()
    }
    result = compiled(CFG)(make_params(CFG, slow=True), init_carry(CFG, 2), compact, z_weight=0.0)
    return batch, result


@pytest.mark.parametrize("context", [*CONTEXTS, pytest.param(2, marks=pytest.mark.slow)])
def test_windows_with_carry_are_one_long_row(whole_rows, context):
    batch, expected = whole_rows
    carry = init_carry(CFG, 2)
    flags = window_flags(LONG)
    assert flags[:, 0].tolist() == [False] + [True] * 5
    found = windowed(CFG, context)(make_params(CFG, slow=True), carry, batch, flags)
    scores = np.take_along_axis(found["logits"], COMPACT[..., None], axis=1)
    real = np.take_along_axis(LONG, COMPACT, axis=1) != 0
    assert worst_error(scores[real], expected["logits"][real])[0] < MODEL_FLOAT32
    assert worst_error(found["loss"], expected["loss"])[0] < MODEL_FLOAT32
    error, where = worst_error(found["grads"][0], expected["d_params"])
    assert error < MODEL_FLOAT32_GRADIENT, where
    error, where = worst_error(found["carry"], expected["carry"])
    assert error < MODEL_FLOAT32, where


@pytest.mark.slow
def test_without_flags_or_without_carry_the_windows_differ(whole_rows):
    """Both the carry and its flags matter: else the test above proves nothing."""
    batch, expected = whole_rows
    params = make_params(CFG, slow=True)
    none = np.zeros((WINDOWS, 2), bool)
    forgets = windowed(CFG, 1)(params, init_carry(CFG, 2), batch, none)
    off = windowed(OFF, 1)(params, init_carry(OFF, 2), batch, window_flags(LONG))
    assert worst_error(forgets["loss"], expected["loss"])[0] > 1e-3
    assert worst_error(off["loss"], forgets["loss"])[0] < MODEL_FLOAT32


def test_gradient_of_the_carried_state_is_that_of_finite_differences():
    batch = make_batch(np.stack([row((1, 20), (2, 12)), row((1, 32))]))
    batch["continues"] = jnp.asarray([True, True])
    params, carry = make_params(CFG, slow=True), random_carry(CFG, 2)
    run = compiled(CFG, context=4)
    gradient = run(params, carry, batch)["d_carry"]
    places = jax.tree_util.tree_leaves_with_path(carry)
    random = np.random.default_rng(1)
    for n, (path, x) in enumerate(places):
        leaves = [np.zeros_like(x) for _, x in places]
        leaves[n] = random.normal(size=x.shape).astype(np.float32)
        direction = jax.tree.unflatten(jax.tree.structure(carry), leaves)
        slope = slope_along(lambda carry: run(params, carry, batch)["loss"], carry, direction)
        along = sum(jax.tree.leaves(jax.tree.map(np.vdot, gradient, direction)))
        assert abs(along) > 1e-3, jax.tree_util.keystr(path)
        assert slope == pytest.approx(along, rel=FINITE_DIFFERENCE), jax.tree_util.keystr(path)


def slope_along(f, x, direction, step=0.05) -> float:
    """df/dstep from five points: the error falls with step^4, so float32 is what limits it."""

    def at(size):
        return float(f(jax.tree.map(lambda x, d: x + size * d, x, direction)))

    return (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)


@pytest.mark.slow
def test_gradient_flows_through_the_carry_to_the_row_before():
    """Only the second window has a loss: the first window's own tokens get a gradient through the
    carried state alone, and none if the second does not continue or the carry is off."""
    ids = np.ones((2, WINDOW * WINDOWS), int)
    batch = make_batch(ids)
    window = np.broadcast_to(np.arange(ids.shape[1]) // WINDOW, ids.shape)
    # The first window's token 60 occurs nowhere else, so its table row's gradient is its alone.
    batch["tokens"] = jnp.where(window == 0, 60, batch["tokens"] % 60)
    batch["loss_weights"] = jnp.asarray(window == 1, jnp.float32)
    params = make_params(CFG, slow=True)

    def gradient(cfg, continues):
        flags = np.full((WINDOWS, 2), continues)
        flags[0] = False
        found = windowed(cfg, 1)(params, init_carry(cfg, 2), batch, flags)
        return np.abs(found["grads"][0]["embedding"][60]).max()

    assert gradient(CFG, True) > 1e-4
    assert gradient(CFG, False) == 0
    assert gradient(OFF, True) == 0


@pytest.mark.slow
def test_carry_off_neither_reads_nor_changes_what_it_is_given():
    batch = make_batch(np.ones((2, WINDOW), int)) | {"continues": jnp.asarray([True, True])}
    params = make_params(CFG, slow=True)
    fresh = batch | {"continues": jnp.asarray([False, False])}
    off = compiled(OFF)(params, init_carry(OFF, 2), batch)
    assert jax.tree.leaves(off["carry"]) == []
    expected = compiled(CFG)(params, random_carry(CFG, 2), fresh)
    assert worst_error(off["logits"], expected["logits"])[0] < MODEL_FLOAT32
    assert not any(g.any() for g in jax.tree.leaves(expected["d_carry"]))


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_fresh_document_does_not_see_what_the_stream_held(context):
    """The first document may continue; later ones, and rows that do not continue, start fresh."""
    segment_ids = np.stack([row((1, 9), (2, 23)), row((3, 32))])
    batch = make_batch(segment_ids) | {"continues": jnp.asarray([True, False])}
    params = make_params(CFG, slow=True)
    run = compiled(CFG, context=context)
    one, two = (run(params, random_carry(CFG, 2, seed), batch) for seed in (0, 1))
    np.testing.assert_array_equal(one["logits"][0, 9:], two["logits"][0, 9:])
    np.testing.assert_array_equal(one["logits"][1], two["logits"][1])
    assert (one["logits"][0, :9] != two["logits"][0, :9]).any(axis=-1).all()
    for x in jax.tree.leaves(one["d_carry"]):
        assert x[:, 0].any() and not x[:, 1].any()


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_row_of_padding_hands_the_carry_on_bit_for_bit(context):
    segment_ids = np.stack([np.zeros(32, int), row((1, 32))])
    batch = make_batch(segment_ids) | {"continues": jnp.asarray([False, True])}
    carry = random_carry(CFG, 2)
    found = compiled(CFG, context=context)(make_params(CFG), carry, batch, carry_weight=1.0)
    for before, after, gradient in zip(
        *map(jax.tree.leaves, (carry, found["carry"], found["d_carry"]))
    ):
        np.testing.assert_array_equal(after[:, 0], before[:, 0])
        np.testing.assert_allclose(gradient[:, 0], np.cos(before[:, 0]), rtol=1e-6)
        assert (after[:, 1] != before[:, 1]).any()


@pytest.mark.slow
def test_every_fresh_document_starts_from_the_learned_state():
    """The start state's gradient counts each fresh document and each layer, on every rank."""
    params = make_params(CFG, slow=True)
    segment_ids = np.stack([row((1, 9), (2, 23)), row((3, 10), (4, 22))])

    def gradient(continues, context):
        batch = make_batch(segment_ids) | {"continues": jnp.asarray(continues)}
        found = compiled(CFG, context=context)(params, random_carry(CFG, 2), batch)
        return found["d_params"]["blocks"][0]["mixer"]["start_state"]

    first, both = (gradient([flag, flag], 1) for flag in (True, False))
    assert first.any() and worst_error(first, both)[0] > 0.1
    assert worst_error(gradient([False, False], 4), both)[0] < MODEL_FLOAT32_GRADIENT
