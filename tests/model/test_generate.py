"""Generation is the training form, token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.decoder import forward, init_carry
from model.generate import Generator, Sampling, sample
from model.loss import logits
from tests.model_cases import KDA, VOCABULARY, make_mesh, make_params, worst_error
from tests.tolerances import MODEL_FLOAT32

CFG = dataclasses.replace(KDA, learned_initial_state=True)
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(0, VOCABULARY, n).astype(np.int32) for n in (1, 37, 64)]
NEW = RANDOM.integers(0, VOCABULARY, (5, len(PROMPTS))).astype(np.int32)


def whole(params, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of a row in one piece, by the form that trains."""
    mesh = make_mesh()
    ids = jnp.ones((1, len(tokens)), jnp.int32)
    start = jnp.zeros(1, bool)
    hidden, _, _ = forward(params, CFG, tokens[None], ids, start, init_carry(CFG, 1), mesh)
    return np.asarray(logits(params, CFG, hidden, mesh))[0]


@pytest.fixture(scope="module")
def params():
    return make_params(CFG, slow=True)


@pytest.fixture(scope="module")
def expected(params):
    """Logits [1 + 5, B, V] after each prompt and after each new token."""
    rows = [np.concatenate([prompt, NEW[:, row]]) for row, prompt in enumerate(PROMPTS)]
    scores = [whole(params, row)[-1 - len(NEW) :] for row in rows]
    return np.stack(scores, axis=1)


@pytest.mark.parametrize(("piece", "tensor"), [(16, 1), (512, 2)])
def test_prefill_in_pieces_and_tokens_one_by_one_have_the_logits_of_the_whole_row(
    params, expected, piece, tensor
):
    generator = Generator(params, CFG, make_mesh(tensor=tensor), piece)
    done = generator.prefill(PROMPTS)
    found = [np.asarray(done.logits)]
    for tokens in NEW:
        done = generator.append(done, jnp.asarray(tokens))
        found.append(np.asarray(done.logits))
    for number, scores in enumerate(found):
        error, _ = worst_error(scores, expected[number])
        assert error < MODEL_FLOAT32, (number, error)


def test_greedy_tokens_are_the_most_likely_of_the_whole_row(params):
    generator = Generator(params, CFG, make_mesh(), 16)
    tokens = np.stack(list(generator.tokens(PROMPTS, 6, Sampling(temperature=0), seed=0)))
    assert tokens.shape == (6, 3) and tokens.dtype == np.int32
    for row, prompt in enumerate(PROMPTS):
        text = np.concatenate([prompt, tokens[:, row]])
        best = whole(params, text)[len(prompt) - 1 : -1].argmax(-1)
        np.testing.assert_array_equal(tokens[:, row], best)


def test_a_seed_decides(params):
    generator = Generator(params, CFG, make_mesh())

    def draw(seed):
        return np.stack(list(generator.tokens(PROMPTS, 8, Sampling(), seed))).tolist()

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


SCORES = np.log(np.array([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]], np.float32))


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(), [{0, 1, 2, 3}, {0, 1, 2, 3}]),
        (Sampling(top_k=2), [{1, 3}, {0, 1, 2, 3}]),  # equal ones stay together
        (Sampling(top_p=0.69), [{1, 3}, {0}]),
        (Sampling(top_p=0.71), [{1, 2, 3}, None]),
        (Sampling(top_k=1), [{1}, {0}]),
        (Sampling(temperature=0), [{1}, {0}]),
        (Sampling(temperature=0.01), [{1}, {0}]),
    ],
)
def test_only_allowed_tokens_are_drawn_and_all_of_them(sampling, allowed):
    keys = jax.random.split(jax.random.key(0), 400)
    drawn = np.asarray(jax.vmap(lambda key: sample(jnp.asarray(SCORES), key, sampling))(keys))
    for row, tokens in enumerate(allowed):
        if tokens is not None:
            assert set(drawn[:, row].tolist()) == tokens


def test_drawn_tokens_have_their_probabilities():
    keys = jax.random.split(jax.random.key(1), 20000)
    warm = Sampling(temperature=2.0)
    drawn = np.asarray(jax.vmap(lambda key: sample(jnp.asarray(SCORES[:1]), key, warm))(keys))
    share = np.bincount(drawn[:, 0], minlength=4) / len(drawn)
    expected = np.exp(SCORES[0] / 2) / np.exp(SCORES[0] / 2).sum()
    assert np.abs(share - expected).max() < 0.015  # four standard deviations


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: needs"),
        ({"temperature": float("nan")}, "temperature=nan: needs"),
        ({"top_k": -1}, "top_k=-1: needs"),
        ({"top_p": 0.0}, "top_p=0.0: needs"),
        ({"top_p": 1.5}, "top_p=1.5: needs"),
    ],
)
def test_wrong_sampling_is_one_line(options, text):
    with pytest.raises(ValueError, match=text):
        Sampling(**options)


def test_an_empty_prompt_is_refused(params):
    with pytest.raises(ValueError, match="at least one token"):
        Generator(params, CFG, make_mesh()).prefill([np.zeros(0, np.int32)])
