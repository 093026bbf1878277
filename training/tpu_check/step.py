"""Checks of whole training steps: gradients against float32 on the host, memory, time."""

import functools
import math
import statistics
import time
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from configs import base
from data.batch import Batch
from kernels.cases import error
from model.config import ModelConfig
from model.params import init_params
from training.estimate import factors
from training.estimate.collectives import collectives
from training.estimate.compile import abstract_step
from training.estimate.plan import step_time
from training.estimate.program import works
from training.estimate.timeline import CONTEXT, events_of
from training.estimate.topology import Generation, Topology
from training.report import compiled_peak_bytes
from training.state import TrainState, flatten
from training.tpu_check.outcome import Outcome
from training.tpu_check.site import Mode, Program, Site
from training.tpu_check.values import KERNELS, packed_ids

VOCABULARY = 500
# A step in bfloat16 against one in float32: roundings of 2^-9 in every product of two layers and
# back; gradients of small parameters are sums that cancel.
LOSS, GRADIENT, STATE = 1e-3, 3e-2, 3e-2
MEMORY = 1.1  # the devices' peak over the compiler's


def checked_config(ranks: int, small: bool) -> ConfigDict:
    """A KDA layer and an attention layer; steps whose first moments are the gradient."""
    config = base.get_config()
    width, heads, size, tokens = (32, 2, 16, 64) if small else (256, 2, 128, 256)
    config.mesh.context = ranks
    config.model.update(
        vocab_size=VOCABULARY, d_model=width, pattern="kda,attention", num_repeats=1,
        d_ff=2 * width, kda_heads=heads, key_dim=size, value_dim=size, gate_rank=size,
        attention_heads=heads, attention_kv_heads=1, attention_head_dim=size,
        compute_dtype="bfloat16", kda_implementation=KERNELS,
    )  # fmt: skip
    config.data.update(global_batch_size=2, sequence_length=ranks * tokens)
    config.optimizer.update(name="adamw", clip_norm=1e9)
    return config


def large_config(ranks: int, small: bool) -> ConfigDict:
    """Four KDA layers of width 1024, a row of 4096 tokens per rank: seconds to compile, and a peak
    that is far above what else is in memory."""
    config = checked_config(ranks, small)
    if small:
        config.model.kda_implementation = "chunked"  # compiles fast; the values are another check's
    else:
        config.model.update(
            vocab_size=32768, d_model=1024, pattern="kda", num_repeats=4, d_ff=2816,
            kda_heads=8, gate_rank=128,
        )  # fmt: skip
        config.data.update(global_batch_size=1, sequence_length=ranks * 4096)
    return config


def programs_of(config: ConfigDict, site: Site) -> list[Program]:
    """The compiled step with a state and a batch."""
    step, (shapes, batch, votes), model, _ = abstract_step(
        list(site.devices), config, config.model.vocab_size
    )
    if site.mode is Mode.COMPILE:
        return [site.compile(step, shapes, batch, votes)]
    arguments = (_state(shapes, model), _batch(batch, config.model.vocab_size), _zeros(votes))
    return [site.compile(step, *arguments)]


def _state(shapes: TrainState, model: ModelConfig) -> TrainState:
    """The state before the first step: all zeros but the parameters, which the host draws."""
    with jax.default_device(jax.devices("cpu")[0]):
        params = jax.jit(functools.partial(init_params, model))(jax.random.key(0))
    placed = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), params, shapes.params)
    return _zeros(shapes)._replace(params=placed)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), shapes)


def _batch(shapes: Batch, vocabulary: int) -> Batch:
    """Random tokens in rows of several segments."""
    random = np.random.default_rng(0)
    windows, rows, length = shapes.tokens.shape
    ids = packed_ids(rows, length)[None].repeat(windows, 0)
    made = {
        "tokens": random.integers(0, vocabulary, ids.shape),
        "targets": random.integers(0, vocabulary, ids.shape),
        "segment_ids": ids,
        "loss_weights": ids != 0,
        "target_bytes": np.ones(ids.shape),
        "continues": np.zeros((windows, rows)),
    }
    placed = {
        name: jax.device_put(
            np.asarray(x, getattr(shapes, name).dtype), getattr(shapes, name).sharding
        )
        for name, x in made.items()
    }
    return shapes._replace(**placed)


# --- values --------------------------------------------------------------------------------------


def step_programs(site: Site) -> list[Program]:
    """One step of `checked_config` over all devices."""
    return programs_of(checked_config(len(site.devices), site.small), site)


def judge_step(site: Site, programs: list[Program]) -> Outcome:
    """Loss, gradient of every parameter (AdamW's first moment after one step) and carried state
    against the same step in float32, in jax.numpy, on one device of the host."""
    found = _numbers(site.run(programs[0]))
    config = checked_config(1, site.small)
    config.data.sequence_length *= len(site.devices)
    config.model.update(compute_dtype="float32", kda_implementation="chunked")
    host = jax.devices("cpu")[0]
    step, (shapes, batch, votes), model, _ = abstract_step([host], config, VOCABULARY)
    exact = _numbers(step(_state(shapes, model), _batch(batch, VOCABULARY), _zeros(votes)))
    errors = {name: error(found[name], x) for name, x in exact.items()}
    groups = {
        "loss": (LOSS, errors["loss"], "loss"),
        "gradient": (GRADIENT, *_largest(errors, "mu/")),
        "state": (STATE, *_largest(errors, "carry/")),
    }
    text = ", ".join(f"{g} {e:.1e} of {b:g} ({n})" for g, (b, e, n) in groups.items())
    return Outcome.of(all(e <= b for b, e, _ in groups.values()), text)


def _numbers(result: tuple[TrainState, dict[str, Any]]) -> dict[str, np.ndarray]:
    state, metrics = result
    moments = {
        "mu/" + name.split("/mu/")[-1]: x
        for name, x in flatten(state.opt_state).items()
        if "/mu/" in name
    }
    carried = {f"carry/{name}": x for name, x in flatten(state.carry).items()}
    arrays = {"loss": metrics["loss"]} | moments | carried
    return {name: np.asarray(x, np.float64) for name, x in arrays.items()}


def _largest(errors: dict[str, float], group: str) -> tuple[float, str]:
    """(error, name) of the worst array whose name begins like this; one that is not a number is the
    worst of all."""
    found = [
        (math.inf if math.isnan(e) else e, n) for n, e in errors.items() if n.startswith(group)
    ]
    return max(found)


# --- memory and time -----------------------------------------------------------------------------


def large_programs(site: Site) -> list[Program]:
    """One step of `large_config` over all devices."""
    return programs_of(large_config(len(site.devices), site.small), site)


def judge_large(site: Site, programs: list[Program]) -> Outcome:
    """The devices' peak against the compiler's, and seconds per step against the plan's."""
    (program,) = programs
    predicted = compiled_peak_bytes(program.compiled) or 0
    seconds = _step_seconds(site, program)
    measured = f"{1e3 * seconds:.1f} ms per step"
    if site.generation is None:
        return Outcome.of(True, f"compiled peak {predicted / 1e6:.1f} MB, {measured} interpreted")
    stats = [device.memory_stats() or {} for device in site.devices]
    peak = max(each.get("peak_bytes_in_use", 0) for each in stats)
    reserved = max(each.get("peak_bytes_reserved", 0) for each in stats)
    built_in, calibrated = _estimates(site, program, site.generation)
    return Outcome.of(
        0 < peak + reserved <= MEMORY * predicted,
        f"peak {(peak + reserved) / 1e9:.3f} GB ({reserved / 1e9:.3f} reserved), compiled "
        f"{predicted / 1e9:.3f}; {measured}, estimated {built_in} by built-in speeds, "
        f"{calibrated} by measured ones",
    )


def _step_seconds(site: Site, program: Program) -> float:
    """Median over steps, each from the state of the one before (it is given up)."""
    state, batch, votes = program.arguments
    times = []
    for _ in range(2 if site.small else 8):
        with site.kernels():
            start = time.perf_counter()
            state, metrics = program.compiled(state, batch, votes)
            jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _estimates(site: Site, program: Program, generation: Generation) -> tuple[str, str]:
    """The plan's step time with the built-in speeds and with those of the file of factors."""
    path = site.factors if site.factors and site.factors.exists() else None
    measured = factors.calibrated(Topology(generation, ()), path).generation
    times = [f"{1e3 * estimate(site, program, each):.1f} ms" for each in (generation, measured)]
    return times[0], times[1] if measured.measured else "no"


def estimate(site: Site, program: Program, generation: Generation) -> float:
    """Seconds of a step, as `--plan` estimates them."""
    module, ranks = program.module, len(site.devices)
    found = works(module, program.schedule.latest)
    exchanged = collectives(module, found, {"data": 1, "fsdp": 1, CONTEXT: ranks, "tensor": 1})
    events = events_of(found, exchanged, program.schedule.trees, generation)
    return step_time(found, exchanged, events, ranks, generation).total
