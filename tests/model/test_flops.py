"""FLOPs per token against counts made by hand and by the compiler."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from model.config import ModelConfig
from model.ffn.swiglu import swiglu
from model.flops import key_flops_per_token, train_flops_per_token
from model.mixers.kda import recurrence_flops
from tests.model_cases import KDA, MIXED


def test_by_hand():
    cfg = ModelConfig(vocab_size=258)  # two layers: width 256, FFN 768, two heads of 128, rank 128
    qkvo, gates, beta = 4 * 256 * 256, 2 * (256 * 128 + 128 * 256), 256 * 2
    ffn, conv, head = 3 * 256 * 768, 4 * 3 * 256, 256 * 258
    state, inside, inverse = 6 * 128 * 128, 8 * 64 * 128, 2 / 3 * 64 * 64
    layer = 2 * (qkvo + gates + beta + ffn + conv) + 2 * (state + inside + inverse)
    assert train_flops_per_token(cfg) == pytest.approx(3 * (2 * layer + 2 * head), rel=1e-12)


def test_matrix_products_are_counted_as_the_compiler_counts_them():
    """One SwiGLU more costs what XLA says that its three products cost, forward and backward."""
    wide = dataclasses.replace(KDA, d_ff=KDA.d_ff + 64, num_repeats=1)
    narrow = dataclasses.replace(KDA, num_repeats=1)
    added = train_flops_per_token(wide) - train_flops_per_token(narrow)
    params = {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in params.items()}

    def step(x, params):
        return jax.grad(lambda x, params: swiglu(x, params).sum(), argnums=(0, 1))(x, params)

    x = jax.ShapeDtypeStruct((512, 32), jnp.float32)
    compiled = jax.jit(step).lower(x, params).compile().cost_analysis()["flops"] / 512
    assert added == pytest.approx(compiled, rel=0.1)  # XLA also counts elementwise work


def test_kda_is_the_same_for_every_length_and_attention_grows_with_it():
    assert key_flops_per_token(KDA, 1000.0) == 0
    one, two = (key_flops_per_token(MIXED, n) for n in (100.0, 200.0))
    assert one == 12 * 2 * 4 * 8 * 100 and two == 2 * one
    half_heads = dataclasses.replace(KDA, kda_heads=1)
    assert recurrence_flops(KDA) == 2 * recurrence_flops(half_heads)


def test_padding_of_the_vocabulary_and_tying_change_nothing():
    padded = dataclasses.replace(KDA, vocab_size=128)
    assert train_flops_per_token(padded) - train_flops_per_token(KDA) == 6 * 32 * (128 - 61)
    tied = dataclasses.replace(KDA, tie_embeddings=True)
    assert train_flops_per_token(tied) == train_flops_per_token(KDA)
