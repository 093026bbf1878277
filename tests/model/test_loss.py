"""The chunked loss against the whole matrix of logits in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.loss import loss_sums, token_scores
from model.params import param_shardings
from tests.model_cases import KDA, VOCABULARY, make_mesh, make_params, worst_error
from tests.tolerances import MODEL_FLOAT32, MODEL_FLOAT32_GRADIENT

B, T = 4, 20
RANDOM = np.random.default_rng(0)
HIDDEN = RANDOM.normal(size=(B, T, KDA.d_model)).astype(np.float32)
TARGETS = RANDOM.integers(0, VOCABULARY, (B, T)).astype(np.int32)
WEIGHTS = RANDOM.choice([0.0, 0.5, 1.0], (B, T)).astype(np.float32)
WEIGHTS[1] = 0  # a row, and one of four row ranks, without a real token
TIED = dataclasses.replace(KDA, tie_embeddings=True)


@functools.cache
def params_of_kind(tied: bool):
    return make_params(TIED if tied else KDA)


def params_of(cfg):
    return params_of_kind(cfg.tie_embeddings)


# So that some are correct: the head's own choice at some places.
TARGETS[:, :7] = (HIDDEN @ np.asarray(params_of(KDA)["head"])[:, :VOCABULARY]).argmax(-1)[:, :7]


def head_of(cfg, params):
    return params["embedding"].T if cfg.tie_embeddings else params["head"]


@functools.cache
def expected(cfg, z: float):
    """((nll, z, correct), (d_hidden, d_head)) in float64 for the loss nll + z * z_sum."""
    with jax.enable_x64(True):
        head = np.asarray(head_of(cfg, params_of(cfg)), np.float64)[:, :VOCABULARY]

        def sums(hidden, head):
            scores = hidden @ head
            lse = jax.nn.logsumexp(scores, axis=-1)
            hit = jnp.take_along_axis(scores, TARGETS[..., None], axis=-1)[..., 0]
            correct = jnp.sum(WEIGHTS * (scores.argmax(-1) == TARGETS))
            return jnp.sum(WEIGHTS * (lse - hit)), jnp.sum(WEIGHTS * lse**2), correct

        def loss(hidden, head):
            nll, square, _ = sums(hidden, head)
            return nll + z * square

        hidden = jnp.asarray(np.asarray(HIDDEN, np.float64))
        grads = jax.grad(loss, argnums=(0, 1))(hidden, jnp.asarray(head))
        return jax.tree.map(np.asarray, (sums(hidden, head), grads))


@functools.cache
def compiled(cfg, **mesh_sizes):
    mesh = make_mesh(**mesh_sizes)

    @jax.jit
    def step(params, hidden, weights, z):
        def loss(params, hidden):
            sums = loss_sums(params, cfg, hidden, TARGETS, weights, mesh)
            return sums.nll + z * sums.z, sums

        return jax.grad(loss, argnums=(1, 0), has_aux=True)(params, hidden)

    params = jax.device_put(params_of(cfg), param_shardings(cfg, mesh))
    return functools.partial(step, params)


def check(cfg, mesh, z=0.1):
    (d_hidden, d_params), sums = compiled(cfg, **mesh)(HIDDEN, WEIGHTS, z)
    values, (expected_hidden, expected_head) = expected(cfg, z)
    assert worst_error(tuple(sums), values)[0] < MODEL_FLOAT32
    assert worst_error(d_hidden, expected_hidden)[0] < MODEL_FLOAT32_GRADIENT
    d_head = np.asarray(head_of(cfg, d_params))
    assert worst_error(d_head[:, :VOCABULARY], expected_head)[0] < MODEL_FLOAT32_GRADIENT
    assert not d_head[:, VOCABULARY:].any()  # the padded vocabulary learns nothing
    return d_hidden


@pytest.mark.parametrize(
    "mesh",
    [{}, pytest.param({"context": 2, "tensor": 2, "data": 2}, marks=pytest.mark.slow)],
)
def test_scores_of_tokens_are_what_sums_add_up(mesh):
    """Every token's own numbers, in chunks that do not divide the tokens."""
    cfg, made = dataclasses.replace(KDA, loss_chunk=7), make_mesh(**mesh)
    params = jax.device_put(params_of(cfg), param_shardings(cfg, made))
    nats, correct = jax.jit(lambda p, x, y: token_scores(p, cfg, x, y, made))(
        params, HIDDEN, TARGETS
    )
    scores = np.asarray(HIDDEN, np.float64) @ np.asarray(params_of(cfg)["head"], np.float64)
    scores = scores[..., :VOCABULARY]
    hit = np.take_along_axis(scores, TARGETS[..., None], -1)[..., 0]
    expected_nats = np.log(np.exp(scores).sum(-1)) - hit
    assert worst_error(nats, expected_nats)[0] < MODEL_FLOAT32
    assert np.array_equal(correct, scores.argmax(-1) == TARGETS) and 20 < correct.sum() < 60


@pytest.mark.parametrize("chunk", [1, 7, 24, 80, 1000])
def test_chunks(chunk):
    d_hidden = check(dataclasses.replace(KDA, loss_chunk=chunk), {})
    assert not np.asarray(d_hidden)[WEIGHTS == 0].any()


@pytest.mark.parametrize("z", [0.0, 1.0])
def test_tied_head_and_z(z):
    check(TIED, {}, z)


@pytest.mark.parametrize(
    "mesh",
    [
        {"context": 4},
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"fsdp": 4, "context": 2},
        {"tensor": 2},
    ],
)
def test_every_mesh_has_one_global_sum(mesh):
    check(KDA, mesh)


def test_tied_head_on_a_mesh():
    check(TIED, {"fsdp": 2, "context": 2, "tensor": 2})


def test_no_real_token_at_all_is_finite():
    (d_hidden, _), sums = compiled(KDA, context=4)(HIDDEN, np.zeros_like(WEIGHTS), 0.1)
    assert sums.nll == 0 and sums.z == 0
    assert not np.asarray(d_hidden).any()


def test_large_logits_do_not_overflow():
    (d_hidden, _), sums = compiled(KDA)(1e3 * HIDDEN, WEIGHTS, 0.0)
    assert np.isfinite(sums.nll) and np.isfinite(d_hidden).all()


def test_logits_of_one_chunk_exist_at_one_time():
    """Four times the tokens must not need four times the logits, forward and backward."""
    cfg = dataclasses.replace(KDA, vocab_size=2**14, loss_chunk=32)
    mesh = make_mesh()
    params = {"head": jax.ShapeDtypeStruct((cfg.d_model, cfg.padded_vocab_size), jnp.float32)}

    def peak(tokens):
        shape = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        hidden = jax.ShapeDtypeStruct((1, tokens, cfg.d_model), jnp.float32)
        weights = jax.ShapeDtypeStruct((1, tokens), jnp.float32)

        def loss(params, hidden, targets, weights):
            return loss_sums(params, cfg, hidden, targets, weights, mesh).nll

        step = jax.jit(jax.grad(loss, argnums=(0, 1)))
        compiled = step.lower(params, hidden, shape, weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    chunk = cfg.loss_chunk * cfg.padded_vocab_size * 4
    assert peak(1024) - peak(256) < chunk / 2
