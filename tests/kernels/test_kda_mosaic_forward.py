"""The forward TPU kernel, interpreted on CPU, against the recurrence in float64.

In the interpreter unwritten memory is NaN and races are detected, so anything read before it is
written is found. Lengths are short (interpreting takes seconds per case) but cross chunk edges, and
there are pairs, odd numbers and single heads. test_kda_mosaic_backward.py tests gradients.
"""

import numpy as np
import pytest

from kernels.accuracy import KDA_BOUNDS_BFLOAT16, KDA_BOUNDS_FLOAT32
from kernels.cases import ids_of
from kernels.kda.cases import make_case, oracle, with_narrow_decay
from tests.compiling import interpreted
from tests.kernels import kda_cases
from tests.kernels.kda_cases import check
from tests.tolerances import KDA_BOUNDS_NEAR_KEYS

BOUNDS = {"float32": KDA_BOUNDS_FLOAT32, "bfloat16": KDA_BOUNDS_BFLOAT16}
FULL = {"keys": 128, "values": 128}
NARROW = {"keys": 32, "values": 32}
ONE = ids_of([(192, 1)])


def run(case, **options):
    with interpreted():
        return kda_cases.forward(case, implementation="mosaic_tpu", **options)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


PROFILES = {
    "random": {},
    "strong": {"decay": "strong"},
    "near keys": {"same_keys": True, "key_noise": 0.05, "beta": 1.0},
    "same keys": {"same_keys": True, "beta": 1.0, "decay": "none"},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("strong", "bfloat16")]
    + [slow(name, "bfloat16") for name in PROFILES if name != "strong"]
    + [slow(name, "float32") for name in PROFILES],
)
def test_profiles(name, dtype):
    case = make_case(ONE, **FULL, dtype=dtype, final="last", **PROFILES[name])
    case = with_narrow_decay(case) if dtype == "bfloat16" else case
    near = name.endswith("keys") and dtype == "bfloat16"
    result, reference = run(case), oracle(case)
    if name == "same keys" and near:  # there the state itself is a small difference
        result, reference = result._replace(final=None), reference._replace(final=None)
    check(result, reference, KDA_BOUNDS_NEAR_KEYS if near else BOUNDS[dtype])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "length"), [({"decay": "slow", "beta": 1.0}, 512), ({"positive": True}, 192)]
)
def test_profiles_in_which_roundings_add_up(options, length):
    """Slow decay with beta = 1: all rounding errors of the state remain in it. All q and k
    positive: scores times new values is a small difference of large sums."""
    case = make_case(ids_of([(length, 1)]), **FULL, dtype="bfloat16", final="last", **options)
    case = with_narrow_decay(case)
    check(run(case), oracle(case), KDA_BOUNDS_BFLOAT16)


@pytest.mark.parametrize(
    ("rows", "heads", "length", "keys", "values"),
    [
        (1, 1, 63, 64, 64),  # one head, less than a chunk, channels padded
        (2, 3, 100, 60, 60),  # a pair of heads from two rows of the batch
        slow(1, 2, 128, 128, 256),  # V of two lane tiles
        slow(1, 2, 64, 256, 128),
        slow(3, 2, 65, 16, 32),
        slow(1, 2, 1, 128, 128),  # one token
    ],
)
def test_shapes(rows, heads, length, keys, values):
    ids = np.ones((rows, length), np.int32)
    case = make_case(
        ids, heads=heads, keys=keys, values=values, slots=1, final="last", qk_l2norm=False
    )
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    case.arrays.update({n: unit(case.arrays[n]) for n in ("q", "k")})
    check(run(case), oracle(case), KDA_BOUNDS_FLOAT32)


@pytest.mark.slow
def test_many_groups_and_steps():
    """More pairs than one group, more chunks than one step: 17 pairs go one by one."""
    case = make_case(ids_of([(128, 1)]), heads=34)
    check(run(case), oracle(case), KDA_BOUNDS_FLOAT32)


@pytest.mark.parametrize(
    ("gate", "dtype"),
    [
        ("softplus", "bfloat16"), slow("softplus", "float32"), slow("bounded", "bfloat16"),
        ("bounded", "float32"),
    ],
)  # fmt: skip
def test_gates(gate, dtype):
    case = make_case(ids_of([(128, 1)]), heads=3, keys=64, values=64, gate=gate, dtype=dtype)
    case = with_narrow_decay(case) if dtype == "bfloat16" else case
    check(run(case), oracle(case), BOUNDS[dtype])


PACKINGS = {
    "edges inside chunks": ids_of([(30, 1), (2, 2), (63, 3), (1, 4), (34, 5), (62, 6)]),
    "padding everywhere": ids_of(
        [(20, 0), (30, 7), (50, 0), (20, 7), (3, 0), (10, 9), (59, 0)],
    ),
    "a chunk of padding": ids_of([(64, 2), (64, 0), (64, 5)]),
    "all padding": ids_of([(192, 0)]),
}


@pytest.mark.parametrize(
    ("name", "slots"),
    [("padding everywhere", 1), *(slow(name, 0) for name in PACKINGS)],
)
def test_packed_rows_in_one_pass(name, slots):
    case = make_case(PACKINGS[name], **NARROW, slots=slots, final="last")
    result, reference = run(case), oracle(case)
    check(result, reference, KDA_BOUNDS_FLOAT32)
    assert (result.out[:, :, case.ids[0] == 0] == 0).all()


STARTS = [(0, True), (2, False), (9, True), (2, True)]


@pytest.mark.parametrize(
    ("name", "slots", "start"),
    [("edges inside chunks", 2, True), slow("edges inside chunks", 9, True)]
    + [slow(name, *starts) for name in list(PACKINGS)[1:] for starts in STARTS],
)
def test_start_states_and_all_final_states(name, slots, start):
    ids = np.concatenate([PACKINGS[name], PACKINGS["edges inside chunks"][:, ::-1]])
    case = make_case(ids, heads=1, **NARROW, slots=slots, start=start, final="all", max_segments=7)
    check(run(case), oracle(case), KDA_BOUNDS_FLOAT32)


@pytest.mark.slow
def test_pieces_in_bfloat16():
    case = make_case(
        PACKINGS["edges inside chunks"], **FULL, dtype="bfloat16", slots=3, start=True,
        final="all", max_segments=6,
    )  # fmt: skip
    case = with_narrow_decay(case)
    check(run(case), oracle(case), KDA_BOUNDS_BFLOAT16)


@pytest.mark.parametrize("t", [100, slow(127), slow(64), slow(21)])
def test_a_prefix_is_causal_bit_for_bit(t):
    case = make_case(ids_of([(128, 1)]), **FULL, dtype="bfloat16", decay="strong")
    case = with_narrow_decay(case)
    before = run(case).out
    decay, k = case.arrays["decay"], case.arrays["k"]
    changed = {"decay": decay.at[:, :, t].add(-3), "k": k.at[:, :, t].multiply(-1)}
    after = run(case._replace(arrays=case.arrays | changed)).out
    assert np.array_equal(before[:, :, :t], after[:, :, :t])
    assert not np.array_equal(before[:, :, t:], after[:, :, t:])


@pytest.mark.slow
def test_a_changed_head_leaves_the_others_alone():
    """Heads share products: a head of large numbers must not affect its neighbour."""
    case = make_case(ids_of([(64, 1)]), heads=3, **FULL, dtype="bfloat16")
    before = run(case).out
    large = case.arrays["v"].at[:, 1].multiply(1e30)
    after = run(case._replace(arrays=case.arrays | {"v": large})).out
    assert np.array_equal(before[:, [0, 2]], after[:, [0, 2]])
