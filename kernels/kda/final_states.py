"""Start states of segments, and a rank's part of the returned states, for both fast forms."""

import jax
import jax.numpy as jnp

from kernels.kda.problem import Problem
from kernels.segments import Segments


def is_last_rank(problem: Problem) -> jax.Array | bool:
    """Whether this rank holds the rows' ends."""
    if problem.axis_name is None:
        return True
    return jax.lax.axis_index(problem.axis_name) == jax.lax.axis_size(problem.axis_name) - 1


def start_states(initial_state, default_initial_state, number: int, like: jax.Array):
    """Start states of segments 0 .. number - 1, [B, number, H, K, V]; `like` is a state
    [B, H, K, V]."""
    shape = (like.shape[0], number, *like.shape[1:])
    fresh = jnp.zeros_like(like, shape=shape)
    if default_initial_state is not None:
        fresh = jnp.broadcast_to(default_initial_state, shape)
    if initial_state is None:
        return fresh
    slots = min(number, initial_state.shape[1])
    return jnp.concatenate([initial_state[:, :slots], fresh[:, slots:]], axis=1)


def with_empty_segments(problem: Problem, segments: Segments, ended, starts) -> jax.Array:
    """This rank's part of all segments' states [B, n, H, K, V]. `ended` holds those that end on
    this rank, 0 elsewhere; on the last rank, segments without tokens return their start state."""
    empty = (jnp.arange(ended.shape[1]) >= segments.count)[..., None, None, None]
    return jnp.where(empty, jnp.where(is_last_rank(problem), starts, 0), ended)
