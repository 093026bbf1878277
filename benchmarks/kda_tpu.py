"""KDA on TPU: peak memory and bundles of forward and forward + VJP, compiled, and timed on a TPU.

    python -m benchmarks.kda_tpu                     the table; with tokamax if it is installed
    python -m benchmarks.kda_tpu --case cp4 --tokens 8192 --pass forward --topology v6e:2x2
    python -m benchmarks.kda_tpu --time              on a TPU: also wall time

bf16 q, k, v, decay (given form), float32 beta, K = V = 128, a cotangent of ones. Cases:
    cp4      H 8, B 2, context 4, one segment, T tokens over all ranks
    one      H 32, B 1, one device, one segment
    packed   the same with 25 documents in the row
    start    cp4, where every document starts from a given state

Peak memory is the compiler's, per device, in decimal MB; bundles are those that one device issues
(see estimate/bundles.py). Compiling needs no TPU: each case compiles in a separate process for an
absent topology. With --time the cases run on the TPUs of this machine; the median of 20
synchronised runs after 3 warm-ups is printed, without compile time.
"""

import argparse
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

CHANNELS = 128
DOCUMENTS = 25


class Case(NamedTuple):
    heads: int
    rows: int
    ranks: int
    documents: int
    start: bool = False


CASES = {
    "cp4": Case(8, 2, 4, 1),
    "one": Case(32, 1, 1, 1),
    "packed": Case(32, 1, 1, DOCUMENTS),
    "start": Case(8, 2, 4, 1, start=True),
}
TABLE = [
    ("cp4", 512, "tpu7x:2x2x1"),
    ("cp4", 2048, "tpu7x:2x2x1"),
    ("cp4", 4096, "tpu7x:2x2x1"),
    ("cp4", 8192, "tpu7x:2x2x1"),
    ("one", 8192, "tpu7x:2x2x1"),
    ("packed", 8192, "tpu7x:2x2x1"),
    ("cp4", 8192, "v6e:2x2"),
]


def document_ids(case: Case, tokens: int):
    """[B, T] int32: documents of uneven lengths (every third one half as long) fill the row."""
    import numpy as np

    weights = np.where(np.arange(case.documents) % 3 == 0, 1.0, 2.0)
    ends = np.round(np.cumsum(weights) / weights.sum() * tokens).astype(int)
    ids = np.searchsorted(ends, np.arange(tokens), side="right").astype(np.int32) + 1
    return np.broadcast_to(ids, (case.rows, tokens))


def build(case: Case, tokens: int, devices, library: str, which: str):
    """(function, abstract arguments): q, k, v, decay, beta and, for packed rows, segment ids."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(devices[: case.ranks]).reshape(1, case.ranks), ("data", "context"))
    ours = library == "ours"
    lead = (case.rows, case.heads) if ours else (case.heads, case.rows)
    token, scalar = P(None, None, "context", None), P(None, None, "context")
    shapes = [((*lead, tokens, CHANNELS), jnp.bfloat16, token)] * 4
    shapes.append(((*lead, tokens), jnp.float32, scalar))
    if case.documents > 1:
        shapes.append(((case.rows, tokens), jnp.int32, P(None, "context")))
    attend = functools.partial(_attend_ours if ours else _attend_tokamax, case, mesh)

    def local(q, k, v, decay, beta, ids=None):
        call = functools.partial(attend, ids=ids)
        if which == "forward":
            return call(q, k, v, decay, beta)
        out, pull = jax.vjp(call, q, k, v, decay, beta)
        return out, pull(jnp.ones_like(out))

    out_specs = token if which == "forward" else (token, (token, token, token, token, scalar))
    specs = tuple(spec for _, _, spec in shapes)
    fn = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=ours)
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in shapes
    ]
    return jax.jit(fn), args


def _attend_ours(case, mesh, q, k, v, decay, beta, ids):
    import jax.numpy as jnp

    from kernels.kda import kda
    from kernels.segments import plan_segments

    segments = None if ids is None else plan_segments(ids, "context", DOCUMENTS)
    axis = "context" if case.ranks > 1 else None
    start = jnp.zeros((case.heads, CHANNELS, CHANNELS)) if case.start else None
    options = {"axis_name": axis, "implementation": "mosaic_tpu", "default_initial_state": start}
    return kda(q, k, v, decay, beta, segments, **options)[0]


def _attend_tokamax(case, mesh, q, k, v, decay, beta, ids):
    import jax.numpy as jnp
    from tokamax import config
    from tokamax._src.ops.kda import api, cp_utils

    parallel = None
    if case.ranks > 1:
        parallel = cp_utils.ContextParallelMetadata(mesh=mesh, axis_name="context")
        ids = jnp.ones((q.shape[1], q.shape[2]), jnp.int32)
    with config.cross_compile(True):  # the target TPU may be absent
        return api.kimi_delta_attention(
            q, k, v, decay, beta, segment_ids=ids, context_parallel_metadata=parallel,
            max_num_segments=None if ids is None else case.documents, implementation="mosaic",
        )[0]  # fmt: skip


# --- one case, in a separate process -----------------------------------------------------------


def compile_case(name: str, tokens: int, topology: str, library: str, which: str) -> dict:
    """Compiles in this process, whose environment determines where schedules are written."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    fn, args = build(CASES[name], tokens, devices, library, which)
    start = time.perf_counter()
    compiled = fn.lower(*args).compile()
    seconds = time.perf_counter() - start
    peak = compiled.memory_analysis().peak_memory_in_bytes
    return {"peak_mb": peak / 1e6, "compile_s": seconds}


def time_case(name: str, tokens: int, library: str, which: str, runs: int = 20) -> dict:
    """Median seconds of a synchronised run on this machine's TPUs, after three warm-ups."""
    import jax
    import numpy as np

    case = CASES[name]
    fn, args = build(case, tokens, jax.devices(), library, which)
    rng = np.random.default_rng(0)
    values = [_value(case, tokens, i, arg, rng) for i, arg in enumerate(args)]
    arrays = [jax.device_put(x.astype(arg.dtype), arg.sharding) for x, arg in zip(values, args)]
    start = time.perf_counter()
    compiled = fn.lower(*args).compile()
    compile_s = time.perf_counter() - start
    times = []
    for _ in range(runs + 3):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        times.append(time.perf_counter() - start)
    return {"median_ms": 1e3 * statistics.median(times[3:]), "compile_s": compile_s}


def _value(case, tokens, position, arg, rng):
    import numpy as np

    if position == 5:
        return document_ids(case, tokens)
    x = rng.standard_normal(arg.shape, np.float32)
    if position == 3:
        return -0.05 * np.abs(x)
    if position == 4:
        return 1 / (1 + np.exp(-x))
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


# --- the table -----------------------------------------------------------------------------------


def measure(name: str, tokens: int, topology: str, library: str, which: str) -> dict:
    """Compiles one case in a child process; returns its bundles and peak memory, or its error."""
    from training.estimate import bundles

    with tempfile.TemporaryDirectory(prefix="kda_tpu_") as dump:
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.kda_tpu", "--child", "--case", name,
             "--tokens", str(tokens), "--topology", topology, "--library", library,
             "--pass", which],
            env=os.environ | bundles.compiler_environment(dump), capture_output=True, text=True,
        )  # fmt: skip
        lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
        if not lines:
            return {"error": error_line(child.stderr)}
        found = bundles.read(dump)
    return json.loads(lines[-1]) | {
        "bundles": found.total,
        "forward": found.of("kda_forward"),
        "backward": found.of("kda_backward"),
    }


def error_line(stderr: str) -> str:
    """The last line of a traceback that names the error; JAX adds a note after it."""
    lines = [line for line in stderr.splitlines() if line.strip() and not line[0].isspace()]
    named = [line for line in lines if ": " in line and not line.startswith("For simplicity")]
    return (named or lines or ["no message"])[-1][:200]


def show(name, tokens, topology, library, which, result) -> None:
    head = f"{library:8s} {name:7s} T {tokens:6d}  {topology:12s} {which:8s}"
    if "error" in result:
        print(f"{head}  failed: {result['error']}", flush=True)
    elif "median_ms" in result:
        print(f"{head}  {result['median_ms']:9.3f} ms   compile {result['compile_s']:.1f} s")
    else:
        kernels = f"(forward {result['forward']}, backward {result['backward']})"
        print(
            f"{head}  peak {result['peak_mb']:8.2f} MB  bundles {result['bundles']:9d} "
            f"{kernels if library == 'ours' else ''}  compile {result['compile_s']:.1f} s",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, help="one case instead of the table")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--topology", default="tpu7x:2x2x1")
    parser.add_argument("--library", choices=["ours", "tokamax"], help="default: all installed")
    parser.add_argument("--pass", dest="which", choices=["forward", "grad"], help="default: both")
    parser.add_argument("--time", action="store_true", help="time on this machine's TPUs")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        result = compile_case(args.case, args.tokens, args.topology, args.library, args.which)
        print(json.dumps(result))
        return
    table = TABLE if args.case is None else [(args.case, args.tokens, args.topology)]
    libraries = ["ours", *(["tokamax"] if importlib.util.find_spec("tokamax") else [])]
    for name, tokens, topology in table:
        for library in [args.library] if args.library else libraries:
            for which in [args.which] if args.which else ["forward", "grad"]:
                result = measure(name, tokens, topology, library, which)
                show(name, tokens, topology, library, which, result)
                if args.time:
                    result = time_case(name, tokens, library, which)
                    show(name, tokens, topology, library, which, result)


if __name__ == "__main__":
    main()
