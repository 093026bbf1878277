"""Grouped products against a loop over groups in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.accuracy import CONVOLUTION_BFLOAT16
from kernels.grouped import grouped_matmul
from tests.model_cases import worst_error
from tests.tolerances import KDA_FLOAT32

ROWS, INPUT, OUTPUT = 300, 12, 20


def by_loop(x, weights, sizes, d_out):
    """(out, d_x, d_weights); zero after all groups."""
    x, weights, d_out = (np.asarray(a, np.float64) for a in (x, weights, d_out))
    out, d_x, d_weights = np.zeros((ROWS, OUTPUT)), np.zeros_like(x), np.zeros_like(weights)
    ends = np.cumsum(sizes)
    for group, (begin, end) in enumerate(zip(ends - sizes, ends)):
        out[begin:end] = x[begin:end] @ weights[group]
        d_x[begin:end] = d_out[begin:end] @ weights[group].T
        d_weights[group] = x[begin:end].T @ d_out[begin:end]
    return out, d_x, d_weights


@jax.jit
def ours(x, weights, sizes, d_out):
    out, pull = jax.vjp(lambda x, weights: grouped_matmul(x, weights, sizes), x, weights)
    return out, *pull(d_out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes", [(60, 0, 75, 3, 162), (0, 0, 300, 0, 0), (1, 128, 0, 129, 0), (0, 0, 0, 0, 0)]
)
def test_values_and_gradients_are_those_of_a_loop_over_groups(sizes, dtype):
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), dtype)  # noqa: E731
    x, weights, d_out = draw(ROWS, INPUT), draw(5, INPUT, OUTPUT), draw(ROWS, OUTPUT)
    found = ours(x, weights, jnp.asarray(sizes, jnp.int32), d_out)
    real = sum(sizes)  # rows after all groups are undefined
    expected = by_loop(x, weights, np.asarray(sizes), d_out)
    bound = KDA_FLOAT32 if dtype == "float32" else CONVOLUTION_BFLOAT16
    assert all(each.dtype == jnp.dtype(dtype) for each in found)
    cut = [(a[:real], b[:real]) for a, b in zip(found[:2], expected[:2])]
    for a, b in [*cut, (found[2], expected[2])]:
        assert worst_error(a, b)[0] < bound


def test_work_grows_with_rows_and_not_with_groups():
    """The compiled loop holds products of one block, whatever the number of groups."""
    for groups in (4, 64):
        shapes = [(1024, 32), (groups, 32, 48), (groups,)]
        kinds = [jnp.float32, jnp.float32, jnp.int32]
        arguments = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, kinds)]
        compiled = jax.jit(grouped_matmul).lower(*arguments).compile()
        assert compiled.cost_analysis()["flops"] < 2 * 2 * 128 * 32 * 48
