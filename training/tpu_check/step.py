"""Checks of whole training steps: gradients against float32 on the host, memory, time."""

import functools
import math
import statistics
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
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
from training.optimizer import options_of
from training.report import compiled_peak_bytes
from training.state import TrainState, flatten
from training.tpu_check.outcome import Outcome
from training.tpu_check.site import Mode, Program, Site
from training.tpu_check.values import KERNELS, packed_ids
from training.tunables import place, tunables_of

VOCABULARY = 500
# A step in bfloat16 against one in float32: rounding errors of 2^-9 in every product of two layers,
# forward and backward; gradients of small parameters are sums that cancel.
LOSS, GRADIENT, STATE = 1e-3, 3e-2, 3e-2
MEMORY = 1.1  # largest ratio of the devices' peak to the compiler's


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
    """Four KDA layers of width 512, a row of 2048 tokens per rank: hundreds of megabytes, and a
    fraction of the time that larger ones take to compile."""
    config = checked_config(ranks, small)
    if small:
        config.model.kda_implementation = (
            "chunked"  # compiles fast; another check covers the values
        )
    else:
        config.model.update(
            vocab_size=8192, d_model=512, pattern="kda", num_repeats=4, d_ff=1408, kda_heads=4
        )
        config.data.update(global_batch_size=1, sequence_length=ranks * 2048)
    return config


def programs_of(config: ConfigDict, site: Site) -> list[Program]:
    """The compiled step with a state and a batch."""
    step, abstract, model, mesh = abstract_step(list(site.devices), config, config.model.vocab_size)
    if site.mode is Mode.COMPILE:
        return [site.compile(step, *abstract)]
    return [site.compile(step, *_arguments(config, abstract, model, mesh))]


def _arguments(config: ConfigDict, abstract: tuple, model: ModelConfig, mesh: Mesh) -> tuple:
    """State, batch, votes and tunables of a step of this config."""
    shapes, batch, votes, _ = abstract
    options = options_of(config.optimizer, config.train.steps)
    tunables = place(tunables_of(options, config.train.z_loss), mesh)
    vocabulary = config.model.vocab_size or VOCABULARY
    return _state(shapes, model), _batch(batch, vocabulary), _zeros(votes), tunables


def _state(shapes: TrainState, model: ModelConfig) -> TrainState:
    """The state before the first step: all zeros except the parameters, drawn on the host."""
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
    step, abstract, model, mesh = abstract_step([host], config, VOCABULARY)
    exact = _numbers(step(*_arguments(config, abstract, model, mesh)))
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
    """(error, name) of the worst array whose name has this prefix; NaN is the worst error."""
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
        f"{predicted / 1e9:.3f}; {measured}, estimated {built_in} with built-in speeds, "
        f"{calibrated} with measured ones",
    )


def _step_seconds(site: Site, program: Program) -> float:
    """Median over steps, each from the state of the previous one, which is donated."""
    state, *others = program.arguments
    times = []
    for _ in range(2 if site.small else 8):
        with site.kernels():
            start = time.perf_counter()
            state, metrics = program.compiled(state, *others)
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
