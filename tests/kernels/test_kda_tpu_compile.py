"""The TPU kernels compile for every chip and number of ranks, forward and gradient, without a TPU.

libtpu's compiler is the real one, so operations that Mosaic cannot lower, and a lack of VMEM, are
found here. Sizes are small if nothing depends on them: compile time grows with the heads and chunks
in lockstep.
"""

import os
import re

os.environ.update(
    TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1"
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import kda_tpu
from kernels.kda import kda
from kernels.segments import plan_segments
from training.estimate.bundles import weigh

V7X, V6E, V5P, V5E = "tpu7x:2x2x1", "v6e:2x2", "v5p:2x2x1", "v5e:2x2"


def compiled(topology, ranks, *, gradient=True, heads=2, rows=1, length=128, dtype=jnp.bfloat16,
             gate="softplus", slots=1, start=False, final="last", keys=128,
             values=128, **options):  # fmt: skip
    """HLO text of kda, or of its value and gradients, with `length` tokens per rank."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:ranks]).reshape(1, ranks), ("data", "context"))
    tokens, f32 = length * ranks, jnp.float32
    lead = (rows, heads, tokens)
    arrays = {
        "q": ((*lead, keys), dtype, P(None, None, "context")),
        "k": ((*lead, keys), dtype, P(None, None, "context")),
        "v": ((*lead, values), dtype, P(None, None, "context")),
        "decay": ((*lead, keys), dtype, P(None, None, "context")),
        "beta": (lead, f32, P(None, None, "context")),
        "segment_ids": ((rows, tokens), jnp.int32, P(None, "context")),
    }
    if slots:
        arrays["initial_state"] = ((rows, slots, heads, keys, values), f32, P())
    if start:
        arrays["default_initial_state"] = ((heads, keys, values), f32, P())
    if gate != "given":
        arrays |= {"a_log": ((heads,), f32, P()), "dt_bias": ((heads, keys), f32, P())}
    lower = -5.0 if gate == "bounded" else None

    def attend(given):
        given = dict(given)
        segments = plan_segments(given.pop("segment_ids"), axis_name="context", max_segments=3)
        return kda(**given, segments=segments, final_state=final, lower_bound=lower,
                   qk_l2norm=True, axis_name="context", **options)  # fmt: skip

    def run(given):
        if not gradient:
            return jax.tree.leaves(attend(given))
        ids = given.pop("segment_ids")
        out, pull = jax.vjp(lambda x: attend(x | {"segment_ids": ids}), given)
        return out, pull(out)

    specs = {name: spec for name, (_, _, spec) in arrays.items()}
    out_spec = P(None, None, "context")
    states = () if final == "none" else (P(),)
    grads = {name: spec for name, spec in specs.items() if name != "segment_ids"}
    outs = (out_spec, *states) if final != "none" else (out_spec, None)
    out_specs = (outs, (grads,)) if gradient else [out_spec, *states]
    fn = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=out_specs)
    args = {
        name: jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, spec))
        for name, (shape, kind, spec) in arrays.items()
    }
    return jax.jit(fn).lower(args).compile().as_text()


def kernel_calls(hlo):
    return [line for line in hlo.splitlines() if "tpu_custom_call" in line]


def kernels_in(hlo):
    calls = [line.split("=")[0] for line in kernel_calls(hlo)]
    return [sum(name in call for call in calls) for name in ("forward", "backward")]


def results(call: str) -> list[str]:
    """Types of what a kernel's call returns, with layout and memory space."""
    return re.findall(r"\w+\[[\d,]*\]\{[^}]*\}", call.split(" custom-call(")[0])


def slow(*values, id=None):
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


@pytest.mark.parametrize(
    ("topology", "ranks"),
    [(V7X, 4), slow(V7X, 2), slow(V7X, 8), slow(V6E, 4), slow(V5P, 4), (V5E, 4)],
)
def test_chips_and_ranks(topology, ranks):
    """One kernel forward and one backward, chosen by the mesh's devices."""
    assert kernels_in(compiled(topology, ranks)) == [1, 1]


@pytest.mark.parametrize(
    "options",
    [
        slow({"gate": "bounded", "dtype": jnp.float32}, id="float32"),
        slow({"gate": "given", "slots": 0, "final": "none"}, id="plain"),
        pytest.param({"slots": 3, "start": True, "final": "all"}, id="all states"),
        slow({"keys": 256, "values": 128}, id="wide keys"),
        slow({"keys": 64, "values": 200, "heads": 3}, id="padded"),
        slow({"heads": 1, "length": 64}, id="one head"),
        # The table of chunks with starts is in SMEM, which has one megabyte whatever their number.
        slow({"heads": 2, "length": 2**18, "start": True, "final": "none"}, id="many tiles"),
    ],
)
def test_options(options):
    assert kernels_in(compiled(V7X, 2, **options)) == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("topology", [V7X, V6E, V5P, V5E])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_real_sizes(topology, dtype):
    """32 heads of one row: the most head pairs in lockstep, so the most VMEM."""
    text = compiled(topology, 1, heads=32, length=1024, dtype=dtype)
    assert kernels_in(text) == [1, 1]
    text = compiled(topology, 4, heads=8, rows=2, length=512, dtype=dtype)
    assert kernels_in(text) == [1, 1]


@pytest.mark.parametrize(
    ("topology", "length", "dtype"),
    [
        (V7X, 2048, jnp.bfloat16),
        slow(V7X, 4096, jnp.bfloat16),  # 16 MiB, the most that is kept in VMEM
        slow(V7X, 2048, jnp.float32),
        slow(V6E, 8192, jnp.bfloat16),
        slow(V5E, 8192, jnp.bfloat16),
    ],
)
def test_out_and_its_cotangent_are_placed_in_vmem(topology, length, dtype):
    """XLA copies what a communicating kernel returns: these two are not copied within HBM."""
    calls = kernel_calls(compiled(topology, 4, heads=8, rows=2, length=length, dtype=dtype))
    forward, backward = (next(x for x in calls if name in x) for name in ("forward", "backward"))
    out, d_decay = results(forward)[0], results(backward)[3]
    assert "S(1)" in out and "S(1)" in d_decay, (out, d_decay)


@pytest.mark.parametrize(
    ("topology", "options"),
    [
        (V5P, {}),  # two TensorCores a device: XLA reads both VMEMs, the kernel writes one
        slow(V7X, {"rank_io_in_vmem": False}),
    ],
)
def test_no_kernel_output_is_placed_in_vmem(topology, options):
    """At sizes where `test_out_and_its_cotangent_are_placed_in_vmem` finds them there."""
    calls = kernel_calls(compiled(topology, 4, heads=8, rows=2, length=2048, **options))
    assert len(calls) == 2
    placed = [result for call in calls for result in results(call)]
    assert len(placed) >= 10 and not [result for result in placed if "S(1)" in result], placed


@pytest.mark.parametrize(("tokens", "most"), [slow(4096, 54.4), (8192, 107.8)])
def test_peak_memory_of_the_gradient(tokens, most):
    """MB of HBM; half of what the best published kernel takes."""
    assert kda_tpu.compile_case("cp4", tokens, V7X, "ours", "grad")["peak_mb"] <= most


def test_bundles_count_loops_by_their_trips():
    test = "/* loop exit test */"
    lines = [
        "     0   : { %0 = a }",
        "   0x1 LB: > { %1 = b }",
        "   0x2   : > { }",
        "   0x3 LB: > > { %2 = c }",
        f"   0x4   : > > {{ %p = scmp.ge.s32.totalorder %s, 5 {test} }}",
        f"   0x5   : > {{ %q = scmp.ge.s32.totalorder %s, 10 {test} }}",
        "   0x6   : { %3 = d }",
    ]
    assert weigh(lines) == 1 + 10 * (3 + 5 * 2) + 1


def test_a_loop_that_ends_with_its_inner_loop_has_trips():
    """The exit test of the outer loop is predicated by that of the inner one."""
    test = "/* loop exit test */"
    lines = [
        "   0x1 LB: > { %1 = b }",
        "   0x2 LB: > > { %2 = c }",
        f"   0x3   : > > {{ %p7 = scmp.ge.s32.totalorder %s1, 5 {test} }}",
        f"   0x4   : > {{ %p5 = scmp.ge.s32.totalorder (%p7), %s2, 3 {test} }}",
    ]
    assert weigh(lines) == 3 * (2 + 5 * 2)


def test_a_loop_whose_marks_are_missing_in_its_midst_is_one_loop():
    test = "/* loop exit test */"
    lines = [
        "   0x1 LB: > { %1 = b }",
        f"   0x2   : > {{ %p = scmp.ge.s32.totalorder %s, 5 {test} }}",
        "   0x3   : { %2 = c }",
        "   0x4   : > { %3 = d }",
        "   0x5   : { %4 = e }",
        "   0x6 LB: > { %5 = f }",
        f"   0x7   : > {{ %q = scmp.ge.s32.totalorder %s, 3 {test} }}",
    ]
    assert weigh(lines) == 5 * 4 + 1 + 3 * 2
