"""The short convolution on TPU, forward + VJP: our kernels beside XLA's code for jax.numpy.

    python -m benchmarks.short_conv_tpu [--topology v5p:2x2x1]

One of q, k and v: bf16, B 1, 4 taps, 16 heads of 128, T 8192 over a context axis of 4, silu,
segment ids and a tail given; compiled for a topology that need not be here, by default
tpu7x:2x2x1. Peak memory of one device in decimal MB; bundles as estimate/bundles.py reads them.
XLA's own loops count once: what
it says of "chunked", whose weight gradient is a loop, is a lower bound.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

SHAPE = (1, 8192, 2048)  # B, T, D
HEADS, TAPS, RANKS = 16, 4, 4
TOPOLOGY = "tpu7x:2x2x1"


def build(devices, implementation: str | None, sizes=SHAPE, heads=HEADS, dtype: str = "bfloat16"):
    """(function, abstract arguments), x of `sizes` and `dtype` over a context axis of RANKS."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from kernels.segments import plan_segments
    from kernels.short_conv import short_conv

    mesh, token = Mesh(np.array(devices[:RANKS]), ("context",)), P(None, "context")
    by_head = P(None, None, "context")

    def call(x, weight, tail, ids):
        segments = plan_segments(ids, "context")
        return short_conv(
            x,
            weight,
            segments,
            heads=heads,
            tail=tail,
            axis_name="context",
            implementation=implementation,
        )

    mapped = jax.shard_map(
        call, mesh=mesh, in_specs=(token, P(), P(), token), out_specs=(by_head, P())
    )

    def function(x, weight, tail, ids, cotangents):
        value, pull = jax.vjp(lambda *args: mapped(*args, ids), x, weight, tail)
        return value, pull(cotangents)

    def shape(sizes, dtype, spec):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    rows, tokens, channels = sizes
    x, tail = shape(sizes, dtype, token), shape((rows, TAPS - 1, channels), dtype, P())
    weight, ids = shape((TAPS, channels), "float32", P()), shape((rows, tokens), "int32", token)
    y = shape((rows, heads, tokens, channels // heads), dtype, by_head)
    return jax.jit(function), (x, weight, tail, ids, (y, tail))


def compile_here(implementation: str, topology: str) -> float:
    """Peak MB; this process's environment says where schedules go."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    function, arguments = build(devices, implementation)
    compiled = function.lower(*arguments).compile()
    return compiled.memory_analysis().peak_memory_in_bytes / 1e6


def measure(implementation: str, topology: str) -> str:
    """A line of the table, compiled in a separate process."""
    from training.estimate import bundles

    with tempfile.TemporaryDirectory(prefix="short_conv_tpu_") as dump:
        child = subprocess.run(
            [
                *(sys.executable, "-m", "benchmarks.short_conv_tpu"),
                *("--child", implementation, "--topology", topology),
            ],
            env=os.environ | bundles.compiler_environment(dump),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        peak, found = json.loads(child.stdout.splitlines()[-1]), bundles.read(dump)
    kernels = [found.of(f"short_conv_{name}") for name in ("forward", "backward")]
    return (
        f"{implementation:10s}  peak {peak:7.2f} MB  bundles {found.total:9d} "
        f"(our kernels: forward {kernels[0]}, backward {kernels[1]})"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--topology", default=TOPOLOGY, help="as libtpu names it")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(compile_here(args.child, args.topology)))
        return
    for implementation in ("mosaic_tpu", "chunked"):
        print(measure(implementation, args.topology), flush=True)


if __name__ == "__main__":
    main()
