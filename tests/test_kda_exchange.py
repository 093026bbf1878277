"""States passed between context ranks inside the forward kernel: the same as one device, bit for
bit, and free of races. Interpreted on simulated devices with race detection on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.kda import kda
from kernels.kda.exchange import Relay, coordinates, line_of, relay_scratch
from kernels.segments import plan_segments
from tests.test_kda_mosaic_forward import PACKINGS, error, packed, random_case, recurrence, run
from tests.tolerances import KDA_BFLOAT16, KDA_FLOAT32


def on_ranks(case, ranks, dtype=jnp.bfloat16, max_segments=None, check_vma=True, **options):
    """`run`, with the tokens split over `ranks` devices. Fails on any race."""
    mesh = Mesh(np.array(jax.devices()[:ranks]).reshape(1, ranks), ("data", "context"))
    tokens, states = P(None, None, "context"), (case.initial, case.start)
    states = [None if x is None else jnp.asarray(x, jnp.float32) for x in states]

    def local(q, k, v, decay, beta, ids, initial, start):
        segments = plan_segments(ids, axis_name="context", max_segments=max_segments)
        return kda(
            q,
            k,
            v,
            decay,
            beta,
            segments,
            initial_state=initial,
            start_state=start,
            axis_name="context",
            implementation="mosaic_tpu",
            **options,
        )

    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(*[tokens] * 5, P(None, "context"), P(), P()),
        out_specs=(tokens, P()),
        check_vma=check_vma,
    )
    arrays = [jnp.asarray(x, dtype) for x in (case.q, case.k, case.v, case.decay)]
    params = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    with pltpu.force_tpu_interpret_mode(params):
        beta, ids = jnp.asarray(case.beta, jnp.float32), jnp.asarray(case.ids)
        found = jax.block_until_ready(jax.jit(split)(*arrays, beta, ids, *states))
    assert not interpreter.races.races_found
    return found


def same_bits(x, y):
    return np.array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize(
    ("ranks", "check_vma"), [(2, True), pytest.param(4, False, marks=pytest.mark.slow)]
)
def test_ranks_agree_with_one_device_bit_for_bit(ranks, check_vma):
    case = random_case(length=64 * ranks, slots=1)
    out, last = on_ranks(case, ranks, final_state="last", check_vma=check_vma)
    one_out, one_last = run(case, final_state="last")
    assert same_bits(out, one_out)
    assert same_bits(last, one_last)
    ref, ref_last, _ = recurrence(case, 128**-0.5)
    assert error(out, ref) < KDA_BFLOAT16
    assert error(last, ref_last) < KDA_BFLOAT16


def test_more_rounds_than_slots():
    """Five head pairs go through the relay one by one, so that its two slots are used again."""
    case = random_case(heads=10, length=128, keys=16, values=16, dtype=jnp.float32)
    out, _ = on_ranks(case, 2, jnp.float32)
    assert error(out, recurrence(case, 0.25)[0]) < KDA_FLOAT32


SOME_PACKINGS = [
    pytest.param(name, marks=[] if name == "padding everywhere" else pytest.mark.slow)
    for name in PACKINGS
]


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKINGS)
def test_packed_rows_on_ranks(name):
    """192 tokens over 3 ranks: a rank of padding, segments that start, end and go on everywhere."""
    case = random_case(ids=PACKINGS[name], slots=1, dtype=jnp.float32, keys=32, values=32)
    out, last = on_ranks(case, 3, jnp.float32, final_state="last")
    one_out, one_last = run(case, jnp.float32, final_state="last")
    assert same_bits(out, one_out)
    assert same_bits(last, one_last)


@pytest.mark.parametrize("name", SOME_PACKINGS)
def test_start_and_final_states_on_ranks(name):
    case = random_case(
        ids=PACKINGS[name], slots=2, start=True, dtype=jnp.float32, keys=32, values=32
    )
    out, states = on_ranks(case, 3, jnp.float32, final_state="all", max_segments=7)
    one_out, one_states = run(case, jnp.float32, final_state="all", max_segments=7)
    assert same_bits(out, one_out)
    assert same_bits(states, one_states)


def test_uneven_pieces_of_a_rank():
    """A rank's part need not be a multiple of 64, and the parts are padded inside."""
    case = random_case(ids=packed((3, 70), (5, 30), (8, 80)), dtype=jnp.float32, length=180)
    out, last = on_ranks(case, 2, jnp.float32, final_state="last")
    ref, ref_last, _ = recurrence(case, 128**-0.5)
    assert error(out, ref) < KDA_FLOAT32
    assert error(last, ref_last) < KDA_FLOAT32


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_many_ranks_and_rounds(ranks):
    case = random_case(heads=6, length=64 * ranks, dtype=jnp.float32, slots=1, rows=2)
    out, last = on_ranks(case, ranks, jnp.float32, final_state="last")
    ref, ref_last, _ = recurrence(case, 128**-0.5)
    assert error(out, ref) < KDA_FLOAT32
    assert error(last, ref_last) < KDA_FLOAT32


@pytest.mark.parametrize("step", [1, -1])
def test_a_relay_goes_both_ways(step):
    """Each rank adds its number to what it receives, in seven rounds."""
    rounds, ranks = 7, 4
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("context",))

    def local(x):
        line = line_of("context")
        kernel = functools.partial(_running_sum, line, step, rounds)
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((rounds, 8, 128), jnp.float32),
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec()],
            scratch_shapes=relay_scratch(jax.ShapeDtypeStruct((8, 128), jnp.float32)),
            compiler_params=pltpu.CompilerParams(collective_id=1),
        )(coordinates(line), x)

    split = jax.shard_map(
        local, mesh=mesh, in_specs=P("context"), out_specs=P("context"), check_vma=False
    )
    params = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    x = jnp.repeat(jnp.arange(1.0, ranks + 1), 8)[:, None] * jnp.ones((1, 128))
    with pltpu.force_tpu_interpret_mode(params):
        out = np.asarray(jax.block_until_ready(jax.jit(split)(x)))
    assert not interpreter.races.races_found
    out = out.reshape(ranks, rounds, 8, 128)
    order = np.arange(1.0, ranks + 1)[::step]
    sums = np.cumsum(order)[::step]
    for j in range(rounds):
        assert np.array_equal(
            out[:, j], (sums + j * ranks_seen(ranks, step))[:, None, None] + 0 * out[:, j]
        )


def ranks_seen(ranks, step):
    """How many ranks a message has passed at each rank, itself included."""
    return np.arange(1.0, ranks + 1) if step > 0 else np.arange(ranks, 0.0, -1)


def _running_sum(line, step, rounds, coords, x, out, **scratch):
    relay = Relay(line, coords, step, rounds, scratch)
    relay.open()

    def one(j, _):
        relay.receive(j)
        out[j] = x[...] + jnp.float32(j)

        @pl.when(relay.has_source)
        def _add():
            out[j] += relay.message(j)[...]

        relay.release(j)
        relay.reserve(j)
        relay.reply(j)[...] = out[j]
        relay.send(j)
        return 0

    jax.lax.fori_loop(0, rounds, one, 0)
    relay.close()
