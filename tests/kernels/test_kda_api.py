"""The interface of `kda`: what it refuses, defaults, dtypes, choice of implementation, shapes."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from kernels.accuracy import KDA_BOUNDS_FLOAT32
from kernels.cases import error, ids_of
from kernels.kda import kda
from kernels.kda.cases import TOKENS, make_case, oracle
from kernels.segments import plan_segments
from kernels.select import choose
from tests.kernels.kda_cases import check, run
from tests.tolerances import KDA_BOUNDS_ROUNDED, KDA_SAME_ORDER

B, H, T, K, V = 2, 3, 10, 4, 5


def arguments(dtype=jnp.float32):
    token = (B, H, T)
    return {
        "q": jnp.ones((*token, K), dtype),
        "k": jnp.ones((*token, K), dtype),
        "v": jnp.ones((*token, V), dtype),
        "decay": -jnp.ones((*token, K)),
        "beta": jnp.ones(token),
    }


def segments(shape=(B, T), **options):
    return plan_segments(jnp.ones(shape, jnp.int32), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.ones((B, T, K))}, r"q must be \[B, H, T, K\] and not empty, got \(2, 10, 4\)"),
        ({"q": jnp.ones((B, H, 0, K))}, "not empty"),
        ({"k": jnp.ones((B, H, T, K + 1))}, r"k must be \(2, 3, 10, 4\) .* got \(2, 3, 10, 5\)"),
        ({"v": jnp.ones((B, H, T))}, r"v must be \[B, H, T, V\]"),
        ({"v": jnp.ones((B, H, T + 1, V))}, r"v must be \(2, 3, 10, 5\)"),
        ({"decay": jnp.ones((B, H, T))}, "decay must be"),
        ({"beta": jnp.ones((B, H, T, 1))}, r"beta must be \(2, 3, 10\)"),
        ({"q": jnp.ones((B, H, T, K), jnp.bfloat16)}, "q, k, v must share a dtype, got bfloat16"),
        (
            {"decay": jnp.ones((B, H, T, K), jnp.int32)},
            "decay must be float32 or bfloat16, got int32",
        ),
        (
            {"beta": jnp.ones((B, H, T), jnp.float16)},
            "beta must be float32 or bfloat16, got float16",
        ),
        ({"initial_state": jnp.ones((B, H, K, V))}, r"initial_state must be \[B, N, H, K, V\]"),
        ({"initial_state": jnp.ones((B, 0, H, K, V))}, "N >= 1"),
        ({"initial_state": jnp.ones((B, 1, H, V, K))}, r"= \(2, N >= 1, 3, 4, 5\), got"),
        (
            {"initial_state": jnp.ones((B, 1, H, K, V), jnp.bfloat16)},
            "initial_state must be float32, got bfloat16",
        ),
        (
            {"default_initial_state": jnp.ones((B, H, K, V))},
            r"default_initial_state must be \(3, 4, 5\)",
        ),
        ({"a_log": jnp.ones(H + 1)}, r"a_log must be \(3,\)"),
        ({"a_log": jnp.ones(H), "dt_bias": jnp.ones(H * K)}, r"dt_bias must be \(3, 4\)"),
        ({"dt_bias": jnp.ones((H, K))}, "dt_bias is part of the gate and needs a_log"),
        ({"lower_bound": -1.0}, "lower_bound bounds the gate and needs a_log"),
        ({"a_log": jnp.ones(H), "lower_bound": -5.1}, "-5 <= lower_bound < 0, got -5.1"),
        ({"a_log": jnp.ones(H), "lower_bound": 0.0}, "-5 <= lower_bound < 0, got 0.0"),
        ({"final_state": "every"}, r"final_state must be one of \['none', 'last', 'all'\]"),
        ({"state_policy": "keep"}, r"state_policy must be one of \['save', 'remat'\], got 'keep'"),
        ({"implementation": "triton"}, "implementation must be None or one of"),
        ({"scale": jnp.ones(())}, "scale must be a finite number"),
        ({"scale": float("nan")}, "scale must be a finite number, got nan"),
        ({"v": None}, "v must be an array, got NoneType"),
        ({"initial_state": [0.0]}, "initial_state must be an array, got list"),
        ({"axis_name": "rows"}, "axis_name must be a mesh axis of the .* got 'rows'"),
        ({"segments": jnp.ones((B, T), jnp.int32)}, r"come from plan_segments\(segment_ids\), got"),
        ({"segments": segments((B, T + 1))}, r"\[B, T\] = \(2, 10\), got \(2, 11\)"),
        (
            {"segments": segments(), "final_state": "all"},
            r"needs plan_segments\(..., max_segments=",
        ),
    ],
)
def test_refuses_in_one_line_before_tracing(change, message):
    with pytest.raises(ValueError, match=message) as refusal:
        kda(**(arguments() | change))
    assert str(refusal.value).startswith("kda: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("implementation", ["chunked", "recurrent"])
def test_dtypes_and_shapes_of_results(implementation):
    for dtype in (jnp.float32, jnp.bfloat16):
        for final, shape in {"none": None, "last": (B, H, K, V), "all": (B, 3, H, K, V)}.items():
            plan = segments(max_segments=3)
            out, state = jax.eval_shape(
                lambda args, plan=plan, final=final: kda(
                    **args, segments=plan, final_state=final, implementation=implementation
                ),
                arguments(dtype),
            )
            assert (out.shape, out.dtype) == ((B, H, T, V), dtype)
            assert state is None or (state.shape, state.dtype) == (shape, jnp.float32)
            assert (state is None) == (final == "none")


def test_defaults():
    """No segments: a row is one segment, also for final_state="all"; the scale is K^-1/2."""
    case = make_case(np.ones((1, 40), np.int32), final="last")
    tokens = [case.arrays[n] for n in TOKENS]
    out, every = jax.jit(lambda *x: kda(*x, qk_l2norm=True, final_state="all"))(*tokens)
    given = run(case, scale=0.25)
    assert error(out, given.out) < KDA_SAME_ORDER
    assert every.shape == (1, 1, 2, 16, 16)
    assert error(every[:, 0], given.final) < KDA_SAME_ORDER


def test_rows_with_more_segments_than_the_bound_are_nan():
    ids = ids_of([(10, 1), (10, 2), (20, 3)], [(40, 1)])
    case = make_case(ids, final="all", max_segments=2)
    result = run(case)
    assert np.all(np.isnan(result.final[0]))
    assert np.all(np.isfinite(result.final[1]))
    # Outputs never depend on the bound.
    np.testing.assert_array_equal(result.out, run(make_case(ids)).out)


def test_recurrent_and_chunked_are_asked_for_by_name():
    case = make_case(np.ones((1, 70), np.int32))
    chunked, recurrent = (run(case, implementation=n) for n in ("chunked", "recurrent"))
    assert np.any(chunked.out != recurrent.out)  # different orders of summing: both ran
    assert error(chunked.out, recurrent.out) < KDA_BOUNDS_FLOAT32["out"]


def test_choice_follows_the_mesh():
    assert choose(None) == "chunked"
    assert choose("recurrent") == "recurrent"
    kind = jax.sharding.AbstractDevice(device_kind="TPU7x", num_cores=1, platform="tpu")
    mesh = AbstractMesh((2,), ("context",), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        assert choose(None) == "mosaic_tpu"
        assert choose("chunked") == "chunked"


def test_cpu_never_loads_pallas():
    """Neither by importing the kernels nor by running them on CPU."""
    import subprocess

    code = (
        "import jax.numpy as jnp, sys; from kernels.kda import kda; x = jnp.ones((1, 1, 2, 2)); "
        "from kernels.segments import whole_row; from kernels.short_conv import short_conv; "
        "kda(x, x, x, -x, x[..., 0]); short_conv(x[0], jnp.ones((3, 2)), whole_row(1, 2)); "
        "found = [m for m in sys.modules if 'pallas' in m or 'kernels' in m and 'tpu' in m]; "
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# B, T, H, K, V. Odd sizes, one head, K and V different, shorter than a tile and than a convolution.
SHAPES = [
    (1, 1, 2, 16, 16),
    (2, 2, 1, 8, 8),
    (1, 63, 1, 64, 64),
    (2, 64, 4, 16, 32),
    (1, 128, 2, 128, 64),
    (1, 64, 1, 129, 127),
]
LONG_SHAPES = [
    (2, 500, 3, 60, 60),
    (1, 128, 2, 16, 16),
    (1, 128, 2, 64, 128),
    (1, 256, 2, 256, 256),
    (2, 1000, 3, 64, 64),
    (4, 128, 4, 32, 32),
    (1, 8192, 2, 128, 128),  # heads are independent: two of sixteen
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    _check_shape(shape, "float32", KDA_BOUNDS_FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", LONG_SHAPES, ids=str)
def test_long_shapes(shape, dtype):
    _check_shape(
        shape, dtype, {"float32": KDA_BOUNDS_FLOAT32, "bfloat16": KDA_BOUNDS_ROUNDED}[dtype]
    )


def _check_shape(shape, dtype, bounds):
    rows, length, heads, keys, values = shape
    ids = np.ones((rows, length), np.int32)
    case = make_case(ids, heads=heads, keys=keys, values=values, dtype=dtype, gate="bounded")
    check(run(case), oracle(case), bounds)


PACKINGS = {
    "(30, 50)": ids_of([(30, 1), (50, 2)]),
    "(45, 80, 20) padded to 256": ids_of([(45, 1), (80, 2), (20, 3), (111, 0)]),
    "(100) padded to 192": ids_of([(100, 1), (92, 0)]),
    "(15)": ids_of([(15, 1)]),
    "(256, 244, 500)": ids_of([(256, 1), (244, 2), (500, 3)]),
    "(15, 85, 200, 900, 800)": ids_of([(15, 1), (85, 2), (200, 3), (900, 4), (800, 5)]),
    "two rows": ids_of([(100, 1), (156, 2)], [(17, 1), (3, 2), (200, 3), (36, 0)]),
    "tokens": ids_of([(1, i + 1) for i in range(70)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PACKINGS)
def test_packings(name, dtype):
    case = make_case(PACKINGS[name], keys=64, values=64, dtype=dtype, gate="softplus", slots=2)
    bounds = {"float32": KDA_BOUNDS_FLOAT32, "bfloat16": KDA_BOUNDS_ROUNDED}[dtype]
    check(run(case), oracle(case), bounds)
