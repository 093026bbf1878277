"""The short convolution against sums over taps selected by a plain loop, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.accuracy import CONVOLUTION_FLOAT32
from kernels.cases import error, ids_of
from kernels.segments import plan_segments
from kernels.short_conv import short_conv
from kernels.short_conv.cases import call_of, example, oracle, with_gradients

# Segments longer and shorter than the width, one token long, across every rank edge; padding
# leading, interior, trailing, inside a segment, over whole ranks; an empty row.
IDS = ids_of(
    [(2, 0), (3, 4), (1, 0), (1, 4), (2, 9), (7, 1), (6, 0), (10, 1)],
    [(32, 3)],
    [(32, 0)],
    [(1, 2), (1, 3), (1, 4), (20, 6), (9, 0)],
    [(17, 0), (15, 5)],
)


@functools.cache
def compiled(ranks, check_vma, activation, with_tail, implementation="chunked"):
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("context",)) if ranks > 1 else None
    call = call_of(mesh, activation, implementation, with_tail=with_tail, check_vma=check_vma)
    return jax.jit(with_gradients(call))


@pytest.mark.parametrize(
    ("ranks", "check_vma", "activation"),
    [(1, True, "silu"), (1, True, None), (2, True, "silu"), (4, False, "silu"), (8, True, "silu")],
)
def test_equals_the_sum_over_picked_taps(ranks, check_vma, activation):
    x, weight, tail, cotangents = example(IDS)
    value, grads = compiled(ranks, check_vma, activation, True)(x, weight, tail, IDS, cotangents)
    wanted, wanted_grads = oracle(x, weight, tail, IDS, activation, cotangents)
    for got, want in zip((*value, *grads), (*wanted, *wanted_grads)):
        assert error(got, np.asarray(want)) < CONVOLUTION_FLOAT32
    assert not np.any(np.asarray(value[0])[IDS == 0])
    assert not np.any(np.asarray(grads[0])[IDS == 0])


@pytest.mark.parametrize("width", [1, 2, 4, 6])
def test_pieces_shorter_than_the_halo(width):
    """Eight ranks of two tokens: a halo of up to five positions comes from three ranks back."""
    ids = IDS[:, 8:24]
    x, weight, tail, cotangents = example(ids, width)
    value, grads = compiled(8, True, "silu", True)(x, weight, tail, ids, cotangents)
    wanted, wanted_grads = oracle(x, weight, tail, ids, "silu", cotangents)
    for got, want in zip((*value, *grads), (*wanted, *wanted_grads)):
        if want.size:
            assert error(got, np.asarray(want)) < CONVOLUTION_FLOAT32


@pytest.mark.parametrize("ranks", [1, 4])
def test_without_a_tail_the_row_starts_from_nothing(ranks):
    x, weight, tail, cotangents = example(IDS, with_tail=False)
    value, _ = compiled(ranks, True, "silu", False)(x, weight, tail + 1, IDS, cotangents)
    wanted, _ = oracle(x, weight, tail, IDS, "silu", cotangents)
    assert error(value[0], np.asarray(wanted[0])) < CONVOLUTION_FLOAT32


@pytest.mark.parametrize("cut", [1, 2, 3, 8, 15])
def test_cutting_a_row_and_carrying_the_tail_changes_nothing(cut):
    x, weight, _, _ = example(IDS[1:2, :16])
    ids = jnp.ones((1, 16), jnp.int32)
    whole, tail = short_conv(x, weight, plan_segments(ids))
    head, carried = short_conv(x[:, :cut], weight, plan_segments(ids[:, :cut]))
    rest, end = short_conv(x[:, cut:], weight, plan_segments(ids[:, cut:]), tail=carried)
    np.testing.assert_array_equal(jnp.concatenate([head, rest], 1), whole)
    np.testing.assert_array_equal(end, tail)


@pytest.mark.parametrize("ranks", [1, 4])
def test_streams_together_are_streams_alone(ranks):
    """With different channels and separate heads; they share one exchange between ranks."""
    ids, channels = jnp.asarray(IDS), {"k": 6, "q": 4}
    streams = {n: example(IDS, channels=d, seed=d) for n, d in channels.items()}
    x, weight, tail = ({n: s[i] for n, s in streams.items()} for i in range(3))
    axis = "context" if ranks > 1 else None

    def run(x, weight, tail, ids):
        segments = plan_segments(ids, axis)
        return short_conv(x, weight, segments, heads=2, tail=tail, axis_name=axis)

    if ranks > 1:
        token, by_head = P(None, "context"), P(None, None, "context")
        mesh = Mesh(np.array(jax.devices()[:ranks]), ("context",))
        run = jax.shard_map(
            run, mesh=mesh, in_specs=(token, P(), P(), token), out_specs=(by_head, P())
        )
    run = jax.jit(run)
    y, end = run(x, weight, tail, ids)
    for name, d in channels.items():
        alone = run(x[name], weight[name], tail[name], ids)
        np.testing.assert_array_equal(y[name], alone[0])
        np.testing.assert_array_equal(end[name], alone[1])
        wanted = oracle(*streams[name][:3], IDS, "silu", streams[name][3])[0]
        wanted_y = np.moveaxis(np.asarray(wanted[0]).reshape(*IDS.shape, 2, d // 2), 2, 1)
        assert error(y[name], wanted_y) < CONVOLUTION_FLOAT32
        assert error(end[name], np.asarray(wanted[1])) < CONVOLUTION_FLOAT32


def test_one_document_does_not_see_another():
    ids = ids_of([(5, 1), (6, 2), (5, 3)])
    x, weight, _, _ = example(ids)
    segments = plan_segments(jnp.asarray(ids))
    changed = x.copy()
    changed[:, 5:11] += 1
    y, other = (short_conv(t, weight, segments)[0] for t in (x, changed))
    np.testing.assert_array_equal(y[:, :5], other[:, :5])
    np.testing.assert_array_equal(y[:, 11:], other[:, 11:])
    assert np.all(np.asarray(y[:, 5:11]) != np.asarray(other[:, 5:11]))


def test_padding_may_hold_anything():
    x, weight, _, _ = example(IDS)
    segments = plan_segments(jnp.asarray(IDS))
    bad = np.where((IDS == 0)[..., None], np.nan, x)

    def loss(x, weight):
        y, tail = short_conv(x, weight, segments)
        return jnp.sum(y**2) + jnp.sum(tail)

    clean, dirty = (jax.grad(loss, (0, 1))(t, weight) for t in (x, bad))
    for want, got in zip(clean, dirty):
        np.testing.assert_array_equal(got, want)


def test_bfloat16_is_summed_in_float32():
    x, weight, _, _ = example(IDS)
    x = jnp.asarray(x, jnp.bfloat16)
    segments = plan_segments(jnp.asarray(IDS))
    y, tail = short_conv(x, weight, segments)
    exact, _ = short_conv(x.astype(jnp.float32), weight, segments)
    assert y.dtype == tail.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.ones((4, 3))}, r"x must be \[B, T, D\] and weight \[W, D\]"),
        (
            {"tail": np.ones((1, 2, 5))},
            r"tail must be \[B, W - 1, D\] = \(5, 3, 5\), got \(1, 2, 5\)",
        ),
        ({"activation": "gelu"}, "activation must be \"silu\" or None, got 'gelu'"),
        ({"x": np.ones((5, 31, 5))}, r"segments must be planned for \[B, T\] = \(5, 31\)"),
        ({"heads": 2}, "heads must divide D = 5, got 2"),
        ({"heads": 0}, "heads must divide D = 5, got 0"),
    ],
)
def test_refuses_what_does_not_fit(change, message):
    x, weight, tail, _ = example(IDS)
    options = {"x": x, "weight": weight, "tail": tail, "activation": "silu"} | change
    with pytest.raises(ValueError, match=message):
        short_conv(segments=plan_segments(jnp.asarray(IDS)), **options)


def test_refuses_streams_of_different_taps():
    (x, four, _, _), (_, two, _, _) = example(IDS), example(IDS, width=2)
    with pytest.raises(ValueError, match=r"weights must have equally many taps, got 2 and 4"):
        short_conv({"a": x, "b": x}, {"a": two, "b": four}, plan_segments(jnp.asarray(IDS)))
