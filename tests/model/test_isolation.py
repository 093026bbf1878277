"""Packed documents are independent of each other, in logits, loss terms and gradients.

Decays are slow here (about 1e-3 per token): with random initial values the gates forget within a
few tokens and would hide a leak.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.decoder import init_carry
from tests.model_cases import MIXED, compiled, make_batch, make_params, row

# Document 2 ends at a rank's edge (of 2 and of 4), document 3 begins there; document 4 follows
# padding.
SEGMENTS = np.stack([row((1, 9), (2, 23), (3, 20), (0, 3), (4, 9)), row((1, 40), (2, 24))])
CHANGED = np.zeros(SEGMENTS.shape, bool)
CHANGED[0] = SEGMENTS[0] == 2
OTHERS = (SEGMENTS != 0) & ~CHANGED


def other_text(batch: dict) -> dict:
    """Every token and target of one document changed."""
    tokens = jnp.where(CHANGED, (batch["tokens"] + 7) % 61, batch["tokens"])
    targets = jnp.where(CHANGED, (batch["targets"] + 3) % 61, batch["targets"])
    return batch | {"tokens": tokens, "targets": targets}


def compute(context: int, batch: dict) -> dict:
    return compiled(MIXED, context=context)(
        make_params(MIXED, slow=True), init_carry(MIXED, 2), batch, z_weight=0.0
    )


def loss_terms(result: dict, batch: dict) -> np.ndarray:
    """-log p(target) [B, T]."""
    picked = np.take_along_axis(result["logits"], np.asarray(batch["targets"])[..., None], -1)
    return np.asarray(jax.nn.logsumexp(result["logits"], axis=-1)) - picked[..., 0]


CONTEXTS = [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 4]


@pytest.fixture(scope="module", params=CONTEXTS)
def versions(request):
    """(batch, results) before and after, with the loss of all other documents alone."""
    batch = make_batch(SEGMENTS) | {"loss_weights": jnp.asarray(OTHERS, jnp.float32)}
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
    merged = np.where((np.arange(2) == 0)[:, None] & (SEGMENTS == 3), 2, SEGMENTS)
    batch = make_batch(merged)
    old, new = compute(4, batch), compute(4, other_text(batch))
    end = slice(47, 52)  # fifteen tokens and more after the change
    assert np.abs(old["logits"][0, end] - new["logits"][0, end]).max() > 1e-3
    assert not np.array_equal(old["d_params"]["head"], new["d_params"]["head"])
