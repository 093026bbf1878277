"""Generation is the training form, token by token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.config import ModelConfig
from model.decoder import forward, init_carry
from model.generate import Generator, Sampling, sample
from model.loss import logits
from tests.compiling import fast_jit
from tests.model_cases import KDA, VOCABULARY, make_mesh, make_params, worst_error
from tests.tolerances import MODEL_FLOAT32

CFG = dataclasses.replace(KDA, learned_initial_state=True)
HYBRID = dataclasses.replace(
    CFG,
    pattern="kda, mla",
    mla_heads=4,
    mla_kv_rank=20,
    mla_nope_dim=12,
    mla_rope_dim=6,
    mla_value_dim=10,
)
ROTATED = dataclasses.replace(HYBRID, mla_rotation_base=50.0, mla_output_gate=True)
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(0, VOCABULARY, n).astype(np.int32) for n in (1, 37, 64)]
NEW = RANDOM.integers(0, VOCABULARY, (5, len(PROMPTS))).astype(np.int32)


@functools.cache
def training_form(cfg: ModelConfig):
    """jitted (params, tokens [B, T], segment_ids) -> logits [B, T, V] of whole rows."""
    mesh = make_mesh()

    def run(params, tokens, ids):
        start, carry = jnp.zeros(len(tokens), bool), init_carry(cfg, len(tokens))
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _, _ = forward(params, cfg, tokens, ids, start, carry, mesh, positions)
        return logits(params, cfg, hidden, mesh)

    return fast_jit(run)


def whole(params, texts: list[np.ndarray], cfg: ModelConfig = CFG) -> list[np.ndarray]:
    """Logits [T, V] of each text as a row in one piece, by the form that trains."""
    tokens, ids = np.zeros((2, len(PROMPTS), 80), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)], ids[row, : len(text)] = text, 1
    scores = np.asarray(training_form(cfg)(params, tokens, ids))
    return [scores[row, : len(text)] for row, text in enumerate(texts)]


@pytest.fixture(scope="module")
def params():
    return make_params(CFG, slow=True)


def expected(params, cfg: ModelConfig) -> np.ndarray:
    """Logits [1 + 5, B, V] after each prompt and after each new token."""
    rows = [np.concatenate([prompt, NEW[:, row]]) for row, prompt in enumerate(PROMPTS)]
    scores = [row[-1 - len(NEW) :] for row in whole(params, rows, cfg)]
    return np.stack(scores, axis=1)


@pytest.mark.parametrize(
    ("cfg", "piece", "tensor"), [(CFG, 16, 1), (HYBRID, 512, 2), (ROTATED, 16, 1)]
)
def test_prefill_in_pieces_and_tokens_one_by_one_have_the_logits_of_the_whole_row(
    cfg, piece, tensor
):
    """The longest prompt has four pieces of 16, and a row that trains may be shorter."""
    params = make_params(cfg, slow=True)
    generator = Generator(params, cfg, make_mesh(tensor=tensor), piece, attention_memory=80)
    done = generator.prefill(PROMPTS)
    found = [np.asarray(done.logits)]
    for tokens in NEW:
        done = generator.append(done, jnp.asarray(tokens))
        found.append(np.asarray(done.logits))
    for number, (scores, wanted) in enumerate(zip(found, expected(params, cfg), strict=True)):
        error, _ = worst_error(scores, wanted)
        assert error < MODEL_FLOAT32, (number, error)


def test_greedy_tokens_are_the_most_likely_of_the_whole_row(params):
    generator = Generator(params, CFG, make_mesh(), 16)
    tokens = np.stack(
        list(generator.tokens(generator.prefill(PROMPTS), 6, Sampling(temperature=0), seed=0))
    )
    assert tokens.shape == (6, 3) and tokens.dtype == np.int32
    texts = [np.concatenate([prompt, tokens[:, row]]) for row, prompt in enumerate(PROMPTS)]
    for row, scores in enumerate(whole(params, texts)):
        best = scores[len(PROMPTS[row]) - 1 : -1].argmax(-1)
        np.testing.assert_array_equal(tokens[:, row], best)


def test_a_seed_decides(params):
    generator = Generator(params, CFG, make_mesh())

    def draw(seed):
        return np.stack(
            list(generator.tokens(generator.prefill(PROMPTS), 8, Sampling(), seed))
        ).tolist()

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
