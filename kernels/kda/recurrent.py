"""Backend "recurrent": the reference with the internal signature of `problem.py`.

Slow and simple. Under context parallelism every rank gathers and runs the whole row and keeps its
own slice. JAX differentiates this computation directly.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kernels.kda.problem import Entry, FinalState, Inputs, Problem
from kernels.kda.reference import recurrence
from kernels.segments import Segments


def forward(problem: Problem, inputs: Inputs, segments: Segments, entry: jax.Array | None):
    """See `problem.py`. No residuals, and no entry state: a rank always runs the whole row."""
    out, final = _run(problem, segments.index, inputs)
    if problem.entry is Entry.KEPT:
        entry = jnp.zeros_like(inputs.q[:, :, 0, :, None] * inputs.v[:, :, 0, None], jnp.float32)
    return out, final, entry, ()


def backward(problem: Problem, inputs: Inputs, segments: Segments, residuals, d_out, d_final):
    """See `problem.py`."""
    del residuals
    run = functools.partial(_run, problem, segments.index)
    _, pull = jax.vjp(run, inputs)
    return pull((d_out, d_final))[0]


def _run(problem: Problem, index: jax.Array, inputs: Inputs):
    if problem.axis_name is None:
        return _whole(problem, index, inputs)
    length, rank = index.shape[1], jax.lax.axis_index(problem.axis_name)
    gather = functools.partial(jax.lax.all_gather, axis_name=problem.axis_name, tiled=True)
    tokens = {
        name: gather(getattr(inputs, name), axis=2) for name in ("q", "k", "v", "decay", "beta")
    }
    local = dataclasses.replace(problem, axis_name=None)
    out, final = _whole(local, gather(index, axis=1), inputs._replace(**tokens))
    out = jax.lax.dynamic_slice_in_dim(out, rank * length, length, axis=2)
    # Every rank holds the whole row's final state; only rank 0 contributes it.
    return out, None if final is None else jnp.where(rank == 0, final, 0)


def _whole(problem: Problem, index: jax.Array, inputs: Inputs):
    everything = problem.final_state is FinalState.ALL
    out, last, table = recurrence(
        *inputs[:5],
        index,
        initial_state=inputs.initial_state,
        default_initial_state=inputs.default_initial_state,
        a_log=inputs.a_log,
        dt_bias=inputs.dt_bias,
        lower_bound=problem.lower_bound,
        l2norm=problem.l2norm,
        scale=problem.scale,
        table_size=(problem.max_segments or 0) if everything else 0,
    )
    finals = {FinalState.NONE: None, FinalState.LAST: last, FinalState.ALL: table}
    return out.astype(inputs.v.dtype), finals[problem.final_state]
