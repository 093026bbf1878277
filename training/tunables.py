"""Options that a sweep changes, as inputs of the compiled step: new values need no compilation.

Both kinds of schedule are formulas of a few such numbers; optax's schedules would give a different
program for every length and peak.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from training.options import OptimizerOptions


class Schedule(NamedTuple):
    """Warm-up from 0, a constant rate, and a decay; float32 scalars except counts and `cosine`.

    Reciprocals are computed once, here, as the compiler would for constants.

    Attributes:
        peak: the rate after warm-up.
        final, span: the rate at the end as a fraction of the peak, and 1 minus that.
        warmup: updates of warm-up, int32. per_warmup: 1 / warmup.
        begin, decay: updates before and during the decay, int32. per_decay: 1 / decay.
        cosine: whether the decay is half a cosine, else linear; bool.
    """

    peak: jax.Array
    final: jax.Array
    span: jax.Array
    warmup: jax.Array
    per_warmup: jax.Array
    begin: jax.Array
    decay: jax.Array
    per_decay: jax.Array
    cosine: jax.Array


class Tunables(NamedTuple):
    """float32 scalars; see training/options.py for their meaning."""

    schedule: Schedule
    clip_norm: jax.Array
    weight_decay: jax.Array
    z_loss: jax.Array


def tunables_of(options: OptimizerOptions, z_loss: float) -> Tunables:
    """options: with `schedule_steps` filled in. z_loss: config.train.z_loss."""
    return Tunables(
        schedule=schedule_of(options),
        clip_norm=jnp.float32(options.clip_norm),
        weight_decay=jnp.float32(options.weight_decay),
        z_loss=jnp.float32(z_loss),
    )


def schedule_of(options: OptimizerOptions) -> Schedule:
    cosine = options.schedule == "cosine"
    begin = options.warmup_steps if cosine else options.schedule_steps - options.decay_steps
    decay = options.schedule_steps - begin
    return Schedule(
        peak=jnp.float32(options.learning_rate),
        final=jnp.float32(options.min_lr_ratio),
        span=jnp.float32(1.0 - options.min_lr_ratio),
        warmup=jnp.int32(options.warmup_steps),
        per_warmup=jnp.float32(1.0) / max(options.warmup_steps, 1),
        begin=jnp.int32(begin),
        decay=jnp.int32(decay),
        per_decay=jnp.float32(1.0) / decay,
        cosine=jnp.bool_(cosine),
    )


def rate(schedule: Schedule, updates: jax.Array | int) -> jax.Array:
    """The learning rate, float32 [], after that number of updates; constant after the end."""
    s = schedule
    warming = s.peak - s.peak * (1.0 - updates * s.per_warmup)
    decayed = jnp.clip(updates - s.begin, 0, s.decay).astype(jnp.float32)
    curve = 0.5 * (1.0 + jnp.cos(decayed * np.float32(math.pi) * s.per_decay))
    left = jnp.where(s.cosine, curve, 1.0 - decayed * s.per_decay)
    return jnp.where(updates < s.warmup, warming, s.peak * (s.span * left + s.final))


def place(tunables: Tunables, mesh: Mesh) -> Any:
    """The same numbers, replicated on every device of all processes."""
    whole = NamedSharding(mesh, PartitionSpec())

    def put(number: jax.Array) -> jax.Array:
        return jax.make_array_from_callback((), whole, lambda index: np.asarray(number))

    return jax.tree.map(put, tunables)


def shapes_of(tunables: Tunables, mesh: Mesh) -> Any:
    """`place` without arrays: a tree of jax.ShapeDtypeStruct."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=whole), tunables)
