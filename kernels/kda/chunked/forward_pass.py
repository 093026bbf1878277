"""The forward of the chunked form, see `kernels.kda.chunked`."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda.chunked import states as st
from kernels.kda.chunked.call import (
    Call,
    arrange,
    chain_states,
    chosen,
    gather_raw,
    grid_of,
    pick,
    step_share,
    step_starts,
)
from kernels.kda.chunked.layout import Grid, collect, put_step
from kernels.kda.chunked.states import Events
from kernels.kda.chunked.steps import (
    Local,
    local_part,
    through_chunks,
)
from kernels.kda.chunked.tokens import Raw, prepare
from kernels.kda.chunked.wavefront import wavefront
from kernels.kda.final_states import is_last_rank, start_states, with_empty_segments
from kernels.kda.problem import CHUNK, Entry, FinalState, Inputs, Problem, StatePolicy
from kernels.kda.products import dot
from kernels.segments import Segments
from kernels.vma import zeros_like_varying


class EndChunks(NamedTuple):
    """Arrays of the chunks in which segments 0 .. n - 1 end."""

    S: jax.Array  # [J, G, n, K, V] entry states
    v_new: jax.Array  # [J, G, n, C, V]


class Saved(NamedTuple):
    """The intermediate results that StatePolicy.SAVE keeps, by step [J, G, N, M, ...]."""

    S: jax.Array  # [..., K, V]
    v_new: jax.Array  # [..., C, V]
    A: jax.Array  # [..., C, C]
    Aqk: jax.Array  # [..., C, C]


class Kept(NamedTuple):
    """The residuals for the backward."""

    entry: jax.Array  # [J, G, N, K, V] state before each step
    ends: EndChunks | None  # for FinalState.ALL
    saved: Saved | None


# --- forward --------------------------------------------------------------------------------------


def forward(problem: Problem, inputs: Inputs, segments: Segments, entry: jax.Array | None):
    """See `problem.py`. Residuals: `Kept`."""
    grid = grid_of(problem, inputs)
    call = arrange(problem, grid, inputs, segments)

    def visit(group, active, state, carry):
        def step(n, loop):
            state, (out, kept) = loop
            here = step_share(call, group, n)
            tokens = prepare(problem, here.raw, here.chunks.valid)
            starts = step_starts(call, here, tokens, group, n)
            local = local_part(tokens, here, starts)
            kept = kept._replace(entry=put_step(kept.entry, state, group, n))
            state, S, v_new = through_chunks(state, tokens, local, starts)
            o = dot(tokens.q * local.P, S, "ab") + dot(local.Aqk, v_new, "ab")
            o = o if starts is None else o + starts.out
            out = put_step(out, jnp.where(here.chunks.valid, o, 0), group, n)
            return state, (out, _keep(call, kept, local, S, v_new, group, n))

        return jax.lax.fori_loop(0, number_of_steps(grid, active), step, (state, carry))

    out = zeros_like_varying(call.v, call.v.shape, call.v.dtype)
    carry = out, _empty_kept(problem, grid, call)
    axis_name = None if problem.entry is Entry.GIVEN else problem.axis_name
    states = no_state(grid, call) if entry is None else entry.reshape(*grid[:2], *entry.shape[2:])
    exits, (out, kept) = wavefront(axis_name, visit, states, carry)
    final = _final_state(problem, inputs, segments, call, exits, kept)
    if problem.entry is Entry.KEPT:
        entry = kept.entry[:, :, 0].reshape(*inputs.q.shape[:2], *kept.entry.shape[3:])
    return collect(out, inputs.v), final, entry, kept


def number_of_steps(grid: Grid, active):
    return grid.steps if active is True else jnp.where(active, grid.steps, 0)


def no_state(grid: Grid, call: Call) -> jax.Array:
    shape = (*grid[:2], call.raw.k.shape[-1], call.v.shape[-1])
    return zeros_like_varying(call.v, shape)


def _empty_kept(problem: Problem, grid: Grid, call: Call) -> Kept:
    keys, values = call.raw.k.shape[-1], call.v.shape[-1]
    zeros = functools.partial(zeros_like_varying, call.v)
    ends = saved = None
    if call.ends is not None:
        shape = (*grid[:2], call.ends.chunk.shape[1])
        ends = EndChunks(zeros((*shape, keys, values)), zeros((*shape, CHUNK, values)))
    if problem.state_policy is StatePolicy.SAVE:
        matrix = zeros((*grid, CHUNK, CHUNK))
        saved = Saved(zeros((*grid, keys, values)), zeros((*grid, CHUNK, values)), matrix, matrix)
    return Kept(zeros((*grid[:3], keys, values)), ends, saved)


def _keep(call: Call, kept: Kept, local: Local, S, v_new, group, n) -> Kept:
    ends, saved = kept.ends, kept.saved
    if call.ends is not None and ends is not None:
        here = chosen(call.ends, v_new.shape[:2], group, n)
        ends = jax.tree.map(
            lambda total, x: total.at[group].add(pick(here, x)), ends, EndChunks(S, v_new)
        )
    if saved is not None:
        put = functools.partial(put_step, group=group, step=n)
        saved = jax.tree.map(put, saved, Saved(S, v_new, local.A, local.Aqk))
    return kept._replace(ends=ends, saved=saved)


def _final_state(problem: Problem, inputs: Inputs, segments: Segments, call: Call, exits, kept):
    """This rank's contribution to the returned state; differentiated in `_final_state_vjp`."""
    initial, start = inputs.initial_state, inputs.default_initial_state
    if problem.final_state is FinalState.LAST:
        return last_state(problem, segments, exits, initial, start)
    if call.ends is not None:
        raw = gather_raw(call.ends, call.raw)
        return all_states(problem, segments, call, call.ends, raw, kept.ends, initial, start)
    return None


def last_state(problem: Problem, segments: Segments, exits, initial, start):
    """Padding leaves the state unchanged, so the last rank's exit state is the last segment's."""
    exits = exits.reshape(segments.index.shape[0], -1, *exits.shape[2:])  # [B, H, K, V]
    starts = start_states(initial, start, 1, exits)[:, 0]
    last = jnp.where((segments.count == 0)[..., None, None], starts, exits)
    return jnp.where(is_last_rank(problem), last, 0)


def all_states(
    problem: Problem, segments: Segments, call: Call, events: Events, raw: Raw, ends: EndChunks,
    initial, start,
):  # fmt: skip
    rows, (chains, number) = segments.index.shape[0], events.chunk.shape
    like = zeros_like_varying(ends.S, (rows, chains // rows, *ends.S.shape[3:]))
    starts = start_states(initial, start, number, like)
    chunks = jax.tree.map(functools.partial(st.gather, events), call.chunks)
    S, v_new = (x.reshape(chains, *x.shape[2:]) for x in ends)
    ended = st.segment_ends(problem, raw, chunks, events.here, S, v_new, chain_states(starts))
    ended = jnp.moveaxis(ended.reshape(rows, -1, *ended.shape[1:]), 1, 2)
    return with_empty_segments(problem, segments, ended, starts)
