"""The whole model: every mesh, every way to run layers, and packing against single documents."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import ahead
from model.decoder import carry_shardings, forward, init_carry
from model.params import param_shardings
from tests.compiling import fast_jit
from tests.model_cases import (
    KDA,
    MIXED,
    compiled,
    make_batch,
    make_mesh,
    make_params,
    random_carry,
    row,
    worst_error,
)
from tests.tolerances import BFLOAT16_AGAINST_FLOAT32, MODEL_FLOAT32, MODEL_FLOAT32_GRADIENT

T = 64
# Documents that end inside ranks, at rank edges, cover several ranks; one-token documents; padding
# first, inside, last, on whole ranks, and a row of nothing else.
SEGMENTS = np.stack(
    [
        row((1, 10), (2, 38), (3, 1), (4, 15)),
        row((5, 64)),
        row((0, 64)),
        row((0, 3), (5, 9), (0, 4), (5, 16), (7, 16), (0, 16)),
    ]
)
CONTINUES = np.array([True, False, True, True])
MESHES = [
    pytest.param({"context": 2}, marks=pytest.mark.slow),
    {"context": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
]


@pytest.fixture(scope="module")
def case():
    """(params, carry, batch) of the mixed model, with a carry that two rows go on from."""
    batch = make_batch(SEGMENTS) | {"continues": jnp.asarray(CONTINUES)}
    return make_params(MIXED), random_carry(MIXED, 4), batch


@pytest.fixture(scope="module")
def one_device(case):
    return compiled(MIXED)(*case, carry_weight=0.1)


def split_gradients(result):
    grads = {name: result.pop(name) for name in ("d_params", "d_carry")}
    return result, grads


def check_same(found, expected):
    real = (SEGMENTS != 0)[..., None]
    for name in ("hidden", "logits"):
        found[name], expected[name] = found[name] * real, expected[name] * real
    (found, found_grads), (expected, expected_grads) = map(split_gradients, (found, expected))
    error, where = worst_error(found, expected)
    assert error < MODEL_FLOAT32, where
    error, where = worst_error(found_grads, expected_grads)
    assert error < MODEL_FLOAT32_GRADIENT, where


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_has_the_loss_and_gradients_of_one_device(case, one_device, mesh):
    check_same(compiled(MIXED, **mesh)(*case, carry_weight=0.1), dict(one_device))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"scan_layers": False, "remat": "dots"},
        {"remat": "none", "attention_block": 64, "kda_state_policy": "save"},
        {"kda_implementation": "recurrent", "loss_chunk": 500},
    ],
    ids=str,
)
def test_how_layers_are_run_changes_nothing(case, one_device, changes):
    other = dataclasses.replace(MIXED, **changes)
    check_same(compiled(other)(*case, carry_weight=0.1), dict(one_device))


@pytest.mark.slow
def test_how_far_ahead_matrices_are_gathered_changes_nothing(case, monkeypatch):
    """As with many context ranks: all matrices a repeat ahead, two layers a repeat."""
    cfg = dataclasses.replace(KDA, num_repeats=4)
    given = make_params(cfg), random_carry(cfg, 4), case[2]
    expected = compiled(cfg, context=4)(*given, carry_weight=0.1)
    for name in ("_ALL_FROM", "_PAIRS_FROM"):
        monkeypatch.setattr(ahead, name, 1)
    found = compiled.__wrapped__(cfg, context=4)(*given, carry_weight=0.1)
    check_same(found, expected)


def test_results_are_finite_and_gradients_reach_every_parameter(one_device):
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(one_device))
    for path, gradient in jax.tree_util.tree_leaves_with_path(one_device["d_params"]):
        assert gradient.any(), jax.tree_util.keystr(path)


def test_packed_documents_are_the_documents_alone(case, one_device):
    """Each document in a separate batch, from the first position: the same hidden states."""
    params, _, batch = case
    alone = {"tokens": [], "segment_ids": []}
    where = []
    for b, document in [(0, 2), (0, 3), (1, 5), (3, 7)]:
        places = np.flatnonzero(SEGMENTS[b] == document)
        where.append((b, places))
        for name, values in alone.items():
            piece = np.asarray(batch[name])[b, places]
            values.append(np.pad(piece, (0, T - len(piece))))
    inputs = {name: np.stack(values) for name, values in alone.items()}
    batch = make_batch(inputs["segment_ids"]) | {"tokens": inputs["tokens"]}
    hidden = compiled(MIXED)(params, init_carry(MIXED, 4), batch)["hidden"]
    found = np.concatenate([one_device["hidden"][b, places] for b, places in where])
    expected = np.concatenate([hidden[n, : len(places)] for n, (_, places) in enumerate(where)])
    assert worst_error(found, expected)[0] < MODEL_FLOAT32


def test_a_later_token_changes_nothing_before_it(case, one_device):
    params, carry, batch = case
    changed = batch | {"tokens": batch["tokens"].at[1, 40].add(1) % 61}
    found = compiled(MIXED)(params, carry, changed, carry_weight=0.1)
    np.testing.assert_array_equal(found["logits"][1, :40], one_device["logits"][1, :40])
    assert (found["logits"][1, 40:] != one_device["logits"][1, 40:]).any(axis=-1).all()


def test_bf16_is_near_float32_and_keeps_its_state_in_float32(case, one_device):
    cfg = dataclasses.replace(MIXED, compute_dtype="bfloat16")
    params, carry, batch = case
    carry = jax.tree.map(lambda x, like: x.astype(like.dtype), carry, init_carry(cfg, 4))
    found = compiled(cfg, context=2)(params, carry, batch, carry_weight=0.1)
    assert found["hidden"].dtype == jnp.bfloat16
    assert found["carry"]["blocks"][0]["state"].dtype == np.float32
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(found["d_params"]))
    real = SEGMENTS != 0
    error, _ = worst_error(found["logits"][real], one_device["logits"][real])
    assert error < BFLOAT16_AGAINST_FLOAT32
    assert abs(found["loss"] - one_device["loss"]) < BFLOAT16_AGAINST_FLOAT32


def test_the_bounded_gate_forgets_by_its_bound():
    """A bound of almost nothing remembers everything: like a softplus gate that is shut."""
    params = make_params(KDA)
    shut = jax.tree_util.tree_map_with_path(
        lambda path, x: x - 100 if "dt_bias" in jax.tree_util.keystr(path) else x, params
    )
    batch = make_batch(SEGMENTS)

    def hidden(params, cfg):
        arrays = (batch["tokens"], batch["segment_ids"], batch["continues"], init_carry(cfg, 4))
        return fast_jit(lambda p: forward(p, cfg, *arrays, make_mesh())[0])(params)

    def bounded(bound):
        cfg = dataclasses.replace(KDA, decay_gate="bounded", gate_lower_bound=bound)
        return hidden(params, cfg)

    real = SEGMENTS != 0
    expected = hidden(shut, KDA)[real]
    assert worst_error(bounded(-1e-9)[real], expected)[0] < MODEL_FLOAT32
    assert worst_error(bounded(-1.0)[real], expected)[0] > 0.01


def test_a_token_outside_the_vocabulary_is_not_silent(case):
    params, carry, batch = case
    wrong = batch | {"tokens": batch["tokens"].at[1, 5].set(5000)}
    assert not np.isfinite(compiled(MIXED)(params, carry, wrong)["loss"])


def test_activations_and_carry_lie_where_the_table_says(case):
    mesh = make_mesh(data=2, context=2, tensor=2)
    params, carry, batch = case
    params = jax.device_put(params, param_shardings(MIXED, mesh))
    carry = jax.device_put(carry, carry_shardings(MIXED, mesh))
    arrays = (batch["tokens"], batch["segment_ids"], batch["continues"])
    hidden, end, _ = fast_jit(lambda p, c: forward(p, MIXED, *arrays, c, mesh))(params, carry)
    assert hidden.sharding.shard_shape(hidden.shape) == (2, 32, 32)
    state = end["blocks"][0]["state"]
    assert state.sharding.shard_shape(state.shape) == (2, 2, 1, 8, 16)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), init_carry(MIXED, 4))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), end) == shapes


def test_attention_alone(case):
    cfg = dataclasses.replace(KDA, pattern="attention")
    carry = init_carry(cfg, 4)
    assert carry == {"blocks": ({},)}
    check_same(*(compiled(cfg, context=n)(make_params(cfg), carry, case[2]) for n in (4, 1)))


# --- packed documents are independent, in logits, loss terms and gradients ------------------------
# Decays are slow here (about 1e-3 per token): with random initial values the gates forget within a
# few tokens and would hide a leak. Two rows of padding make programs those of the tests above.

# Document 2 ends at a rank's edge (of 2 and of 4), document 3 begins there; document 4 follows
# padding.
PACKED = np.stack(
    [row((1, 9), (2, 23), (3, 20), (0, 3), (4, 9)), row((1, 40), (2, 24)), *[row((0, 64))] * 2]
)
CHANGED = np.zeros(PACKED.shape, bool)
CHANGED[0] = PACKED[0] == 2
OTHERS = (PACKED != 0) & ~CHANGED


def other_text(batch: dict) -> dict:
    """Every token and target of one document changed."""
    tokens = jnp.where(CHANGED, (batch["tokens"] + 7) % 61, batch["tokens"])
    targets = jnp.where(CHANGED, (batch["targets"] + 3) % 61, batch["targets"])
    return batch | {"tokens": tokens, "targets": targets}


def compute(context: int, batch: dict) -> dict:
    return compiled(MIXED, context=context)(
        make_params(MIXED, slow=True), init_carry(MIXED, 4), batch, z_weight=0.0
    )


def loss_terms(result: dict, batch: dict) -> np.ndarray:
    """-log p(target) [B, T]."""
    picked = np.take_along_axis(result["logits"], np.asarray(batch["targets"])[..., None], -1)
    return np.asarray(jax.nn.logsumexp(result["logits"], axis=-1)) - picked[..., 0]


CONTEXTS = [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 4]


@pytest.fixture(scope="module", params=CONTEXTS)
def versions(request):
    """(batch, results) before and after, with the loss of all other documents alone."""
    batch = make_batch(PACKED) | {"loss_weights": jnp.asarray(OTHERS, jnp.float32)}
    return [(b, compute(request.param, b)) for b in (batch, other_text(batch))]


def test_logits_and_loss_terms_of_other_documents_stay_bit_for_bit(versions):
    (batch, old), (new_batch, new) = versions
    np.testing.assert_array_equal(old["logits"][OTHERS], new["logits"][OTHERS])
    terms, new_terms = loss_terms(old, batch), loss_terms(new, new_batch)
    np.testing.assert_array_equal(terms[OTHERS], new_terms[OTHERS])
    assert (terms[CHANGED] != new_terms[CHANGED]).all()


def test_gradients_of_other_documents_losses_stay_bit_for_bit(versions):
    (_, old), (_, new) = versions
    jax.tree.map(np.testing.assert_array_equal, old["d_params"], new["d_params"])
    assert old["loss"] == new["loss"]
    for b, result in versions:
        tokens = np.asarray(b["tokens"])
        only_there = np.setdiff1d(tokens[CHANGED], tokens[OTHERS])
        assert len(only_there) and not result["d_params"]["embedding"][only_there].any()


def test_a_leak_would_show():
    """With both documents under one id the same change reaches the end of what follows."""
    merged = np.where((np.arange(4) == 0)[:, None] & (PACKED == 3), 2, PACKED)
    batch = make_batch(merged)
    old, new = compute(4, batch), compute(4, other_text(batch))
    end = slice(47, 52)  # fifteen tokens and more after the change
    assert np.abs(old["logits"][0, end] - new["logits"][0, end]).max() > 1e-3
    assert not np.array_equal(old["d_params"]["head"], new["d_params"]["head"])
