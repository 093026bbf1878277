"""The forward TPU kernel, interpreted on CPU, against the recurrence in float64.

Unwritten memory is NaN in the interpreter, so anything read before it is written shows. Lengths are
short (interpreting costs seconds a case) but cross tile edges, and heads come in pairs, odd numbers
and alone.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels.kda import kda
from kernels.segments import plan_segments
from tests.tolerances import KDA_BFLOAT16, KDA_BFLOAT16_NEAR_KEYS, KDA_FLOAT32


@dataclasses.dataclass
class Case:
    """Inputs of a call as float64 numpy arrays, already rounded to the call's dtypes."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    decay: np.ndarray
    beta: np.ndarray
    ids: np.ndarray
    initial: np.ndarray | None = None  # [B, N, H, K, V]
    start: np.ndarray | None = None  # [H, K, V]


def rounded(x, dtype):
    return np.asarray(jnp.asarray(x, dtype).astype(jnp.float32), np.float64)


def random_case(
    profile="random", rows=1, heads=2, length=192, keys=128, values=128, dtype=jnp.bfloat16,
    ids=None, slots=0, start=False, unit=True, seed=0,
):  # fmt: skip
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape)  # noqa: E731
    shape = (rows, heads, length)
    q, k, v = normal(*shape, keys), normal(*shape, keys), normal(*shape, values)
    if profile == "near":
        k = normal(rows, heads, 1, keys) + 0.05 * k
    if profile == "identical":
        k = np.broadcast_to(normal(rows, heads, 1, keys), k.shape)
    if profile == "positive":
        q, k = rng.uniform(size=q.shape), rng.uniform(size=k.shape)
    if unit:
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decay, beta = -0.05 * np.abs(normal(*shape, keys)), 1 / (1 + np.exp(-normal(*shape)))
    if profile == "strong":
        decay = 100 * decay
        decay[:, :, rng.random(length) < 0.1] = -1000
    if profile == "slow decay":
        decay = 0.02 * decay
    if profile in ("near", "identical", "slow decay"):
        beta = np.ones(shape)
    if profile == "identical":
        decay = np.zeros_like(decay)
    q, k, v, decay = (rounded(x, dtype) for x in (q, k, v, decay))
    beta = rounded(beta, jnp.float32)
    ids = np.ones((rows, length), np.int32) if ids is None else np.asarray(ids, np.int32)
    states = lambda *shape: rounded(0.1 * normal(*shape), jnp.float32)  # noqa: E731
    initial = states(rows, slots, heads, keys, values) if slots else None
    first = states(heads, keys, values) if start else None
    return Case(q, k, v, decay, beta, ids, initial, first)


def recurrence(case: Case, scale: float, decay=None):
    """(out, last state [B, H, K, V], states of all segments as a list of dicts by order number)."""
    rows, heads, length, keys = case.q.shape
    values = case.v.shape[-1]
    decay = case.decay if decay is None else decay
    out = np.zeros((rows, heads, length, values))
    last, table = np.zeros((rows, heads, keys, values)), []
    for b in range(rows):
        found, number, before = {}, -1, 0
        state = start_of(case, b, 0)
        for t in range(length):
            if case.ids[b, t] == 0:
                continue
            if case.ids[b, t] != before:
                number, before = number + 1, case.ids[b, t]
                state = start_of(case, b, number)
            state = np.exp(decay[b, :, t])[..., None] * state
            k, error = (
                case.k[b, :, t],
                case.v[b, :, t] - np.einsum("hk,hkv->hv", case.k[b, :, t], state),
            )
            state = state + case.beta[b, :, t, None, None] * k[..., None] * error[:, None]
            out[b, :, t] = scale * np.einsum("hk,hkv->hv", case.q[b, :, t], state)
            found[number] = state
        last[b] = state
        table.append(found)
    return out, last, table


def start_of(case: Case, b: int, n: int):
    _, heads, _, keys = case.q.shape
    if case.initial is not None and n < case.initial.shape[1]:
        return case.initial[b, n]
    return np.zeros((heads, keys, case.v.shape[-1])) if case.start is None else case.start


def run(case: Case, dtype=jnp.bfloat16, max_segments=None, races=False, **options):
    """kda on the kernel, interpreted."""
    arrays = [jnp.asarray(x, dtype) for x in (case.q, case.k, case.v, case.decay)]
    params = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=races)
    with pltpu.force_tpu_interpret_mode(params):
        return kda(
            *arrays,
            jnp.asarray(case.beta, jnp.float32),
            plan_segments(jnp.asarray(case.ids), max_segments=max_segments),
            initial_state=None if case.initial is None else jnp.asarray(case.initial, jnp.float32),
            start_state=None if case.start is None else jnp.asarray(case.start, jnp.float32),
            implementation="mosaic_tpu",
            **options,
        )


def error(x, ref):
    x = np.asarray(x, np.float64)
    assert np.isfinite(x).all()
    return np.sqrt(np.mean((x - ref) ** 2) / np.mean(ref**2))


def packed(*lengths):
    """Ids of one row: (id, length) pairs."""
    return np.concatenate([np.full(n, i) for i, n in lengths])[None]


BF16, F32 = jnp.bfloat16, jnp.float32


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("profile", "dtype"),
    [
        slow("random", BF16),
        ("strong", BF16),
        slow("near", BF16),
        slow("identical", BF16),
        slow("random", F32),
        slow("strong", F32),
        slow("near", F32),
        slow("identical", F32),
    ],
)
def test_profiles(profile, dtype):
    case = random_case(profile, dtype=dtype)
    out, last = run(case, dtype, final_state="last")
    ref, ref_last, _ = recurrence(case, 128**-0.5)
    near = profile in ("near", "identical")
    bound = KDA_FLOAT32 if dtype == jnp.float32 else KDA_BFLOAT16
    bound = KDA_BFLOAT16_NEAR_KEYS if near and dtype == jnp.bfloat16 else bound
    assert error(out, ref) < bound
    if profile != "identical" or dtype == jnp.float32:  # there the state itself is a difference
        assert error(last, ref_last) < bound


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "length"), [("slow decay", 512), ("positive", 192)])
def test_profiles_in_which_roundings_add_up(profile, length):
    """Slow decay with beta = 1: all roundings of a long state's way stay in it. All q and k
    positive: scores times new values is a small difference of large sums."""
    case = random_case(profile, length=length)
    out, last = run(case, final_state="last")
    ref, ref_last, _ = recurrence(case, 128**-0.5)
    assert error(out, ref) < KDA_BFLOAT16
    assert error(last, ref_last) < KDA_BFLOAT16


@pytest.mark.parametrize(
    ("rows", "heads", "length", "keys", "values"),
    [
        (1, 1, 63, 64, 64),  # one head, less than a tile, channels padded
        (2, 3, 100, 60, 60),  # a pair of heads from two rows of the batch
        slow(1, 2, 128, 128, 256),  # V of two lane tiles
        slow(1, 2, 64, 256, 128),
        slow(3, 2, 65, 16, 32),
        slow(1, 2, 1, 128, 128),  # one token
    ],
)
def test_shapes(rows, heads, length, keys, values):
    case = random_case(
        rows=rows, heads=heads, length=length, keys=keys, values=values, dtype=jnp.float32, slots=1
    )
    out, last = run(case, jnp.float32, final_state="last")
    ref, ref_last, _ = recurrence(case, keys**-0.5)
    assert error(out, ref) < KDA_FLOAT32
    assert error(last, ref_last) < KDA_FLOAT32


@pytest.mark.slow
def test_many_groups_and_steps():
    """More pairs than one group, more tiles than one step: 17 pairs go one by one."""
    case = random_case(rows=1, heads=34, length=128, keys=16, values=16, dtype=jnp.float32)
    assert error(run(case, jnp.float32)[0], recurrence(case, 0.25)[0]) < KDA_FLOAT32


GATES = {"softplus": None, "bounded": -5.0}


@pytest.mark.parametrize(
    ("gate", "dtype"),
    [("softplus", BF16), slow("softplus", F32), slow("bounded", BF16), ("bounded", F32)],
)
def test_gates_and_l2norm(gate, dtype):
    heads, keys = 3, 64
    case = random_case(heads=heads, keys=keys, values=keys, length=128, dtype=dtype, unit=False)
    rng = np.random.default_rng(1)
    a_log, dt_bias = np.log(rng.uniform(1, 16, heads)), rng.uniform(-8, -1.5, (heads, keys))
    raw = rounded(rng.normal(size=case.q.shape), dtype)
    rate, x = np.exp(rounded(a_log, jnp.float32))[:, None, None], raw
    x = x + rounded(dt_bias, jnp.float32)[:, None]
    lower = GATES[gate]
    decay = -rate * np.logaddexp(0, x) if lower is None else lower / (1 + np.exp(-rate * x))
    case.decay = raw
    out, _ = run(
        case,
        dtype,
        a_log=jnp.asarray(a_log, jnp.float32),
        dt_bias=jnp.asarray(dt_bias, jnp.float32),
        lower_bound=lower,
        qk_l2norm=True,
    )
    unit = lambda x: x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)  # noqa: E731
    ref, _, _ = recurrence(
        dataclasses.replace(case, q=unit(case.q), k=unit(case.k)), keys**-0.5, decay
    )
    assert error(out, ref) < (KDA_FLOAT32 if dtype == jnp.float32 else KDA_BFLOAT16)


PACKINGS = {
    "edges inside tiles": packed((1, 30), (2, 2), (3, 63), (4, 1), (5, 34), (6, 62)),
    "padding everywhere": packed((0, 20), (7, 30), (0, 50), (7, 20), (0, 3), (9, 10), (0, 59)),
    "a tile of padding": packed((2, 64), (0, 64), (5, 64)),
    "all padding": packed((0, 192)),
}


@pytest.mark.parametrize(
    ("name", "slots"),
    [("padding everywhere", 1), *(slow(name, 0) for name in PACKINGS)],
)
def test_packed_rows_in_one_pass(name, slots):
    case = random_case(ids=PACKINGS[name], slots=slots, dtype=jnp.float32, keys=32, values=32)
    out, last = run(case, jnp.float32, final_state="last")
    ref, ref_last, _ = recurrence(case, 32**-0.5)
    assert np.array_equal(np.asarray(out)[ref == 0], ref[ref == 0])  # padding: exactly 0
    if ref.any():
        assert error(out, ref) < KDA_FLOAT32
    np.testing.assert_allclose(last, ref_last, atol=1e-5 * max(np.abs(ref_last).max(), 1e-3))


STARTS = [(0, True), (2, False), (9, True), (2, True)]


@pytest.mark.parametrize(
    ("name", "slots", "start"),
    [("edges inside tiles", 2, True), slow("edges inside tiles", 9, True)]
    + [slow(name, *starts) for name in list(PACKINGS)[1:] for starts in STARTS],
)
def test_start_states_and_all_final_states(name, slots, start):
    ids = np.concatenate([PACKINGS[name], PACKINGS["edges inside tiles"][:, ::-1]])
    case = random_case(
        rows=2, heads=1, ids=ids, slots=slots, start=start, dtype=jnp.float32, keys=32, values=32
    )
    out, states = run(case, jnp.float32, final_state="all", max_segments=7)
    ref, _, table = recurrence(case, 32**-0.5)
    assert error(out, ref) < KDA_FLOAT32
    for b, found in enumerate(table):
        for n in range(7):
            expected = found.get(n, start_of(case, b, n))
            np.testing.assert_allclose(states[b, n], expected, atol=1e-5)


@pytest.mark.slow
def test_pieces_in_bfloat16():
    case = random_case(ids=PACKINGS["edges inside tiles"], slots=3, start=True)
    out, states = run(case, final_state="all", max_segments=6)
    ref, _, table = recurrence(case, 128**-0.5)
    assert error(out, ref) < KDA_BFLOAT16
    assert error(states[0], np.stack([table[0][n] for n in range(6)])) < KDA_BFLOAT16


@pytest.mark.parametrize("t", [100, slow(127), slow(64), slow(21)])
def test_a_prefix_is_causal_bit_for_bit(t):
    case = random_case("strong", length=128)
    before = np.asarray(run(case)[0].astype(jnp.float32))
    changed = dataclasses.replace(case, decay=case.decay.copy(), k=case.k.copy())
    changed.decay[:, :, t] -= 3
    changed.k[:, :, t] *= -1
    after = np.asarray(run(changed)[0].astype(jnp.float32))
    assert np.array_equal(before[:, :, :t], after[:, :, :t])
    assert not np.array_equal(before[:, :, t:], after[:, :, t:])


@pytest.mark.slow
def test_a_changed_head_leaves_the_others_alone():
    """Heads share products: one that is all large numbers must not reach its neighbour."""
    case = random_case(heads=3, length=64)
    before = np.asarray(run(case)[0].astype(jnp.float32))
    case.v[:, 1] *= 1e30
    after = np.asarray(run(case)[0].astype(jnp.float32))
    assert np.array_equal(before[:, [0, 2]], after[:, [0, 2]])
