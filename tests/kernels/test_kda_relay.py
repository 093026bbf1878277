"""States passed between context ranks inside the forward kernel: the same as one device, bit for
bit, and free of races. Interpreted on simulated devices with race detection on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.kda.tpu.relay import Relay, coordinates, rank_line, relay_scratch
from tests.compiling import interpreted
from tests.kernels import kda_cases
from tests.kernels.kda_cases import (
    check,
    ids_of,
    make_case,
    oracle,
    same_bits,
    with_narrow_decay,
)  # fmt: skip
from tests.kernels.test_kda_mosaic_forward import PACKINGS
from tests.tolerances import KDA_BOUNDS_BFLOAT16, KDA_BOUNDS_FLOAT32


def run(case, ranks=1, **options):
    """The case on `ranks` devices. Fails on any race."""
    with interpreted():
        return kda_cases.forward(case, implementation="mosaic_tpu", ranks=ranks, **options)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(("ranks", "check_vma"), [(2, True), slow(4, False)])
def test_ranks_agree_with_one_device_bit_for_bit(ranks, check_vma):
    ids = ids_of([(64 * ranks, 1)])
    case = make_case(ids, keys=128, values=128, dtype="bfloat16", slots=1, final="last")
    case = with_narrow_decay(case)
    split = run(case, ranks, check_vma=check_vma)
    assert same_bits(split, run(case))
    check(split, oracle(case), KDA_BOUNDS_BFLOAT16)


def test_more_rounds_than_slots():
    """Five head pairs go through the relay one by one, so that its two slots are used again."""
    case = make_case(ids_of([(128, 1)]), heads=10)
    check(run(case, 2), oracle(case), KDA_BOUNDS_FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKINGS)
def test_packed_rows_on_ranks(name):
    """192 tokens over 3 ranks: a rank of padding, segments that start, end and go on everywhere."""
    case = make_case(PACKINGS[name], keys=32, values=32, slots=1, final="last")
    assert same_bits(run(case, 3), run(case))


@pytest.mark.parametrize(
    "name", [name if name == "padding everywhere" else slow(name) for name in PACKINGS]
)
def test_start_and_final_states_on_ranks(name):
    case = make_case(
        PACKINGS[name], keys=32, values=32, slots=2, start=True, final="all", max_segments=7
    )
    assert same_bits(run(case, 3), run(case))


def test_uneven_parts_of_a_row():
    """A rank's part need not be a multiple of 64, and the parts are padded inside."""
    case = make_case(ids_of([(70, 3), (30, 5), (80, 8)]), keys=128, values=128, final="last")
    check(run(case, 2), oracle(case), KDA_BOUNDS_FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_many_ranks_and_rounds(ranks):
    ids = np.ones((2, 64 * ranks), np.int32)
    case = make_case(ids, heads=6, keys=128, values=128, slots=1, final="last")
    check(run(case, ranks), oracle(case), KDA_BOUNDS_FLOAT32)


@pytest.mark.parametrize("step", [1, -1])
def test_a_relay_goes_both_ways(step):
    """Each rank adds its number to what it receives, in seven rounds."""
    rounds, ranks = 7, 4
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("context",))

    def local(x):
        line = rank_line("context")
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
    x = jnp.repeat(jnp.arange(1.0, ranks + 1), 8)[:, None] * jnp.ones((1, 128))
    with interpreted():
        out = np.asarray(jax.block_until_ready(jax.jit(split)(x)))
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
