"""Blockwise context-parallel attention against the whole matrix of scores in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from model.attention import context_attention
from tests.model_cases import make_mesh, row, worst_error
from tests.tolerances import ATTENTION_BFLOAT16, MODEL_FLOAT32

T = 48
SEGMENTS = np.stack(
    [
        row((1, 10), (2, 15), (0, 3), (2, 4), (3, 1), (4, 15)),  # padding inside a segment
        row((0, 5), (7, 30), (0, 13)),  # leading and trailing, longer than a rank of four
        row((0, T)),
    ]
)
HEADS = {"grouped": (2, 2), "one head": (1, 1), "one key for three": (1, 3)}


def order(segment_ids: np.ndarray) -> np.ndarray:
    """Segment numbers in order of the row, -1 at padding: written apart from kernels/segments."""
    out = np.full(segment_ids.shape, -1, np.int32)
    for b, ids in enumerate(segment_ids):
        known: list[int] = []
        for t, number in enumerate(ids):
            if number and number not in known:
                known.append(number)
            out[b, t] = known.index(number) if number else -1
    return out


def make_inputs(heads: tuple[int, int], dtype="float32"):
    groups, members = heads
    random = np.random.default_rng(0)
    shapes = [(3, groups, members, T, 8), (3, groups, T, 8), (3, groups, T, 8)]
    shapes.append(shapes[0])  # the output's cotangent
    return tuple(jnp.asarray(2 * random.normal(size=shape), dtype) for shape in shapes)


def naive(q, k, v, index):
    """Scores [B, G, M, T, T] at once."""
    score = jnp.einsum("bgmqd,bgsd->bgmqs", q, k) / np.sqrt(q.shape[-1])
    seen = (index[:, :, None] == index[:, None]) & (index >= 0)[:, :, None]
    seen = (seen & np.tri(T, dtype=bool))[:, None, None]
    score = jnp.where(seen, score, -jnp.inf)
    top = jnp.max(jnp.where(seen, score, -1e3), axis=-1, keepdims=True)
    weight = jnp.where(seen, jnp.exp(score - top), 0)
    total = weight.sum(-1, keepdims=True)
    return jnp.einsum("bgmqs,bgsd->bgmqd", weight / jnp.where(total > 0, total, 1), v)


@functools.cache
def expected(name: str):
    """(out, gradients) in float64."""
    with jax.enable_x64(True):
        q, k, v, d_out = (jnp.asarray(np.asarray(x, np.float64)) for x in make_inputs(HEADS[name]))
        out, pull = jax.vjp(lambda q, k, v: naive(q, k, v, order(SEGMENTS)), q, k, v)
        return jax.tree.map(np.asarray, (out, pull(d_out)))


def run(name: str, ranks: int, block: int, dtype="float32"):
    mesh = make_mesh(context=ranks)
    tokens = P(None, None, "context")
    attend = jax.shard_map(
        lambda q, k, v, index: context_attention(q, k, v, index, block, ranks),
        mesh=mesh,
        in_specs=(P(None, None, None, "context"), tokens, tokens, P(None, "context")),
        out_specs=P(None, None, None, "context"),
    )

    @jax.jit
    def step(q, k, v, d_out):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, order(SEGMENTS)), q, k, v)
        return out, pull(d_out)

    return step(*make_inputs(HEADS[name], dtype))


@pytest.mark.parametrize(
    ("name", "ranks", "block"),
    [
        ("grouped", 1, 7),  # blocks that do not divide the row
        ("one head", 1, 16),
        ("one key for three", 1, 500),  # one block, cut to the row
        ("grouped", 2, 7),
        ("one key for three", 4, 4),
        ("grouped", 4, 12),
    ],
)
def test_values_and_gradients(name, ranks, block):
    error, where = worst_error(run(name, ranks, block), expected(name))
    assert error < MODEL_FLOAT32, where


def test_padding_gives_exactly_zero_and_gets_no_gradient():
    out, (dq, dk, dv) = run("grouped", 2, 8)
    padding = SEGMENTS == 0
    for x in (out, dq):
        assert not np.moveaxis(np.asarray(x), 3, 1)[padding].any()
    for x in (dk, dv):
        assert not np.moveaxis(np.asarray(x), 2, 1)[padding].any()


def test_bf16_keeps_its_softmax_in_float32():
    error, where = worst_error(run("grouped", 2, 8, "bfloat16"), expected("grouped"))
    assert error < ATTENTION_BFLOAT16, where


def test_memory_is_linear_in_the_row_length():
    """Scores of 4096 tokens squared would be 16 times those of 1024, and 64 MiB a head."""

    def peak(length):
        shape = jax.ShapeDtypeStruct((1, 1, 1, length, 16), jnp.float32)
        keys = jax.ShapeDtypeStruct((1, 1, length, 16), jnp.float32)

        def loss(q, k, v):
            index = jnp.zeros((1, length), jnp.int32)
            return context_attention(q, k, v, index, 64, 1).sum()

        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        return step.lower(shape, keys, keys).compile().memory_analysis().temp_size_in_bytes

    assert peak(4096) < 4.2 * peak(1024)
