"""KDA under context parallelism: ranks agree with the recurrence and with one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.accuracy import KDA_BOUNDS_FLOAT32
from kernels.cases import error, ids_of
from kernels.kda import kda, kda_on_rank
from kernels.kda.cases import TOKENS, make_case, oracle
from kernels.kda.chunked import layout
from kernels.segments import plan_segments
from tests.compiling import fast_jit, interpreted
from tests.kernels.kda_cases import check, run
from tests.tolerances import KDA_BOUNDS_ROUNDED, KDA_SAME_ORDER

# 272 tokens: parts of 136, 68 and 34 on 2, 4 and 8 ranks, none of them a multiple of 64.
LENGTH = 272
ROWS = {
    # One segment through all ranks; many segments in one rank; the last of them through three
    # ranks.
    "long": ids_of([(LENGTH, 1)], [(5, 2), (1, 9), (20, 4), (30, 8), (LENGTH - 56, 3)]),
    # Ids 1..4 over four ranks, more in the row than in any rank, by order and not by id.
    "four documents": ids_of(
        [(40, 1), (30, 2), (60, 3), (126, 4), (16, 0)], [(40, 7), (30, 5), (60, 9), (142, 2)]
    ),
    # Padding leads, stands inside, covers whole ranks (the middle ones, the last ones).
    "padding": ids_of(
        [(34, 0), (30, 1), (140, 0), (30, 1), (38, 2)], [(60, 3), (10, 0), (10, 3), (192, 0)]
    ),
    "empty": ids_of([(LENGTH, 0)], [(3, 0), (1, 1), (LENGTH - 4, 0)]),
}
STATES = {"slots": 2, "start": True, "max_segments": 5}


@pytest.mark.parametrize("ids", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_ranks_agree_with_the_recurrence(ranks, ids):
    """Every gradient, among them those of inputs that ranks share, also through the last states."""
    case = make_case(ids, heads=2, gate="softplus", final="all", **STATES)
    check(run(case, ranks=ranks), oracle(case), KDA_BOUNDS_FLOAT32)


@pytest.mark.parametrize("ids", ROWS.values(), ids=ROWS)
def test_without_varying_types_and_with_kept_states(ids):
    case = make_case(ids, gate="bounded", slots=1, final="last")
    result = run(case, ranks=4, check_vma=False, state_policy="save")
    check(result, oracle(case), KDA_BOUNDS_FLOAT32)


@pytest.mark.parametrize("ids", ROWS.values(), ids=ROWS)
def test_bfloat16_on_four_ranks(ids):
    case = make_case(ids, dtype="bfloat16", slots=1, final="last")
    check(run(case, ranks=4), oracle(case), KDA_BOUNDS_ROUNDED)


def test_eight_ranks_agree_with_one_device():
    """The state goes through the same products in the same order; the remaining differences come
    from XLA's code for other step shapes, which rounds some sums differently."""
    ids = ids_of([(300, 1), (212, 2)], [(37, 3), (400, 4), (75, 0)])
    case = make_case(ids, heads=4, slots=1, final="last")
    one, many = run(case), run(case, ranks=8)
    assert error(many.out, one.out) < KDA_SAME_ORDER
    assert error(many.final, one.final) < KDA_SAME_ORDER
    for name in TOKENS:
        assert error(many.gradients[name], one.gradients[name]) < KDA_SAME_ORDER, name


def test_heads_with_different_gates():
    """Gates 0 and -10 per token by head: no rank may use another head's."""
    case = make_case(ROWS["long"], slots=1, final="last")
    gates = jnp.asarray([0.0, -10.0])[:, None, None]
    case.arrays["decay"] = jnp.broadcast_to(gates, case.arrays["decay"].shape)
    check(run(case, ranks=4), oracle(case), KDA_BOUNDS_FLOAT32)


def test_several_steps_on_each_rank(monkeypatch):
    monkeypatch.setattr(layout, "STEP_CHUNKS", 1)
    case = make_case(ids_of([(200, 1), (184, 2)], [(384, 1)]), slots=1, final="last")
    check(run(case, ranks=2), oracle(case), KDA_BOUNDS_FLOAT32)


def test_rows_heads_and_context_on_one_mesh():
    """A mesh of 2 x 2 x 2 (rows, context, heads): what the trainer does, gradients included."""
    case = make_case(ROWS["four documents"], gate="softplus", slots=1, start=True, final="last")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "context", "tensor"))
    token, head = P("data", "tensor", "context"), P("tensor")
    specs = dict.fromkeys(TOKENS, token) | dict.fromkeys(
        ("a_log", "dt_bias", "default_initial_state"), head
    )
    specs["initial_state"] = P("data", None, "tensor")

    def call(arrays, ids):
        segments = plan_segments(ids, "context")
        rest = {n: x for n, x in arrays.items() if n not in TOKENS}
        return kda(
            *(arrays[n] for n in TOKENS), segments, **rest, **case.options, axis_name="context",
            implementation="chunked",
        )  # fmt: skip

    mapped = jax.shard_map(
        call, mesh=mesh, in_specs=(specs, P("data", "context")),
        out_specs=(token, P("data", "tensor")),
    )  # fmt: skip

    @fast_jit
    def function(arrays):
        (out, final), pull = jax.vjp(lambda arrays: mapped(arrays, case.ids), arrays)
        return out, final, pull((jnp.asarray(case.d_out), jnp.asarray(case.d_final)))[0]

    result = function(case.arrays)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), result)
    check(type(oracle(case))(*wide), oracle(case), KDA_BOUNDS_FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "lengths"),
    [
        (2, (1024, 7168)),
        (2, (5000, 6000, 5384)),
        (4, (392, 385, 247, 2217, 1879, 2657, 415)),
        (8, (65536,)),
    ],
)
def test_long_rows(ranks, lengths):
    ids = ids_of([(n, i + 1) for i, n in enumerate(lengths)])
    heads = 1 if len(lengths) == 1 else 2
    sizes = 32 if len(lengths) == 1 else 64
    case = make_case(ids, heads=heads, keys=sizes, values=sizes, gate="bounded")
    check(run(case, ranks=ranks), oracle(case), KDA_BOUNDS_FLOAT32)


def called_twice(case, ranks: int, implementation: str):
    """(output, gradients) of a call, and of its repetition from the entry states it returned."""
    program = twice(ranks, implementation, tuple(case.arrays))
    return program(case.arrays, jnp.asarray(case.ids), jnp.asarray(case.d_out), case.d_final)


@functools.cache
def twice(ranks: int, implementation: str, given: tuple[str, ...]):
    """The jitted program of `called_twice`; cases that differ only in their data share one."""
    names = "initial_state", "default_initial_state", "a_log", "dt_bias"
    token = P(None, None, "context")
    specs = {n: token if n in TOKENS else P() for n in given}

    def call(arrays, segments, entry):
        return kda_on_rank(
            *(arrays[n] for n in TOKENS), segments, entry=entry, final_state="last",
            lower_bound=None, qk_l2norm=True, axis_name="context", state_policy="remat",
            implementation=implementation, **{n: arrays.get(n) for n in names},
        )  # fmt: skip

    def both(arrays, ids, d_out, d_final):
        segments = plan_segments(ids, "context")
        cotangents = d_out, jax.lax.pcast(d_final, ("context",), to="varying")
        (first, *rest), pull = jax.vjp(lambda arrays: call(arrays, segments, None), arrays)
        entry = rest[1]
        gradients = pull((*cotangents, jnp.zeros_like(entry)))[0]
        (again, *_), pull = jax.vjp(lambda arrays: call(arrays, segments, entry), arrays)
        return (first, gradients), (again, pull((*cotangents, jnp.zeros_like(entry)))[0])

    mesh = Mesh(np.array(jax.devices()[:ranks]), ("context",))
    results = (token, specs)
    run = jax.shard_map(
        both, mesh=mesh, in_specs=(specs, P(None, "context"), token, P()),
        out_specs=(results, results),
    )  # fmt: skip
    return (jax.jit if implementation == "mosaic_tpu" else fast_jit)(run)


@pytest.mark.parametrize("ids", [ROWS["long"], ROWS["padding"]], ids=["long", "padding"])
@pytest.mark.parametrize("start", [False, True])
def test_a_call_repeated_from_its_entry_states(ids, start):
    """Output and gradients equal those of the first call, bit for bit if steps have one order."""
    case = make_case(ids, gate="softplus", slots=1, start=start, final="last")
    first, again = called_twice(case, 4, "chunked")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=KDA_SAME_ORDER), first, again)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(first[1]))


def test_a_call_of_the_tpu_kernels_repeated_from_its_entry_states():
    """Interpreted, with race detection: the same bits as the call that received its states."""
    case = make_case(
        ids_of([(100, 1), (92, 2)]), keys=32, values=32, gate="softplus", slots=1, final="last"
    )
    with interpreted():
        first, again = jax.block_until_ready(called_twice(case, 3, "mosaic_tpu"))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    expected, _ = called_twice(case, 3, "chunked")
    errors = jax.tree.map(lambda a, b: error(a, np.asarray(b, np.float64)), first, expected)
    assert max(jax.tree.leaves(errors)) < KDA_SAME_ORDER, errors
