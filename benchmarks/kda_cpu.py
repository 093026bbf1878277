"""Time and memory of the chunked form on CPU: forward + VJP at B 1, H 4, K = V = 128.

    JAX_PLATFORMS=cpu python -m benchmarks.kda_cpu

Fused bounded gate (lower bound -5), l2-normalised q and k, a cotangent on the output. If tokamax is
installed, its "xla_chunked" runs the same case in the same process (it takes arrays [H, B, T, K],
prepared beforehand). Runs alternate. The table has the minimum and median wall time, the minimum
processor time (steadier on a shared machine), XLA's temporary memory in addition to inputs and
outputs, and the processor time of compilation.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from kernels.kda import kda

HEADS, CHANNELS, LOWER_BOUND = 4, 128, -5.0


def arguments(length: int, dtype) -> tuple:
    """q, k, v, raw gate, beta [1, H, T, .], a_log [H], dt_bias [H, K] and the cotangent of out."""
    rng = np.random.default_rng(0)
    token = (1, HEADS, length, CHANNELS)
    q, k, v, x, d_out = (jnp.asarray(rng.standard_normal(token), dtype) for _ in range(5))
    beta = jax.nn.sigmoid(jnp.asarray(rng.standard_normal(token[:3]), jnp.float32))
    a_log = jnp.asarray(np.log(rng.uniform(1, 16, HEADS)), jnp.float32)
    dt_bias = jnp.asarray(rng.uniform(-8, -1.5, (HEADS, CHANNELS)), jnp.float32)
    return q, k, v, x, beta, a_log, dt_bias, d_out


def ours(policy: str):
    """Forward + VJP of this project's chunked form."""

    def attend(q, k, v, x, beta, a_log, dt_bias):
        return kda(
            q, k, v, x, beta, a_log=a_log, dt_bias=dt_bias, lower_bound=LOWER_BOUND, qk_l2norm=True,
            state_policy=policy, implementation="chunked",
        )[0]  # fmt: skip

    return with_vjp(attend)


def with_vjp(attend):
    """(*inputs, d_out) -> (out, gradients)."""

    def run(*args):
        *inputs, d_out = args
        out, pull = jax.vjp(attend, *inputs)
        return out, pull(d_out)

    return run


def tokamax_chunked():
    """The same for tokamax's xla_chunked, or None if tokamax is not installed."""
    try:
        from tokamax._src.ops.kda.api import kimi_delta_attention
    except ImportError:
        return None

    def attend(q, k, v, x, beta, a_log, dt_bias):
        return kimi_delta_attention(
            q, k, v, x, beta, a_log=a_log, delta_time_bias=dt_bias.reshape(-1),
            use_qk_l2norm=True, use_gate_in_kernel=True, lower_bound=LOWER_BOUND,
            implementation="xla_chunked",
        )[0]  # fmt: skip

    def heads_first(*args):
        return tuple(x if x.ndim < 3 else jnp.moveaxis(x, 1, 0) for x in args)

    return with_vjp(attend), heads_first


def cases(length: int, dtype) -> dict:
    """Name -> (compiled function, arguments, processor seconds to compile)."""
    args = arguments(length, dtype)
    runs = {f"ours ({policy})": (ours(policy), args) for policy in ("remat", "save")}
    other = tokamax_chunked()
    if other is not None:
        runs["tokamax xla_chunked"] = (other[0], other[1](*args))
    compiled = {}
    for name, (function, inputs) in runs.items():
        start = time.process_time()
        built = jax.jit(function).lower(*inputs).compile()
        compiled[name] = built, inputs, time.process_time() - start
    return compiled


def measure(compiled: dict, repeats: int) -> dict:
    """By name, (wall, processor) seconds of each call [repeats, 2]; the calls alternate."""
    seconds = {name: [] for name in compiled}
    for turn in range(repeats + 2):
        for name, (function, inputs, _) in compiled.items():
            start = np.array([time.perf_counter(), time.process_time()])
            jax.block_until_ready(function(*inputs))
            if turn >= 2:
                end = np.array([time.perf_counter(), time.process_time()])
                seconds[name].append(end - start)
    return {name: np.array(x) for name, x in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, forward + VJP, B 1 H {HEADS}")
    columns = ("least ms", "median ms", "least CPU ms", "temporary MB", "compile CPU s")
    print(f"{'dtype':10}{'T':>7}  {'implementation':22}" + "".join(f"{c:>15}" for c in columns))
    for dtype in options.dtypes:
        for length in options.lengths:
            compiled = cases(length, dtype)
            for name, seconds in measure(compiled, options.repeats).items():
                function, _, build = compiled[name]
                wall, processor = (seconds * 1e3).T
                memory = function.memory_analysis().temp_size_in_bytes / 1e6
                figures = wall.min(), np.median(wall), processor.min(), memory, build
                row = f"{dtype:10}{length:7}  {name:22}"
                print(row + "".join(f"{x:15.1f}" for x in figures), flush=True)


if __name__ == "__main__":
    main()
