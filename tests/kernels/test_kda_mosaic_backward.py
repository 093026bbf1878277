"""The backward TPU kernel, interpreted on CPU, against gradients of the recurrence in float64.

In the interpreter unwritten memory is NaN and races are detected, so anything read too early is
found. A case takes seconds to compile: profiles that differ only in their numbers share one, and a
case covers several features at once.
"""

import numpy as np
import pytest

from kernels.accuracy import KDA_BOUNDS_BFLOAT16, KDA_BOUNDS_FLOAT32
from kernels.cases import ids_of
from kernels.kda.cases import TOKENS, make_case, oracle, with_narrow_decay
from kernels.kda.tpu import backward_kernel
from tests.compiling import interpreted
from tests.kernels import kda_cases
from tests.kernels.kda_cases import check
from tests.tolerances import KDA_BOUNDS_NEAR_KEYS

SLOW_BFLOAT16 = pytest.param("bfloat16", marks=pytest.mark.slow)
BOUNDS = {"float32": KDA_BOUNDS_FLOAT32, "bfloat16": KDA_BOUNDS_BFLOAT16}


def case_of(ids, **options):
    """make_case with K = V = 64: bf16 bounds are meant for sums over that many channels."""
    return make_case(ids, **({"keys": 64, "values": 64} | options))


def run(case, **options):
    with interpreted():
        return kda_cases.run(case, implementation="mosaic_tpu", **options)


def zero_at_padding(case, result):
    for name in TOKENS:
        found = np.moveaxis(result.gradients[name], 2, 1)[case.ids == 0]
        assert (found == 0).all(), name


@pytest.mark.parametrize("profile", ["mild", "strong", "positive", "same keys"])
def test_profiles_bfloat16(profile):
    same = profile == "same keys"
    case = case_of(
        ids_of([(150, 1)]), dtype="bfloat16",
        decay={"same keys": "none", "positive": "mild"}.get(profile, profile),
        same_keys=same, positive=profile == "positive", beta=1.0 if same else None,
    )  # fmt: skip
    case = with_narrow_decay(case)
    check(run(case), oracle(case), KDA_BOUNDS_NEAR_KEYS if same else KDA_BOUNDS_BFLOAT16)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1.0, 2.0**-30])
def test_beta_zero_keeps_its_gradient(size):
    """The kernel knows e only from v_new = beta e: a plain 0 or an underflow would lose it."""
    case = case_of(ids_of([(150, 1)]), dtype="bfloat16", beta=0.0)
    case = with_narrow_decay(case)._replace(d_out=case.d_out * size)
    reference = oracle(case)
    assert np.abs(reference.gradients["beta"]).max() > 0.1 * size
    check(run(case), reference, KDA_BOUNDS_BFLOAT16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_softplus_with_last_state(dtype):
    """Starts inside, at the beginning of and after chunks, padding everywhere, two rows that
    differ."""
    ids = ids_of(
        [(3, 0), (40, 2), (21, 5), (64, 4), (10, 0), (9, 4), (25, 9)],
        [(64, 1), (1, 2), (70, 3), (37, 0)],
    )
    case = case_of(ids, heads=3, dtype=dtype, gate="softplus", slots=1, final="last")
    result = run(case)
    check(result, oracle(case), BOUNDS[dtype])
    zero_at_padding(case, result)


@pytest.mark.parametrize("dtype", ["float32", SLOW_BFLOAT16])
def test_packed_bounded_with_all_states(dtype):
    """Every segment has its own start state and its final state a cotangent: tiles in pieces."""
    ids = ids_of(
        [(3, 0), (40, 2), (21, 5), (64, 4), (10, 0), (9, 4), (25, 9)],
        [(64, 1), (1, 2), (1, 3), (69, 4), (37, 0)],
    )
    case = case_of(
        ids, heads=3, dtype=dtype, gate="bounded", slots=2, start=True, final="all",
        max_segments=5,
        seed=1,  # d a_log is a sum over channels; seed 0 leaves 1/20 of its terms, and their noise
    )  # fmt: skip
    result = run(case)
    check(result, oracle(case), BOUNDS[dtype])
    zero_at_padding(case, result)


@pytest.mark.slow
def test_ranks_agree_bit_for_bit():
    """Four ranks, two groups of heads in the relay: the one-device gradients, bit for bit."""
    ids = ids_of([(100, 1), (28, 2), (65, 3), (63, 0)])
    case = case_of(ids, heads=4, dtype="bfloat16", slots=1, final="last")
    alone, together = run(case), run(case, ranks=4)
    check(together, oracle(case), KDA_BOUNDS_BFLOAT16)
    for name, gradient in alone.gradients.items():
        assert np.array_equal(gradient, together.gradients[name]), name


@pytest.mark.slow
def test_ranks_without_room_in_vmem(monkeypatch):
    """The results of the cotangent pass go to the local stage through HBM."""
    monkeypatch.setattr(backward_kernel, "fits_vmem", lambda plan: False)
    ids = ids_of([(100, 1), (28, 2), (65, 3), (63, 0)])
    case = case_of(ids, heads=4, dtype="bfloat16", scale=0.1)  # no other test compiles this scale
    check(run(case, ranks=2), oracle(case), KDA_BOUNDS_BFLOAT16)


@pytest.mark.slow
def test_ranks_with_all_states():
    """A start on a rank's first token, a rank of padding, states of all segments, float32."""
    ids = ids_of([(50, 1), (14, 2), (50, 3), (14, 4), (64, 0), (30, 4), (34, 0)])
    case = case_of(ids, slots=2, start=True, final="all", max_segments=4)
    result = run(case, ranks=4, check_vma=False)
    check(result, oracle(case), KDA_BOUNDS_FLOAT32)
    zero_at_padding(case, result)


@pytest.mark.slow
def test_saving_equals_rebuilding():
    case = case_of(ids_of([(70, 1), (50, 2)]), dtype="bfloat16")
    saved, rebuilt = run(case, state_policy="save"), run(case, state_policy="remat")
    for name, gradient in saved.gradients.items():
        assert np.array_equal(gradient, rebuilt.gradients[name]), name


@pytest.mark.slow
def test_other_segments_get_nothing():
    """A cotangent on one document only: the others' gradients are exactly 0."""
    ids = ids_of([(40, 1), (60, 2), (50, 3)])
    case = case_of(ids, dtype="bfloat16")
    case = with_narrow_decay(case)._replace(d_out=case.d_out * (ids == 2)[:, None, :, None])
    result = run(case)
    check(result, oracle(case), KDA_BOUNDS_BFLOAT16)
    for name in TOKENS:
        found = np.moveaxis(result.gradients[name], 2, 1)[ids != 2]
        assert (found == 0).all(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "heads", "length", "keys", "values"),
    [(1, 1, 63, 64, 64), (2, 3, 100, 60, 60), (1, 2, 65, 128, 256), (1, 2, 64, 256, 128),
     (1, 2, 1, 128, 128), (1, 34, 128, 16, 16)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shapes(rows, heads, length, keys, values, dtype):
    ids = np.ones((rows, length), np.int32)
    case = case_of(ids, heads=heads, keys=keys, values=values, dtype=dtype, slots=1, final="last")
    check(run(case), oracle(case), BOUNDS[dtype])


@pytest.mark.parametrize(
    ("ranks", "gate"),
    [
        (2, "given"),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in [(2, "softplus"), (8, "given")]),
        pytest.param(8, "softplus", marks=pytest.mark.slow),
    ],
)
def test_ranks(ranks, gate):
    ids = ids_of([(5, 0), (200, 7), (150, 3), (100, 7), (57, 0)])
    case = case_of(ids, gate=gate, dtype="bfloat16", slots=1, final="last")
    check(run(case, ranks=ranks), oracle(case), KDA_BOUNDS_BFLOAT16)
