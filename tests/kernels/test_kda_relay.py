"""States passed between context ranks inside the forward kernel: the same as one device, bit for
bit, and free of races. Interpreted on simulated devices with race detection on."""

import functools
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.accuracy import KDA_BOUNDS_BFLOAT16, KDA_BOUNDS_FLOAT32
from kernels.cases import ids_of
from kernels.kda.cases import make_case, oracle, same_bits, with_narrow_decay
from kernels.kda.tpu.relay import RankLine, Relay, coordinates, rank_line, relay_scratch
from tests.compiling import interpreted
from tests.kernels import kda_cases
from tests.kernels.kda_cases import check
from tests.kernels.test_kda_mosaic_forward import PACKINGS


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
    check_relay((4,), 0, step)


@pytest.mark.parametrize(("shape", "axis"), [((2, 1, 3, 2), 2), ((3, 2, 2), 0)])
def test_a_relay_along_any_axis_of_the_mesh(shape, axis):
    """Neighbours are a stride apart and several lines run side by side. This needs more devices
    than these tests have, so it runs in another process."""
    code = (
        "from tests import conftest; import jax; jax.config.update('jax_num_cpu_devices', 12); "
        "from tests.kernels.test_kda_relay import check_relay; "
        f"[check_relay({shape}, {axis}, step) for step in (1, -1)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def check_relay(shape, axis, step, rounds=7):
    """Each device adds its own number and the round's to what it receives; checked with sums."""
    names = tuple("context" if i == axis else f"other{i}" for i in range(len(shape)))
    numbers = np.arange(1.0, math.prod(shape) + 1).reshape(shape)
    mesh = Mesh(np.array(jax.devices()[: numbers.size]).reshape(shape), names)

    def local(x):
        line = rank_line("context")
        out = pl.pallas_call(
            functools.partial(_running_sum, line, step, rounds),
            out_shape=jax.ShapeDtypeStruct((rounds, 8, 128), jnp.float32),
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec()],
            scratch_shapes=relay_scratch(jax.ShapeDtypeStruct((8, 128), jnp.float32)),
            compiler_params=pltpu.CompilerParams(collective_id=line.collective_id(step)),
        )(coordinates(line), x.reshape(8, 128))
        return out.reshape(*x.shape[:-2], rounds, 8, 128)

    split = jax.shard_map(
        local, mesh=mesh, in_specs=P(*names), out_specs=P(*names), check_vma=False
    )
    x = jnp.broadcast_to(jnp.asarray(numbers)[..., None, None], (*shape, 8, 128))
    with interpreted():
        out = np.asarray(jax.block_until_ready(jax.jit(split)(x.astype(jnp.float32))))
    passed = [np.flip(y, axis) if step < 0 else y for y in (numbers, np.ones_like(numbers))]
    passed = [np.cumsum(y, axis) for y in passed]
    sums, seen = (np.flip(y, axis) if step < 0 else y for y in passed)
    for j in range(rounds):
        wanted = (sums + j * seen)[..., None, None]
        np.testing.assert_array_equal(out[..., j, :, :], np.broadcast_to(wanted, x.shape))


def test_collective_ids_differ_by_axis_and_direction():
    """Kernels of one program, among them those along another axis, must not share semaphores."""
    axes = ("data", "fsdp", "context", "tensor")
    lines = [RankLine(axes, axis, 2) for axis in range(4)]
    assert len({line.collective_id(step) for line in lines for step in (1, -1)}) == 8


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
