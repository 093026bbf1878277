"""The chunked form against the recurrence in float64: values, gradients, exact properties."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.accuracy import KDA_BOUNDS_FLOAT32
from kernels.cases import error, ids_of
from kernels.kda import kda
from kernels.kda.cases import TOKENS, Case, make_case, oracle
from kernels.kda.chunked import chunk_math, layout
from kernels.kda.problem import CHUNK
from kernels.segments import plan_segments
from tests.compiling import fast_jit
from tests.kernels.kda_cases import check, run
from tests.tolerances import KDA_BOUNDS_ROUNDED, KDA_SAME_ORDER

BOUNDS = {"float32": KDA_BOUNDS_FLOAT32, "bfloat16": KDA_BOUNDS_ROUNDED}
# 300 tokens are 5 tiles. Segments start and end inside tiles, at tile edges (64, 128), several in
# one tile; ids skip, repeat and fall; padding leads, trails and stands inside and between segments.
PACKED = ids_of(
    [(7, 0), (30, 3), (27, 1), (10, 0), (90, 1), (1, 9), (1, 2), (70, 5), (20, 0), (44, 4)],
    [(64, 2), (64, 7), (40, 0), (60, 7), (72, 1)],
)
ONE = np.ones_like(PACKED)
STATES = {"slots": 2, "start": True, "final": "all", "max_segments": 9}


@pytest.mark.parametrize(
    ("gate", "dtype", "policy"),
    [
        pytest.param("given", "float32", "remat", marks=pytest.mark.slow),
        ("softplus", "float32", "remat"),
        ("bounded", "float32", "save"),
        pytest.param("bounded", "bfloat16", "remat", marks=pytest.mark.slow),
        pytest.param("softplus", "bfloat16", "save", marks=pytest.mark.slow),
    ],
)
def test_packed_documents_with_states(gate, dtype, policy):
    case = make_case(PACKED, gate=gate, dtype=dtype, **STATES, state_policy=policy)
    check(run(case), _oracle_without_policy(case), BOUNDS[dtype])


def _oracle_without_policy(case: Case):
    options = {n: x for n, x in case.options.items() if n != "state_policy"}
    return oracle(case._replace(options=options))


# One compilation for each dtype; what varies is data.
PROFILES = [
    {},
    {"beta": 0.0},  # nothing is written
    {"beta": 1.0},
    {"decay": "none"},  # the plain delta rule
    {"decay": "none", "beta": 1.0, "same_keys": True},  # breaks a Neumann series of 64 terms
    {"decay": "strong"},  # -1000: forgets everything before
    {"decay": "ten"},
    {"decay": "twelve"},
    {"decay": "lower bound"},
    {"decay": "beyond float32"},  # forgotten keys must not come back
]


@pytest.mark.parametrize("ids", [ONE, PACKED], ids=["one", "packed"])
@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_decay_and_beta_profiles(profile, ids):
    case = make_case(ids, **profile, slots=1, final="last")
    check(run(case), oracle(case), KDA_BOUNDS_FLOAT32)


@pytest.mark.parametrize("profile", [PROFILES[5], PROFILES[6]], ids=str)
def test_strong_decay_in_bfloat16(profile):
    case = make_case(PACKED, dtype="bfloat16", **profile, slots=1, final="last")
    check(run(case), oracle(case), KDA_BOUNDS_ROUNDED)


@pytest.mark.slow
@pytest.mark.parametrize("profile", [{"decay": "slow", "beta": 1.0}, {"positive": True}], ids=str)
def test_roundings_that_add_up_in_bfloat16(profile):
    """See test_kda_mosaic_forward.py."""
    ids = ids_of([(512, 1)])
    case = make_case(ids, keys=128, values=128, dtype="bfloat16", **profile, final="last")
    check(run(case), oracle(case), KDA_BOUNDS_ROUNDED)


def test_identical_keys_in_bfloat16():
    case = make_case(PACKED, dtype="bfloat16", **PROFILES[4], slots=1, final="last")
    check(run(case), oracle(case), KDA_BOUNDS_ROUNDED)


def test_strong_raw_gate():
    case = make_case(PACKED, gate="softplus", decay="strong raw", **STATES, state_policy="remat")
    case.arrays["a_log"] = jnp.full_like(case.arrays["a_log"], 2.7)
    check(run(case), _oracle_without_policy(case), KDA_BOUNDS_FLOAT32)


def test_several_steps_and_groups_are_one_walk(monkeypatch):
    case = make_case(PACKED, **STATES, state_policy="remat")
    wide = run(case)
    monkeypatch.setattr(layout, "STEP_CHUNKS", 1)
    narrow = run(case, scale=16**-0.5)  # the default, passed explicitly: compiled again
    assert error(narrow.out, wide.out) < KDA_SAME_ORDER
    assert error(narrow.final, wide.final) < KDA_SAME_ORDER
    check(narrow, _oracle_without_policy(case), KDA_BOUNDS_FLOAT32)


def test_inverse_of_identical_keys_is_exact():
    """(I + L)^-1 for L of ones is the difference matrix."""
    levels = [2**i for i in range(CHUNK.bit_length() - 1)]
    below = [jnp.ones((CHUNK // (2 * n), n, n)) for n in levels]
    np.testing.assert_array_equal(chunk_math.solve(below), np.eye(CHUNK) - np.eye(CHUNK, k=-1))


# --- exact properties
# ------------------------------------------------------------------------------


@functools.cache
def _values():
    """Jitted (arrays, ids, d_out) -> (out, last state, gradients of tokens)."""

    def function(arrays, ids, d_out):
        def call(arrays):
            rest = {n: x for n, x in arrays.items() if n not in TOKENS}
            return kda(
                *(arrays[n] for n in TOKENS), plan_segments(ids), **rest, qk_l2norm=True,
                final_state="last", implementation="chunked",
            )  # fmt: skip

        (out, last), pull = jax.vjp(call, arrays)
        return out, last, pull((d_out, jnp.zeros_like(last)))[0]

    return fast_jit(function)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("t", [0, 63, 64, 77, 160, 299])
def test_a_prefix_is_causal_bit_for_bit(t, dtype):
    """Changing token t changes no output before it, and no gradient of those outputs."""
    case = make_case(ONE, dtype=dtype)
    d_out = np.array(case.d_out)
    d_out[:, :, t:] = 0
    changed = dict(case.arrays)
    for name, other in make_case(ONE, dtype=dtype, seed=1, decay="strong").arrays.items():
        changed[name] = changed[name].at[:, :, t].set(3 * other[:, :, t])
    function = _values()
    d_out = jnp.asarray(d_out, dtype)
    out, _, gradients = function(case.arrays, case.ids, d_out)
    out_changed, _, gradients_changed = function(changed, case.ids, d_out)
    np.testing.assert_array_equal(out[:, :, :t], out_changed[:, :, :t])
    for name in TOKENS:
        before = gradients[name][:, :, :t], gradients_changed[name][:, :, :t]
        np.testing.assert_array_equal(*before, err_msg=name)
        assert not np.any(np.asarray(gradients_changed[name][:, :, t:], np.float32)), name
    assert np.any(np.asarray(out[:, :, t:] != out_changed[:, :, t:]))


def test_only_the_last_tokens_gate_changes_nothing_earlier():
    """bf16, H = 4, T = 22."""
    case = make_case(np.ones((1, 22), np.int32), heads=4, dtype="bfloat16")
    changed = case.arrays | {"decay": case.arrays["decay"].at[:, :, -1].set(-9.0)}
    function, d_out = _values(), jnp.asarray(case.d_out, jnp.bfloat16)
    out, other = (function(x, case.ids, d_out)[0] for x in (case.arrays, changed))
    np.testing.assert_array_equal(out[:, :, :-1], other[:, :, :-1])
    assert np.any(np.asarray(out[:, :, -1] != other[:, :, -1]))


def test_documents_do_not_see_each_other_bit_for_bit():
    """Changing a document changes no output and no gradient of another, however slow the decay."""
    case = make_case(PACKED, decay="none")
    row, changed = 0, dict(case.arrays)
    ids = PACKED[row]
    other = make_case(PACKED, decay="strong", seed=1).arrays
    mine = np.cumsum(np.diff(ids, prepend=0) != 0)  # runs
    span = (ids == 1) & (mine < 9)
    for name in TOKENS:
        changed[name] = changed[name].at[row, :, span].set(other[name][row, :, span])
    function = _values()
    out, _, gradients = function(case.arrays, PACKED, case.d_out)
    out_changed, _, gradients_changed = function(changed, PACKED, case.d_out)
    np.testing.assert_array_equal(out[row][:, ~span], out_changed[row][:, ~span])
    for name in TOKENS:
        np.testing.assert_array_equal(
            gradients[name][row][:, ~span], gradients_changed[name][row][:, ~span], err_msg=name
        )
    assert np.any(np.asarray(out[row][:, span] != out_changed[row][:, span]))


def test_padding_is_transparent_and_may_hold_anything():
    case = make_case(PACKED)
    function = _values()
    padding = (PACKED == 0)[:, None, :, None]
    bad = {n: jnp.where(padding[..., 0] if n == "beta" else padding, jnp.nan, x)
           for n, x in case.arrays.items()}  # fmt: skip
    d_out = jnp.where(padding, jnp.nan, case.d_out)
    clean, dirty = function(case.arrays, PACKED, case.d_out), function(bad, PACKED, d_out)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert not np.any(np.where(padding, clean[0], 0))
    for name in TOKENS:
        mask = padding[..., 0] if name == "beta" else padding
        assert not np.any(np.where(mask, clean[2][name], 0)), name


def test_ids_are_names_not_numbers():
    case = make_case(PACKED)
    renamed = np.where(PACKED, 1000 - 7 * PACKED, 0)
    function = _values()
    jax.tree.map(
        np.testing.assert_array_equal,
        function(case.arrays, PACKED, case.d_out), function(case.arrays, renamed, case.d_out),
    )  # fmt: skip


def test_interior_padding_does_not_decay_the_state():
    """A masked span inside a segment equals the segment without the span."""
    ids = ids_of([(30, 1), (70, 0), (50, 1)])
    case = make_case(ids, decay="lower bound")
    keep = np.flatnonzero(ids[0])
    short = {n: x[:, :, keep] for n, x in case.arrays.items()}
    out, last, gradients = _values()(case.arrays, ids, case.d_out)
    out_s, last_s, gradients_s = _values()(short, ids[:, keep], case.d_out[:, :, keep])
    assert error(out[:, :, keep], np.asarray(out_s)) < KDA_BOUNDS_FLOAT32["out"]
    assert error(last, np.asarray(last_s)) < KDA_BOUNDS_FLOAT32["out"]
    for name in TOKENS:
        wanted = np.asarray(gradients_s[name])
        assert error(gradients[name][:, :, keep], wanted) < KDA_BOUNDS_FLOAT32["gradient"], name


def test_packing_equals_running_alone_and_order_does_not_matter():
    lengths = [100, 37, 64, 1, 98]
    case = make_case(ids_of([(n, i + 1) for i, n in enumerate(lengths)]))
    packed, _, _ = _values()(case.arrays, case.ids, case.d_out)
    edges = np.cumsum([0, *lengths])
    spans = [np.arange(a, b) for a, b in itertools.pairwise(edges)]
    order = [3, 1, 4, 0, 2]
    moved = np.concatenate([spans[i] for i in order])
    permuted = {n: x[:, :, moved] for n, x in case.arrays.items()}
    out, _, _ = _values()(permuted, case.ids[:, moved], case.d_out)
    assert error(out, np.asarray(packed[:, :, moved])) < KDA_BOUNDS_FLOAT32["out"]
    alone = np.ones((5, 100), np.int32) * (np.arange(100) < np.array(lengths)[:, None])
    batch = {
        n: jnp.stack([jnp.zeros_like(x[0, :, :100]).at[:, : len(s)].set(x[0][:, s]) for s in spans])
        for n, x in case.arrays.items()
    }
    out, _, _ = _values()(batch, alone, jnp.zeros((5, 2, 100, 16)))
    for i, span in enumerate(spans):
        wanted = np.asarray(packed[0][:, span])
        assert error(out[i, :, : len(span)], wanted) < KDA_BOUNDS_FLOAT32["out"], i


@pytest.mark.parametrize("cut", [64, 100])
def test_cutting_anywhere_and_carrying_the_state_equals_not_cutting(cut):
    case = make_case(ONE, slots=1, final="last")
    whole = run(case)

    @fast_jit
    def attend(arrays, state):
        return kda(
            *arrays, initial_state=state, final_state="last", qk_l2norm=True,
            implementation="chunked",
        )  # fmt: skip

    def part(span, state):
        return attend([case.arrays[n][:, :, span] for n in TOKENS], state)

    head, state = part(slice(0, cut), case.arrays["initial_state"])
    rest, last = part(slice(cut, None), state[:, None])
    bound = KDA_BOUNDS_FLOAT32["out"]
    assert error(np.concatenate([head, rest], 2), whole.out) < bound
    assert error(last, whole.final) < bound


def test_zero_beta_only_decays_the_state():
    case = make_case(ONE, beta=0.0, slots=1, final="last")
    total = np.sum(np.asarray(case.arrays["decay"], np.float64), 2)
    wanted = np.exp(total)[..., None] * np.asarray(case.arrays["initial_state"])[:, 0]
    assert error(run(case).final, wanted) < KDA_BOUNDS_FLOAT32["out"]


def test_every_segment_empty():
    """Rows of padding: zero output and gradients, and the initial states come back."""
    case = make_case(np.zeros_like(PACKED), **STATES, state_policy="remat")
    result, reference = run(case), _oracle_without_policy(case)
    assert not np.any(result.out)
    np.testing.assert_array_equal(result.final, reference.final)
    for name in TOKENS:
        assert not np.any(result.gradients[name]), name
    for name in ("initial_state", "default_initial_state"):
        assert error(result.gradients[name], reference.gradients[name]) < 1e-6
