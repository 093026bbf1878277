"""Backend "chunked": the chunked form in plain jnp, for CPU, GPU, and to bisect with.

One step of the walk takes a few tiles of a few chains (`layout`), does what needs no state for all
of them at once as batched matrix products, passes the state from tile to tile, and finishes; so the
memory beside inputs and outputs is one state a step and chain. The backward is the same walk
reversed. Letters are those of `chunk_math`, and with S a tile's entry state, P and F the decay
products from its start and to its end, and G their product over the whole tile:

    p = beta k P       w = A p     u = A (beta v - X)     vn = u - w S      kg = k F
    o = (q P) S + Aqk vn + O       S' = G S + kg^T vn + Z

X, O, Z is what given start states add (`states`). Everything runs in float32, whatever the inputs'
dtype; results are rounded to it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda import states as st
from kernels.kda.call import (
    Call,
    arrange,
    chain_states,
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
from kernels.kda.chunk_math import CHUNK, dot
from kernels.kda.exchange_jnp import wavefront
from kernels.kda.gate import Raw, prepare
from kernels.kda.layout import Grid, at_step, collect, deal, put_step
from kernels.kda.problem import Entry, FinalState, Inputs, Problem, StatePolicy
from kernels.kda.states import Events, Starts
from kernels.kda.steps import (
    Here,
    Local,
    back_through_tiles,
    chunk_gradients,
    local_part,
    through_tiles,
)
from kernels.kda.vma import zeros_like_varying
from kernels.segments import Segments


class EndTiles(NamedTuple):
    """Of the tiles that segments 0 .. n - 1 end in."""

    S: jax.Array  # [J, G, n, K, V] entry states
    vn: jax.Array  # [J, G, n, C, V]


class Saved(NamedTuple):
    """What StatePolicy.SAVE keeps by step [J, G, N, M, ...]."""

    S: jax.Array  # [..., K, V]
    vn: jax.Array  # [..., C, V]
    A: jax.Array  # [..., C, C]
    Aqk: jax.Array  # [..., C, C]


class Kept(NamedTuple):
    """What the forward leaves for the backward."""

    entry: jax.Array  # [J, G, N, K, V] state before each step
    ends: EndTiles | None  # for FinalState.ALL
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
            tokens = prepare(problem, here.raw, here.tiles.valid)
            starts = step_starts(call, here, tokens, group, n)
            local = local_part(tokens, here, starts)
            kept = kept._replace(entry=put_step(kept.entry, state, group, n))
            state, S, vn = through_tiles(state, tokens, local, starts)
            o = dot(tokens.q * local.P, S, "ab") + dot(local.Aqk, vn, "ab")
            o = o if starts is None else o + starts.out
            out = put_step(out, jnp.where(here.tiles.valid, o, 0), group, n)
            return state, (out, _keep(call, kept, local, S, vn, group, n))

        return jax.lax.fori_loop(0, _steps(grid, active), step, (state, carry))

    out = zeros_like_varying(call.v, call.v.shape, call.v.dtype)
    carry = out, _empty_kept(problem, grid, call)
    given = problem.entry is Entry.GIVEN
    states = _no_state(grid, call) if entry is None else entry.reshape(*grid[:2], *entry.shape[2:])
    exits, (out, kept) = wavefront(None if given else problem.axis_name, visit, states, carry)
    final = _final_state(problem, inputs, segments, call, exits, kept)
    if problem.entry is Entry.KEPT:
        first = kept.entry[:, :, 0]
        entry = first.reshape(*inputs.q.shape[:2], *first.shape[2:])
    return collect(out, inputs.v), final, entry, kept


def _steps(grid: Grid, active):
    return grid.steps if active is True else jnp.where(active, grid.steps, 0)


def _no_state(grid: Grid, call: Call) -> jax.Array:
    shape = (*grid[:2], call.raw.k.shape[-1], call.v.shape[-1])
    return zeros_like_varying(call.v, shape)


def _empty_kept(problem: Problem, grid: Grid, call: Call) -> Kept:
    keys, values = call.raw.k.shape[-1], call.v.shape[-1]
    zeros = functools.partial(zeros_like_varying, call.v)
    ends = saved = None
    if call.ends is not None:
        shape = (*grid[:2], call.ends.tile.shape[1])
        ends = EndTiles(zeros((*shape, keys, values)), zeros((*shape, CHUNK, values)))
    if problem.state_policy is StatePolicy.SAVE:
        matrix = zeros((*grid, CHUNK, CHUNK))
        saved = Saved(zeros((*grid, keys, values)), zeros((*grid, CHUNK, values)), matrix, matrix)
    return Kept(zeros((*grid[:3], keys, values)), ends, saved)


def _keep(call: Call, kept: Kept, local: Local, S, vn, group, n) -> Kept:
    ends, saved = kept.ends, kept.saved
    if call.ends is not None and ends is not None:
        here = chosen(call.ends, vn.shape[:2], group, n)
        ends = jax.tree.map(
            lambda total, x: total.at[group].add(pick(here, x)), ends, EndTiles(S, vn)
        )
    if saved is not None:
        put = functools.partial(put_step, group=group, step=n)
        saved = jax.tree.map(put, saved, Saved(S, vn, local.A, local.Aqk))
    return kept._replace(ends=ends, saved=saved)


def _final_state(problem: Problem, inputs: Inputs, segments: Segments, call: Call, exits, kept):
    """The rank's share of the returned state; differentiated in `_final_state_vjp`."""
    initial, start = inputs.initial_state, inputs.start_state
    if problem.final_state is FinalState.LAST:
        return _last_state(problem, segments, exits, initial, start)
    if call.ends is not None:
        raw = gather_raw(call.ends, call.raw)
        return _all_states(problem, segments, call, call.ends, raw, kept.ends, initial, start)
    return None


def _is_last_rank(problem: Problem):
    if problem.axis_name is None:
        return True
    return jax.lax.axis_index(problem.axis_name) == jax.lax.axis_size(problem.axis_name) - 1


def _last_state(problem: Problem, segments: Segments, exits, initial, start):
    """Padding passes the state on: the last rank's exit state is that of the row's last segment."""
    exits = exits.reshape(segments.index.shape[0], -1, *exits.shape[2:])  # [B, H, K, V]
    starts = st.start_states(initial, start, 1, exits)[:, 0]
    last = jnp.where((segments.count == 0)[..., None, None], starts, exits)
    return jnp.where(_is_last_rank(problem), last, 0)


def _all_states(
    problem: Problem, segments: Segments, call: Call, events: Events, raw: Raw, ends: EndTiles,
    initial, start,
):  # fmt: skip
    rows, (chains, number) = segments.index.shape[0], events.tile.shape
    like = zeros_like_varying(ends.S, (rows, chains // rows, *ends.S.shape[3:]))
    starts = st.start_states(initial, start, number, like)
    tiles = jax.tree.map(functools.partial(st.gather, events), call.tiles)
    S, vn = (x.reshape(chains, *x.shape[2:]) for x in ends)
    ended = st.segment_ends(problem, raw, tiles, events.here, S, vn, chain_states(starts))
    ended = jnp.moveaxis(ended.reshape(rows, -1, *ended.shape[1:]), 1, 2)
    empty = (jnp.arange(number) >= segments.count)[..., None, None, None]
    return jnp.where(empty, jnp.where(_is_last_rank(problem), starts, 0), ended)


# --- backward -------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    """Accumulated by the backward's walk."""

    raw: Raw  # [J, G, N, M, C, .] in the inputs' dtypes, the gate's parameters [J, G, 1, 1, .]
    v: jax.Array
    start_state: jax.Array | None  # [J, G, K, V]
    slots: Starts | None  # [J, G, n, ...]


class Pulled(NamedTuple):
    """Gradients that come through the returned state."""

    exits: jax.Array  # [J, G, K, V]
    ends: EndTiles | None
    raw: Raw | None  # of the tiles segments end in
    initial_state: jax.Array | None
    start_state: jax.Array | None


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
            tokens, pull = jax.vjp(lambda raw: prepare(problem, raw, here.tiles.valid), here.raw)
            starts = step_starts(call, here, tokens, group, n)
            local, S, vn = _rebuild(kept, tokens, here, starts, group, n)
            d_o = jnp.where(here.tiles.valid, at_step(d_out, group, n), 0).astype(jnp.float32)
            d_vn = dot(local.Aqk, d_o, "aa")
            d_S = dot(tokens.q * local.P, d_o, "aa")
            if call.ends is not None and pulled.ends is not None:
                ends = chosen(call.ends, vn.shape[:2], group, n)
                d_S += spread(ends, pulled.ends.S[group])
                d_vn += spread(ends, pulled.ends.vn[group])
            d_state, d_vn, d_next = back_through_tiles(d_state, tokens, local, d_vn, d_S)
            d_tokens, d_v, d_rhs = chunk_gradients(tokens, here, local, S, vn, d_o, d_vn, d_next)
            d_starts = Starts(-d_rhs, d_o, d_next)
            gradients, d_tokens = _through_starts(
                call, here, tokens, d_starts, gradients, d_tokens, group, n
            )
            (d_raw,) = pull(d_tokens)
            d_v = jnp.where(here.tiles.valid, d_v, 0)
            return d_state, _put_gradients(gradients, d_raw, d_v, group, n)

        return jax.lax.fori_loop(0, _steps(grid, active), step, (d_state, gradients))

    empty = _empty_gradients(call)
    _, gradients = wavefront(problem.axis_name, visit, pulled.exits, empty, upstream=True)
    return _to_inputs(problem, inputs, call, gradients, pulled)


def _final_state_vjp(problem, inputs: Inputs, segments, grid, call: Call, kept: Kept, d_final):
    exits = _no_state(grid, call)  # the last state is linear in them: any will do
    initial, start = inputs.initial_state, inputs.start_state
    if problem.final_state is FinalState.LAST:
        run = functools.partial(_last_state, problem, segments)
        d_exits, d_initial, d_start = jax.vjp(run, exits, initial, start)[1](d_final)
        return Pulled(d_exits, None, None, d_initial, d_start)
    if call.ends is not None:
        run = functools.partial(_all_states, problem, segments, call, call.ends)
        raw = gather_raw(call.ends, call.raw)
        _, pull = jax.vjp(run, raw, kept.ends, initial, start)
        d_raw, d_ends, d_initial, d_start = pull(d_final)
        return Pulled(exits, d_ends, d_raw, d_initial, d_start)
    return Pulled(exits, None, None, None, None)


def _rebuild(kept: Kept, tokens, here: Here, starts, group, n):
    """The step's local quantities, entry states and corrected values: kept, or computed again."""
    if kept.saved is None:
        local = local_part(tokens, here, starts)
        _, S, vn = through_tiles(at_step(kept.entry, group, n), tokens, local, starts)
        return local, S, vn
    S, vn, A, Aqk = (at_step(x, group, n) for x in kept.saved)
    return local_part(tokens, here, starts, (A, Aqk)), S, vn


def _through_starts(
    call: Call, here: Here, tokens, d_starts: Starts, gradients: Gradients, d_tokens, group, n
):
    """What given states' contributions add to the gradients."""
    if call.slots is not None:
        mine = chosen(call.slots.events, here.v.shape[:2], group, n)
        slots = jax.tree.map(
            lambda total, d: total.at[group].add(pick(mine, d)), gradients.slots, d_starts
        )
        gradients = gradients._replace(slots=slots)
    if call.start_state is not None and gradients.start_state is not None:
        run = functools.partial(shared_start, call, here)
        _, pull = jax.vjp(run, tokens, call.start_state[group])
        more, d_start = pull(d_starts)
        d_tokens = jax.tree.map(jnp.add, d_tokens, more)
        gradients = gradients._replace(start_state=gradients.start_state.at[group].add(d_start))
    return gradients, d_tokens


def _empty_gradients(call: Call) -> Gradients:
    def zeros(x):
        return zeros_like_varying(call.v, x.shape, x.dtype)

    slots = None if call.slots is None else call.slots.starts
    return jax.tree.map(zeros, Gradients(call.raw, call.v, call.start_state, slots))


def _put_gradients(gradients: Gradients, d_raw: Raw, d_v, group, n) -> Gradients:
    put = functools.partial(put_step, group=group, step=n)
    tokens = [put(total, d) for total, d in zip(gradients.raw[:4], d_raw[:4])]
    gate = [
        total if total is None else total.at[group].add(d)
        for total, d in zip(gradients.raw[4:], d_raw[4:])
    ]
    return gradients._replace(raw=Raw(*tokens, *gate), v=put(gradients.v, d_v))


def _to_inputs(problem, inputs: Inputs, call: Call, gradients: Gradients, pulled: Pulled) -> Inputs:
    """From gradients in the order of the walk, and of events' tiles, to those of the inputs."""
    raw, d_initial, d_start = gradients.raw, pulled.initial_state, pulled.start_state
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

    if call.start_state is not None:
        more = by_head(gradients.start_state, inputs.start_state)
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
