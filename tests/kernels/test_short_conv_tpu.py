"""The convolution's TPU kernels, interpreted on CPU, against float64 sums over selected taps; and
compiled for absent TPUs. Unwritten memory is NaN in the interpreter."""

import functools
import os

os.environ.update(
    TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1"
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from benchmarks.short_conv_tpu import RANKS, build
from kernels.accuracy import CONVOLUTION_BFLOAT16, CONVOLUTION_FLOAT32
from kernels.cases import error
from kernels.segments import plan_segments
from kernels.short_conv import short_conv
from kernels.short_conv import tpu as short_conv_tpu
from kernels.short_conv.cases import example, oracle
from tests.compiling import interpreted
from tests.kernels.test_short_conv import IDS, compiled


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Two tiles in 32 tokens."""
    monkeypatch.setattr(short_conv_tpu, "STRIP", 16)
    monkeypatch.setattr(short_conv_tpu, "TILE", 16)


def run(ids, ranks=1, activation="silu", width=4, channels=5, dtype=np.float32):
    """(values and gradients, those of the oracle)."""
    x, weight, tail, cotangents = example(ids, width, channels=channels)
    x, tail, *cotangents = (np.asarray(jnp.asarray(a, dtype)) for a in (x, tail, *cotangents))
    with interpreted():
        function = compiled(ranks, True, activation, True, "mosaic_tpu")
        found = jax.block_until_ready(function(x, weight, tail, ids, tuple(cotangents)))
    return found, oracle(x, weight, tail, ids, activation, cotangents)


def check(found, wanted, bound):
    (value, grads), (wanted_value, wanted_grads) = found, wanted
    for got, want in zip((*value, *grads), (*wanted_value, *wanted_grads)):
        if want.size:
            assert error(got, np.asarray(want)) < bound


@pytest.mark.parametrize(
    ("ranks", "activation"), [(1, "silu"), (1, None), (4, "silu")], ids=["one", "no silu", "ranks"]
)
def test_equals_the_sum_over_picked_taps(ranks, activation):
    found, wanted = run(IDS, ranks, activation)
    check(found, wanted, CONVOLUTION_FLOAT32)
    assert not np.any(np.asarray(found[0][0])[IDS == 0])
    assert not np.any(np.asarray(found[1][0])[IDS == 0])


@pytest.mark.parametrize("width", [1, 2, 8])
def test_widths_and_a_last_tile_that_is_not_whole(width):
    ids = np.concatenate([IDS, IDS[:, 5:14]], axis=1)
    found, wanted = run(ids, width=width, channels=300)
    check(found, wanted, CONVOLUTION_FLOAT32)


def test_bfloat16_is_summed_in_float32():
    found, wanted = run(IDS, channels=256, dtype=jnp.bfloat16)
    assert found[0][0].dtype == found[1][0].dtype == jnp.bfloat16
    check(found, wanted, CONVOLUTION_BFLOAT16)


def test_padding_may_hold_anything():
    x, weight, tail, cotangents = example(IDS)
    padding = (IDS == 0)[..., None]
    with interpreted():
        function = compiled(1, True, "silu", True, "mosaic_tpu")
        clean = function(x, weight, tail, IDS, cotangents)
        bad = np.where(padding, np.nan, cotangents[0]), cotangents[1]
        dirty = function(np.where(padding, np.nan, x), weight, tail, IDS, bad)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


@pytest.mark.parametrize(
    ("channels", "heads"),
    [(10, 2), (512, 4), (768, 2), (1024, 1)],
    ids=["no whole lanes", "heads of a block", "blocks of 128 lanes", "blocks of a head"],
)
def test_heads_are_the_same_numbers_in_another_place(channels, heads):
    x, weight, tail, (d_y, _) = example(IDS, channels=channels)
    segments = plan_segments(jnp.asarray(IDS))

    def by_head(y):
        return jnp.moveaxis(y.reshape(*IDS.shape, heads, -1), 2, 1)

    def run(x, weight, tail, d_y, heads):
        def call(*arrays):
            x, weight, tail = arrays
            options = {"tail": tail, "heads": heads, "implementation": "mosaic_tpu"}
            return short_conv(x, weight, segments, **options)[0]

        y, pull = jax.vjp(call, x, weight, tail)
        return y, pull(d_y)

    with interpreted():
        y, gradients = jax.jit(functools.partial(run, heads=heads))(x, weight, tail, by_head(d_y))
        wanted, wanted_gradients = jax.jit(functools.partial(run, heads=None))(x, weight, tail, d_y)
    np.testing.assert_array_equal(y, by_head(wanted))
    jax.tree.map(np.testing.assert_array_equal, gradients, wanted_gradients)


def test_more_taps_than_the_kernels_see_are_refused():
    x, weight, tail, _ = example(IDS, width=9)
    with pytest.raises(ValueError, match="at most 8 taps for the TPU kernels, got 9"):
        short_conv(
            x, weight, plan_segments(jnp.asarray(IDS)), tail=tail, implementation="mosaic_tpu"
        )


@pytest.mark.parametrize("topology", ["tpu7x:2x2x1", "v6e:2x2", "v5p:2x2x1", "v5e:2x2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compiles_for_tpus(topology, dtype, monkeypatch):
    """Both kernels on a context axis of four, at the sizes the product uses; and no array of
    float32 as large as the inputs is left in between."""
    monkeypatch.undo()
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    function, arguments = build(devices, None, (2, 4096, 768), 3, dtype)
    done = function.lower(*arguments).compile()
    text = done.as_text()
    assert "short_conv_forward" in text and "short_conv_backward" in text
    x = arguments[0]
    local = x.size // RANKS * x.dtype.itemsize
    assert done.memory_analysis().temp_size_in_bytes < 2 * local
