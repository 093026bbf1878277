"""Generation on CPU: tokens per second and memory after contexts of different lengths.

    python -m benchmarks.generate [--contexts 1024 8192 65536] [--models KDA]
        [--tokens 64] [--rows 1]

The main config's sizes (configs/kda_cp4.py), pure KDA and a hybrid of three KDA layers and one MLA
layer whose attention sees the whole context, with random parameters in float32. Seconds per token
are the median of all tokens except the first two. Bytes are those of the carry, and what the
compiled step of one token needs in addition to its parameters (arguments, results, temporaries).
"""

import argparse
import dataclasses
import datetime
import functools
import os
import platform
import statistics
import time

import jax
import numpy as np

from model.config import ModelConfig
from model.generate import Generator, Sampling
from model.params import init_params
from training.mesh import arrange

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
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
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
    for name in flags.models:
        for context in flags.contexts:
            cells = measure(MODELS[name], context, flags.tokens, flags.rows)
            print(f"| {name} | {cells} |", flush=True)


@functools.cache
def make_generator(cfg: ModelConfig, memory: int) -> Generator:
    """A generator with random parameters."""
    mesh = arrange({}, jax.devices()[:1])
    params = jax.jit(lambda key: init_params(cfg, key))(jax.random.key(0))
    return Generator(params, cfg, mesh, attention_memory=memory)


@functools.cache
def step_bytes(cfg: ModelConfig, memory: int, rows: int) -> int:
    """See `Generator.step_bytes`."""
    return make_generator(cfg, memory).step_bytes(rows)


def measure(cfg: ModelConfig, context: int, tokens: int, rows: int) -> str:
    """The cells of one row of the table."""
    memory = 0 if cfg.pattern == "kda" else context + tokens  # KDA reads no attention_memory
    generator = make_generator(cfg, memory)
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
        f"| {step_bytes(cfg, memory, rows) / MB:.2f}"
    )


if __name__ == "__main__":
    main()
