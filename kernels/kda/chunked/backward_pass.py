"""The backward of the chunked form: the forward's walk in reverse, see `kernels.kda.chunked`."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda.chunked import states as st
from kernels.kda.chunked.call import (
    Call,
    arrange,
    chosen,
    gather_raw,
    grid_of,
    pick,
    shared_start,
    slot_starts,
    spread,
    step_share,
    step_starts,
)
from kernels.kda.chunked.forward_pass import (
    EndChunks,
    Kept,
    all_states,
    last_state,
    no_state,
    number_of_steps,
)
from kernels.kda.chunked.layout import at_step, collect, deal, put_step
from kernels.kda.chunked.states import Events, Starts
from kernels.kda.chunked.steps import (
    Here,
    back_through_chunks,
    chunk_gradients,
    local_part,
    through_chunks,
)
from kernels.kda.chunked.tokens import Raw, prepare
from kernels.kda.chunked.wavefront import wavefront
from kernels.kda.problem import FinalState, Inputs, Problem
from kernels.kda.products import dot
from kernels.segments import Segments
from kernels.vma import zeros_like_varying


class Gradients(NamedTuple):
    """Gradients that the backward's walk accumulates."""

    raw: Raw  # [J, G, N, M, C, .] in the inputs' dtypes; the gate's parameters [J, G, 1, 1, .]
    v: jax.Array
    default_initial_state: jax.Array | None  # [J, G, K, V]
    slots: Starts | None  # [J, G, n, ...]


class Pulled(NamedTuple):
    """Gradients that flow through the returned state."""

    exits: jax.Array  # [J, G, K, V]
    ends: EndChunks | None
    raw: Raw | None  # of the chunks in which segments end
    initial_state: jax.Array | None
    default_initial_state: jax.Array | None


def backward(problem: Problem, inputs: Inputs, segments: Segments, residuals: Kept, d_out, d_final):
    """See `problem.py`."""
    grid, kept = grid_of(problem, inputs), residuals
    call = arrange(problem, grid, inputs, segments)
    d_out = deal(grid, d_out)
    pulled = _final_state_vjp(problem, inputs, segments, grid, call, kept, d_final)

    def visit(group, active, d_state, gradients):
        def step(i, loop):
            d_state, gradients = loop
            n = grid.steps - 1 - i
            here = step_share(call, group, n)
            tokens, pull = jax.vjp(lambda raw: prepare(problem, raw, here.chunks.valid), here.raw)
            starts = step_starts(call, here, tokens, group, n)
            local, S, v_new = _rebuild(kept, tokens, here, starts, group, n)
            d_o = jnp.where(here.chunks.valid, at_step(d_out, group, n), 0).astype(jnp.float32)
            d_v_new = dot(local.Aqk, d_o, "aa")
            d_S = dot(tokens.q * local.P, d_o, "aa")
            if call.ends is not None and pulled.ends is not None:
                ends = chosen(call.ends, v_new.shape[:2], group, n)
                d_S += spread(ends, pulled.ends.S[group])
                d_v_new += spread(ends, pulled.ends.v_new[group])
            d_state, d_v_new, d_next = back_through_chunks(d_state, tokens, local, d_v_new, d_S)
            d_tokens, d_v, d_rhs = chunk_gradients(
                tokens, here, local, S, v_new, d_o, d_v_new, d_next
            )
            d_starts = Starts(-d_rhs, d_o, d_next)
            gradients, d_tokens = _through_starts(
                call, here, tokens, d_starts, gradients, d_tokens, group, n
            )
            (d_raw,) = pull(d_tokens)
            d_v = jnp.where(here.chunks.valid, d_v, 0)
            return d_state, _put_gradients(gradients, d_raw, d_v, group, n)

        return jax.lax.fori_loop(0, number_of_steps(grid, active), step, (d_state, gradients))

    empty = _empty_gradients(call)
    _, gradients = wavefront(problem.axis_name, visit, pulled.exits, empty, upstream=True)
    return _to_inputs(problem, inputs, call, gradients, pulled)


def _final_state_vjp(problem, inputs: Inputs, segments, grid, call: Call, kept: Kept, d_final):
    exits = no_state(grid, call)  # the last state is linear in them, so any values will do
    initial, start = inputs.initial_state, inputs.default_initial_state
    if problem.final_state is FinalState.LAST:
        run = functools.partial(last_state, problem, segments)
        d_exits, d_initial, d_start = jax.vjp(run, exits, initial, start)[1](d_final)
        return Pulled(d_exits, None, None, d_initial, d_start)
    if call.ends is not None:
        run = functools.partial(all_states, problem, segments, call, call.ends)
        raw = gather_raw(call.ends, call.raw)
        _, pull = jax.vjp(run, raw, kept.ends, initial, start)
        d_raw, d_ends, d_initial, d_start = pull(d_final)
        return Pulled(exits, d_ends, d_raw, d_initial, d_start)
    return Pulled(exits, None, None, None, None)


def _rebuild(kept: Kept, tokens, here: Here, starts, group, n):
    """The step's local quantities, entry states and corrected values: kept, or recomputed."""
    if kept.saved is None:
        local = local_part(tokens, here, starts)
        _, S, v_new = through_chunks(at_step(kept.entry, group, n), tokens, local, starts)
        return local, S, v_new
    S, v_new, A, Aqk = (at_step(x, group, n) for x in kept.saved)
    return local_part(tokens, here, starts, (A, Aqk)), S, v_new


def _through_starts(
    call: Call, here: Here, tokens, d_starts: Starts, gradients: Gradients, d_tokens, group, n
):
    """Adds the gradients through the contributions of given states."""
    if call.slots is not None:
        mine = chosen(call.slots.events, here.v.shape[:2], group, n)
        slots = jax.tree.map(
            lambda total, d: total.at[group].add(pick(mine, d)), gradients.slots, d_starts
        )
        gradients = gradients._replace(slots=slots)
    if call.default_initial_state is not None and gradients.default_initial_state is not None:
        run = functools.partial(shared_start, call, here)
        _, pull = jax.vjp(run, tokens, call.default_initial_state[group])
        more, d_start = pull(d_starts)
        d_tokens = jax.tree.map(jnp.add, d_tokens, more)
        gradients = gradients._replace(
            default_initial_state=gradients.default_initial_state.at[group].add(d_start)
        )
    return gradients, d_tokens


def _empty_gradients(call: Call) -> Gradients:
    def zeros(x):
        return zeros_like_varying(call.v, x.shape, x.dtype)

    slots = None if call.slots is None else call.slots.starts
    return jax.tree.map(zeros, Gradients(call.raw, call.v, call.default_initial_state, slots))


def _put_gradients(gradients: Gradients, d_raw: Raw, d_v, group, n) -> Gradients:
    put = functools.partial(put_step, group=group, step=n)
    tokens = [put(total, d) for total, d in zip(gradients.raw[:4], d_raw[:4])]
    gate = [
        total if total is None else total.at[group].add(d)
        for total, d in zip(gradients.raw[4:], d_raw[4:])
    ]
    return gradients._replace(raw=Raw(*tokens, *gate), v=put(gradients.v, d_v))


def _to_inputs(problem, inputs: Inputs, call: Call, gradients: Gradients, pulled: Pulled) -> Inputs:
    """Gradients of the inputs, from those in the order of the walk and those of events' chunks."""
    raw, d_initial, d_start = gradients.raw, pulled.initial_state, pulled.default_initial_state
    if call.ends is not None and pulled.raw is not None:
        raw = _add_events(call.ends, raw, pulled.raw)
    if call.slots is not None:
        events = call.slots.events
        run = functools.partial(slot_starts, problem, call, events)
        _, pull = jax.vjp(run, gather_raw(events, call.raw), inputs.initial_state)
        d_raw, more = pull(gradients.slots)
        raw = _add_events(events, raw, d_raw)
        d_initial = more if d_initial is None else d_initial + more
    rows = inputs.q.shape[0]

    def by_head(x, like):
        return None if like is None else jnp.sum(x.reshape(rows, *like.shape), 0)

    if call.default_initial_state is not None:
        more = by_head(gradients.default_initial_state, inputs.default_initial_state)
        d_start = more if d_start is None else d_start + more
    return Inputs(
        collect(raw.q, inputs.q),
        collect(raw.k, inputs.k),
        collect(gradients.v, inputs.v),
        collect(raw.x, inputs.decay),
        collect(raw.beta, inputs.beta)[..., 0],
        d_initial,
        d_start,
        by_head(raw.a_log, inputs.a_log),
        by_head(raw.dt_bias, inputs.dt_bias),
    )


def _add_events(events: Events, raw: Raw, d_raw: Raw) -> Raw:
    tokens = (st.scatter_add(events, x, d) for x, d in zip(raw[:4], d_raw[:4]))
    gate = (
        x if x is None or d is None else x + d.reshape(x.shape) for x, d in zip(raw[4:], d_raw[4:])
    )
    return Raw(*tokens, *gate)
