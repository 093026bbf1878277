"""Attention against the whole matrix of scores in float64: values, gradients, carried keys."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kernels.accuracy import ATTENTION_BFLOAT16
from kernels.attention import Memory, attention, attention_reference
from kernels.attention.cases import Case, make_inputs, oracle, step_of
from kernels.attention.ranks import balance, line_of, pieces, restore
from kernels.cases import number
from kernels.segments import plan_segments
from tests.compiling import interpreted
from tests.model_cases import make_mesh, row, worst_error
from tests.tolerances import MODEL_FLOAT32

KEYS = P(None, None, "context")
TOKENS = P(None, "context")


T = 48
ROWS = (
    row((1, 10), (2, 15), (0, 3), (2, 4), (3, 1), (4, 15)),  # padding inside a segment
    row((0, 5), (7, 30), (0, 13)),  # leading and trailing, longer than a rank of four
    row((0, T)),
)
WHOLE = (row((1, T)), row((1, 1), (2, T - 1)), row((3, 20), (0, 28)))
CASES = {
    "grouped": Case(ROWS, (4, 2)),
    "one head": Case(ROWS, (1, 1)),
    "one key for three": Case(ROWS, (3, 1)),
    "memory": Case((*ROWS, *WHOLE), (4, 2), memory=20),
    "long memory": Case((*ROWS, *WHOLE), (2, 1), memory=4 * T),
    "one token": Case((row((1, 1)), row((0, 1)), row((3, 1))), (4, 2), memory=20),
    "one token alone": Case((row((1, 1)), row((0, 1))), (3, 1)),
}
TPU_ROWS = (row((1, 100), (2, 500), (0, 24), (3, 400)), row((0, 300), (1, 724)))
TPU_CASES = {
    "grouped": Case(TPU_ROWS, (4, 2), size=128),
    "narrow": Case((row((1, 1000), (0, 24)),), (2, 2), size=64),
    "wide": Case((row((1, 300), (2, 724)),), (2, 1), size=256),
    "memory": Case(TPU_ROWS, (2, 1), size=64, memory=200),
}


@functools.cache
def expected(case_name: str, tpu: bool = False):
    """See `oracle`."""
    return oracle((TPU_CASES if tpu else CASES)[case_name])


def make_step(case: Case, ranks: int, block: int, implementation: str):
    """See `step_of`; jitted, on a mesh of `ranks`."""
    return jax.jit(step_of(case, make_mesh(context=ranks), block, implementation))


def run(case_name: str, ranks: int, block: int, dtype="float32"):
    case = CASES[case_name]
    name = "one_query" if case.ids.shape[1] == 1 else "blockwise"
    return make_step(case, ranks, block, name)(*make_inputs(case, dtype))


def test_the_reference_by_hand():
    """Two heads of one key; the second token is another segment, the third sees the first."""
    q = jnp.asarray([[[[1.0], [2.0], [3.0]], [[1.0], [1.0], [0.0]]]])
    k, v = jnp.asarray([[[[1.0], [5.0], [2.0]]]]), jnp.asarray([[[[10.0], [20.0], [30.0]]]])
    index = jnp.asarray([[0, -1, 0]])
    out = attention_reference(q, k, v, index, index)
    first = (10 * np.exp(3) + 30 * np.exp(6)) / (np.exp(3) + np.exp(6))
    np.testing.assert_allclose(out[0, :, :, 0], [[10, 0, first], [10, 0, 20]], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "ranks", "block"),
    [
        ("grouped", 1, 7),  # blocks that do not divide the row
        ("one head", 1, 16),
        ("one key for three", 1, 500),  # one block, cut to the row
        ("grouped", 2, 7),
        ("one key for three", 4, 4),
        ("grouped", 4, 12),
        ("grouped", 3, 3),
        ("memory", 1, 9),
        ("memory", 2, 9),
        ("memory", 4, 500),
        ("long memory", 4, 16),
        ("one token", 1, 16),
        ("one token alone", 1, 16),
    ],
)
def test_values_and_gradients(name, ranks, block):
    error, where = worst_error(run(name, ranks, block)[:2], expected(name))
    assert error < MODEL_FLOAT32, where


def test_padding_gives_exactly_zero_and_gets_no_gradient():
    out, (dq, dk, dv, *_), _ = run("grouped", 2, 8)
    padding = CASES["grouped"].ids == 0
    for x in (out, dq, dk, dv):
        assert not np.moveaxis(np.asarray(x), 2, 1)[padding].any()


@pytest.mark.parametrize(("name", "ranks"), [("grouped", 2), ("memory", 4)])
def test_bf16_keeps_its_softmax_in_float32(name, ranks):
    error, where = worst_error(run(name, ranks, 8, "bfloat16")[:2], expected(name))
    assert error < ATTENTION_BFLOAT16, where


def test_one_token_in_bf16():
    """Values and gradients, at the rounded inputs: the token's own key has a gradient that is small
    beside those of the keys before it, and that rounded inputs alone would change by a percent."""
    found = run("one token", 1, 8, "bfloat16")[:2]
    error, where = worst_error(found, oracle(CASES["one token"], "bfloat16"))
    assert error < ATTENTION_BFLOAT16, where


@pytest.mark.parametrize(
    ("name", "ranks"), [("memory", 1), ("memory", 2), ("memory", 4), ("one token", 1)]
)
def test_the_next_memory_is_the_end_of_the_last_segment(name, ranks):
    """Against a token-by-token search; rows without tokens have nothing valid."""
    case = CASES[name]
    arrays, valid = make_inputs(case)
    after = run(name, ranks, 16)[2]
    k = np.concatenate([np.asarray(arrays[3]), np.asarray(arrays[1])], 2)
    for b, ids in enumerate(case.ids):
        index = np.concatenate([np.where(valid[b], 0, -1), number(ids)[0]])
        last = number(ids)[0].max()
        kept = [t for t, number in enumerate(index) if last >= 0 and number == last]
        kept = [t for t in kept if t > kept[-1] - case.memory]
        np.testing.assert_array_equal(after.k[b][:, after.valid[b]], k[b][:, kept])
        assert not kept or after.valid[b, -1]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_have_equal_work_under_causality(ranks):
    """A rank has an early and a late piece, of equal total work; results return to their ranks."""
    token = jnp.arange(ranks * 12)

    def exchange(token):
        line = line_of("context")
        held = balance(line, token, 0)
        return held, restore(line, held, 0), jnp.stack(pieces(line))

    held, back, numbers = jax.shard_map(
        exchange, mesh=make_mesh(context=ranks), in_specs=P("context"), out_specs=P("context")
    )(token)
    np.testing.assert_array_equal(back, token)
    assert (numbers.reshape(ranks, 2).sum(1) == 2 * ranks - 1).all()
    np.testing.assert_array_equal(held.reshape(-1, 6) // 6, numbers[:, None].repeat(6, 1))


STREAM = np.concatenate([row((1, 30), (2, 100), (0, 14)), row((3, 70), (4, 74))])


def attend_in_rows(arrays, rows: int, memory: int, ranks: int):
    """The stream's outputs, cut into rows of a memory each."""
    axis_name = "context" if ranks > 1 else None

    def attend(q, k, v, before, ids):
        segments = plan_segments(ids, axis_name)
        return attention(q, k, v, segments, memory=before, axis_name=axis_name, block=16)

    specs = Memory(KEYS, KEYS, TOKENS)
    island = jax.shard_map(
        attend,
        mesh=make_mesh(context=ranks),
        in_specs=(KEYS, KEYS, KEYS, specs, TOKENS),
        out_specs=(KEYS, specs),
    )
    before_k = jnp.zeros((1, 2, memory, 8))
    before = Memory(before_k, before_k, jnp.zeros((1, memory), bool))
    outs, last_id = [], 0
    for ids, *streams in zip(
        np.split(STREAM[None], rows, 1), *(jnp.split(x, rows, 2) for x in arrays)
    ):
        present = ids[ids != 0]
        before = before._replace(valid=before.valid & bool(present[0] == last_id))
        out, before = island(*streams, before, jnp.asarray(ids, jnp.int32))
        outs.append(out)
        last_id = present[-1]
    return jnp.concatenate(outs, 2)


@functools.cache
def stream_gradients(rows: int, memory: int, ranks: int):
    """(outputs, gradients) of the stream in rows; the gradient flows through the memories."""
    random = np.random.default_rng(1)
    shapes = [(1, heads, len(STREAM), 8) for heads in (4, 2, 2)]
    arrays = [jnp.asarray(2 * random.normal(size=shape), jnp.float32) for shape in shapes]

    @jax.jit
    def step(*arrays):
        out, pull = jax.vjp(lambda *x: attend_in_rows(x, rows, memory, ranks), *arrays)
        return out, pull(jnp.sin(3 * out))

    return step(*arrays)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_with_memory_equal_one_long_row(ranks):
    """Rows of 48 of a document of 100, one of which starts in the first row and ends in the third;
    the memory covers two rows."""
    error, where = worst_error(stream_gradients(6, 96, ranks), stream_gradients(1, 4, 1))
    assert error < MODEL_FLOAT32, where


def test_a_memory_that_is_too_short_shows():
    error, _ = worst_error(stream_gradients(6, 48, 1), stream_gradients(1, 4, 1))
    assert error > 1e-2


@pytest.mark.parametrize(
    ("name", "ranks", "block"),
    [("grouped", 2, 256), ("narrow", 4, 128), ("wide", 1, 512), ("memory", 2, 128)],
)
def test_tpu_kernels_interpreted(name, ranks, block):
    case = TPU_CASES[name]
    with interpreted():
        found = make_step(case, ranks, block, "mosaic_tpu")(*make_inputs(case))
        found = jax.tree.map(np.asarray, found)
    error, where = worst_error(found[:2], expected(name, tpu=True))
    assert error < MODEL_FLOAT32, where


def layers_loss(length: int):
    """Gradient of three scanned and rematerialised layers of attention, and its abstract inputs."""
    x = jax.ShapeDtypeStruct((1, 1, length, 16), jnp.float32)
    ids = jnp.ones((1, length), jnp.int32)

    def loss(x, weights):
        segments = plan_segments(ids)

        def layer(x, weight):
            return x + attention(x * weight, x, x, segments, block=64)[0], None

        return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, weights)[0].sum()

    return jax.grad(loss), (x, jax.ShapeDtypeStruct((3,), jnp.float32))


def test_memory_is_linear_in_the_row_length_in_rematerialised_layers():
    """Masks of all pairs of blocks would be 16 MB at 4096 tokens, and 16 times those of 1024."""

    def temporary(length):
        step, inputs = layers_loss(length)
        return jax.jit(step).lower(*inputs).compile().memory_analysis().temp_size_in_bytes

    assert temporary(4096) < 4.2 * temporary(1024)


def test_no_array_holds_all_pairs_of_blocks():
    """In the jaxpr, before XLA: known values must not be split off and saved."""
    step, inputs = layers_loss(2048)
    shapes = re.findall(r"\w\[([\d,]+)\]", str(jax.make_jaxpr(step)(*inputs)))
    assert max(math.prod(map(int, shape.split(","))) for shape in shapes) < 2048 * 2048 / 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k": jnp.zeros((1, 3, 4, 8))}, "G a divisor of H"),
        ({"q": jnp.zeros((1, 4, 4, 16))}, "agree in B, T and d"),
        ({"block": 0}, "block must be >= 1"),
        ({"implementation": "flash"}, "one of"),
        ({"memory": Memory(*[jnp.zeros((1, 2, 3, 8))] * 2, jnp.zeros((1, 4)) > 0)}, "memory must"),
    ],
)
def test_errors_say_what_does_not_fit(change, says):
    arguments = {"q": jnp.zeros((1, 4, 4, 8)), "k": jnp.zeros((1, 2, 4, 8)), "block": 4} | change
    arguments["v"] = arguments["k"]
    with pytest.raises(ValueError, match=says):
        attention(segments=plan_segments(jnp.ones((1, 4), jnp.int32)), **arguments)
