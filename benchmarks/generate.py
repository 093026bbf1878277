"""Generation on CPU: tokens per second and memory after contexts of different lengths.

    python -m benchmarks.generate [--contexts 1024 8192 65536] [--tokens 64] [--rows 1]

The main config's sizes (configs/kda_cp4.py), pure KDA and a hybrid of three KDA layers and one MLA
layer whose attention sees the whole context, with random parameters in float32. Seconds per token
are the median of all tokens except the first two. Bytes are those of the carry, and what the
compiled step of one token needs in addition to its parameters (arguments, results, temporaries).
"""

import argparse
import dataclasses
import datetime
import os
import platform
import statistics
import time

import jax
import numpy as np

from model.axes import MESH_AXES
from model.config import ModelConfig
from model.generate import Generator, Sampling
from model.params import init_params

KDA = ModelConfig(
    vocab_size=258,
    d_model=256,
    pattern="kda",
    num_repeats=4,
    d_ff=512,
    kda_heads=2,
    mla_heads=2,
    mla_kv_rank=256,
    compute_dtype="float32",
)
HYBRID = dataclasses.replace(KDA, pattern="kda,kda,kda,mla", num_repeats=1)
MODELS = {"KDA": KDA, "KDA 3 : MLA 1": HYBRID}
MB = 1e6


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1)
    flags = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}, {datetime.date.today()}; {flags.rows} rows\n"
    )
    print(
        "| model | context | prefill tokens/s | decode tokens/s | ms/token | carry MB | step MB |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, cfg in MODELS.items():
        for context in flags.contexts:
            print(f"| {name} | {measure(cfg, context, flags.tokens, flags.rows)} |", flush=True)


def measure(cfg: ModelConfig, context: int, tokens: int, rows: int) -> str:
    """The cells of one row of the table."""
    types = (jax.sharding.AxisType.Auto,) * len(MESH_AXES)
    mesh = jax.make_mesh((1,) * len(MESH_AXES), MESH_AXES, axis_types=types)
    params = jax.jit(lambda key: init_params(cfg, key))(jax.random.key(0))
    generator = Generator(params, cfg, mesh, attention_memory=context + tokens)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, cfg.vocab_size, context).astype(np.int32) for _ in range(rows)]
    jax.block_until_ready(generator.prefill([prompt[:1024] for prompt in prompts]))  # compiles
    began = time.perf_counter()
    done = jax.block_until_ready(generator.prefill(prompts))
    prefill = rows * context / (time.perf_counter() - began)
    carry = sum(x.nbytes for x in jax.tree.leaves(done.carry))
    times = [time.perf_counter()]
    for _ in generator.tokens(done, tokens, Sampling(), seed=0):
        times.append(time.perf_counter())
    step = statistics.median(np.diff(times)[2:])
    return (
        f"{context:,} | {prefill:,.0f} | {rows / step:,.0f} | {1e3 * step:.2f} | {carry / MB:.2f} "
        f"| {generator.step_bytes(rows) / MB:.2f}"
    )


if __name__ == "__main__":
    main()
