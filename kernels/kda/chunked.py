"""Backend "chunked": the chunked form in plain jnp, for CPU, GPU, and to bisect with.

One step of the walk takes a few tiles of a few chains (`layout`), does what needs no state for all
of them at once as batched matrix products, passes the state from tile to tile, and finishes; so the
memory beside inputs and outputs is one state a step and chain. The backward is the same walk
reversed. Letters are those of `chunk_math`, and with S a tile's entry state, P and F the decay
products from its start and to its end, and G their product over the whole tile:

    p = beta k P       w = A p     u = A (beta v - X)     vn = u - w S      kg = k F
    o = (q P) S + Aqk vn + O       S' = G S + kg^T vn + Z

X, O, Z is what given start states add (`states`). float32 inputs run in float32 throughout; with
bfloat16 inputs the operands of the matrix products are rounded to bfloat16, except for the inverse
A; accumulation, gates, decay products and states are float32.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda import chunk_math as cm
from kernels.kda import states as st
from kernels.kda.chunk_math import CHUNK, dot
from kernels.kda.exchange_jnp import wavefront
from kernels.kda.gate import Raw, Tokens, prepare
from kernels.kda.layout import (
    Grid,
    Tiles,
    at_step,
    collect,
    deal,
    plan_grid,
    put_step,
    tile_segments,
)
from kernels.kda.problem import FinalState, Inputs, Problem, StatePolicy
from kernels.kda.states import Events, Starts
from kernels.kda.vma import vary
from kernels.segments import Segments


class Call(NamedTuple):
    """A call's arrays in the order of the walk; [J, G, ...] throughout."""

    raw: Raw  # [J, G, N, M, C, .], the gate's parameters [J, G, 1, 1, .]
    v: jax.Array
    tiles: Tiles
    start_state: jax.Array | None  # [J, G, K, V]
    slots: "SlotEvents | None"
    ends: Events | None  # for FinalState.ALL


class SlotEvents(NamedTuple):
    events: Events
    starts: Starts  # [J, G, n, C, V] and [J, G, n, K, V]


class Local(NamedTuple):
    """What a step's tiles [G, M, ...] are before any state enters."""

    levels: list[cm.Level]
    P: jax.Array  # [G, M, C, K]
    F: jax.Array  # [G, M, C, K]
    A: jax.Array  # [G, M, C, C]
    Aqk: jax.Array  # [G, M, C, C]
    w: jax.Array  # [G, M, C, K]
    u: jax.Array  # [G, M, C, V]


class Kept(NamedTuple):
    """What the forward leaves for the backward, by step. The last four for StatePolicy.SAVE only."""

    entry: jax.Array  # [J, G, N, K, V] state before each step
    end_states: jax.Array | None  # [J, G, n, K, V] entry states of the tiles segments end in
    end_deltas: jax.Array | None  # [J, G, n, C, V]
    S: jax.Array | None  # [J, G, N, M, K, V]
    vn: jax.Array | None  # [J, G, N, M, C, V]
    A: jax.Array | None  # [J, G, N, M, C, C]
    Aqk: jax.Array | None  # [J, G, N, M, C, C]


# --- forward --------------------------------------------------------------------------------------


def forward(problem: Problem, inputs: Inputs, segments: Segments):
    """See `problem.py`. Residuals: `Kept`."""
    grid = _grid(problem, inputs)
    call = _arrange(problem, grid, inputs, segments)
    dtype = _dot_dtype(inputs)

    def visit(group, active, state, carry):
        def step(n, loop):
            state, (out, kept) = loop
            here = _at(call, group, n)
            tokens = prepare(problem, here.raw, here.tiles.valid)
            starts = _step_starts(call, here, tokens, group, n)
            local = _local(tokens, here, starts, dtype)
            kept = kept._replace(entry=put_step(kept.entry, state, group, n))
            state, S, vn = _through_tiles(state, tokens, local, starts, dtype)
            o = dot(tokens.q * local.P, S, "ab", dtype) + dot(local.Aqk, vn, "ab", dtype)
            o = o if starts is None else o + starts.out
            out = put_step(out, jnp.where(here.tiles.valid, o, 0), group, n)
            return state, (out, _keep(call, kept, local, S, vn, group, n))

        return jax.lax.fori_loop(0, _steps(grid, active), step, (state, carry))

    carry = _zeros(call.v, call.v.shape, call.v.dtype), _empty_kept(problem, grid, call)
    entry = _zeros(call.v, (*grid[:2], *_state_shape(inputs)), jnp.float32)
    exits, (out, kept) = wavefront(problem.axis_name, visit, entry, carry)
    final = _final_state(problem, inputs, segments, call, exits, kept)
    return collect(out, inputs.v), final, kept


def _grid(problem: Problem, inputs: Inputs) -> Grid:
    rows, heads, length, _ = inputs.q.shape
    ranks = 1 if problem.axis_name is None else jax.lax.axis_size(problem.axis_name)
    return plan_grid(rows * heads, length, ranks)


def _state_shape(inputs: Inputs) -> tuple[int, int]:
    return inputs.q.shape[-1], inputs.v.shape[-1]


def _dot_dtype(inputs: Inputs):
    return jnp.bfloat16 if inputs.v.dtype == jnp.bfloat16 else None


def _steps(grid: Grid, active):
    return grid.steps if active is True else jnp.where(active, grid.steps, 0)


def _zeros(like: jax.Array, shape, dtype=jnp.float32) -> jax.Array:
    return vary(jnp.zeros(shape, dtype), jax.typeof(like).mat.varying)


def _by_chain(grid: Grid, x: jax.Array, rows: int) -> jax.Array:
    """Of one entry a head [H, ...], one a chain [J, G, ...]."""
    return jnp.broadcast_to(x, (rows, *x.shape)).reshape(*grid[:2], *x.shape[1:])


def _arrange(problem: Problem, grid: Grid, inputs: Inputs, segments: Segments) -> Call:
    rows, heads = inputs.q.shape[:2]
    q, k, v, x, beta = (deal(grid, t) for t in (*inputs[:4], inputs.beta[..., None]))
    a_log = dt_bias = start = None
    if inputs.a_log is not None:
        a_log = _by_chain(grid, inputs.a_log, rows)[..., None, None, None]
        dt_bias = _by_chain(grid, inputs.dt_bias, rows)[..., None, None, :]
    if inputs.start_state is not None:
        start = _by_chain(grid, inputs.start_state, rows)
    raw = Raw(q, k, x, beta, a_log, dt_bias)
    call = Call(raw, v, tile_segments(grid, heads, segments), start, None, None)
    if inputs.initial_state is not None:
        events = st.start_events(segments, heads, inputs.initial_state.shape[1])
        starts = _slot_starts(problem, call, events, _gather_raw(events, raw), inputs.initial_state)
        call = call._replace(slots=SlotEvents(events, starts))
    if problem.final_state is FinalState.ALL:
        call = call._replace(ends=st.end_events(segments, heads, problem.max_segments))
    return call


def _slot_starts(problem, call: Call, events: Events, raw: Raw, initial_state) -> Starts:
    tiles = jax.tree.map(functools.partial(st.gather, events), call.tiles)
    starts = st.slot_starts(problem, raw, tiles, events.here, _chain_states(initial_state))
    return jax.tree.map(lambda t: t.reshape(*call.v.shape[:2], *t.shape[1:]), starts)


def _chain_states(states: jax.Array) -> jax.Array:
    """[B, n, H, K, V] -> [Q, n, K, V]."""
    return jnp.moveaxis(states, 2, 1).reshape(-1, states.shape[1], *states.shape[3:])


def _gather_raw(events: Events, raw: Raw) -> Raw:
    """The raw tokens of events' tiles [Q, n, C, .], the gate's parameters [Q, 1, 1, .]."""
    gathered = (st.gather(events, t) for t in raw[:4])
    chains = events.tile.shape[0]
    gate = (None if t is None else t.reshape(chains, 1, 1, t.shape[-1]) for t in raw[4:])
    return Raw(*gathered, *gate)


class Here(NamedTuple):
    """One step's share of a call: [G, M, C, .], the gate's parameters [G, 1, 1, .]."""

    raw: Raw
    v: jax.Array
    tiles: Tiles


def _at(call: Call, group, n) -> Here:
    take = functools.partial(at_step, group=group, step=n)
    raw = Raw(
        *(take(t) for t in call.raw[:4]), *(t if t is None else t[group] for t in call.raw[4:])
    )
    tiles = jax.tree.map(take, call.tiles)
    return Here(raw, jnp.where(tiles.valid, take(call.v), 0).astype(jnp.float32), tiles)


def _step_starts(call: Call, here: Here, tokens: Tokens, group, n) -> Starts | None:
    """What given states add to this step's tiles."""
    starts = None
    if call.slots is not None:
        chosen = _chosen(call.slots.events, here, group, n)
        starts = jax.tree.map(lambda t: _spread(chosen, t[group]), call.slots.starts)
    if call.start_state is not None:
        shared = _shared_start(call, here, tokens, group)
        starts = shared if starts is None else jax.tree.map(jnp.add, starts, shared)
    return starts


def _shared_start(call: Call, here: Here, tokens: Tokens, group) -> Starts:
    slots = 0 if call.slots is None else call.slots.events.tile.shape[1]
    run = functools.partial(st.shared_start, slots=slots)
    args = tokens, here.tiles, call.start_state[group]
    empty = jax.tree.map(lambda t: _zeros(here.v, t.shape), jax.eval_shape(run, *args))
    return jax.lax.cond(jnp.any(here.tiles.first), run, lambda *_: empty, *args)


def _chosen(events: Events, here: Here, group, n) -> jax.Array:
    """[G, M, n] float32: 1 where a tile of this step is an event's."""
    chains, tiles = here.v.shape[:2]
    number = n * tiles + jnp.arange(tiles)
    tile, present = (t.reshape(-1, chains, t.shape[1])[group] for t in events)
    return ((tile[:, None] == number[:, None]) & present[:, None]).astype(jnp.float32)


def _spread(chosen, x):
    """Events [G, n, ...] to the tiles they are in [G, M, ...]."""
    return jnp.einsum("gmn,gnab->gmab", chosen, x, precision="highest")


def _pick(chosen, x):
    """Tiles [G, M, ...] to their events [G, n, ...], 0 for events elsewhere."""
    return jnp.einsum("gmn,gmab->gnab", chosen, x, precision="highest")


def _local(tokens: Tokens, here: Here, starts: Starts | None, dtype, matrices=None) -> Local:
    # A segment's first token forgets exactly what came before it.
    levels, P, F = cm.halves(jnp.where(here.tiles.first, 0, jnp.exp(tokens.a)))
    if matrices is None:
        below, Aqk = cm.intra(levels, tokens.q, tokens.k, tokens.beta, dtype)
        A = cm.solve(below)
    else:
        A, Aqk = matrices
    rhs = tokens.beta * here.v
    if starts is not None:
        rhs = rhs - starts.subtracted
    w = dot(A, tokens.beta * tokens.k * P, "ab", dtype)
    return Local(levels, P, F, A, Aqk, w, dot(A, rhs, "ab", dtype))


def _through_tiles(state, tokens: Tokens, local: Local, starts: Starts | None, dtype):
    """The state through a step's tiles: (exit state [G, K, V], entry states [G, M, K, V], vn)."""
    kg, G = tokens.k * local.F, local.P[..., -1, :, None]
    S = _zeros(kg, (*kg.shape[:2], *state.shape[1:]))

    def tile(m, loop):
        state, S, vn = loop
        new = local.u[:, m] - dot(local.w[:, m], state, "ab", dtype)
        S = jax.lax.dynamic_update_index_in_dim(S, state, m, 1)
        vn = jax.lax.dynamic_update_index_in_dim(vn, new, m, 1)
        state = G[:, m] * state + dot(kg[:, m], new, "aa", dtype)
        return state if starts is None else state + starts.exit[:, m], S, vn

    return jax.lax.fori_loop(0, kg.shape[1], tile, (state, S, jnp.zeros_like(local.u)))


def _empty_kept(problem: Problem, grid: Grid, call: Call) -> Kept:
    keys, values = call.raw.k.shape[-1], call.v.shape[-1]
    zeros = functools.partial(_zeros, call.v)
    entry = zeros((*grid[:3], keys, values))
    ends, saved = (None, None), (None,) * 4
    if call.ends is not None:
        number = call.ends.tile.shape[1]
        ends = zeros((*grid[:2], number, keys, values)), zeros((*grid[:2], number, CHUNK, values))
    if problem.state_policy is StatePolicy.SAVE:
        matrix = (*grid, CHUNK, CHUNK)
        saved = (
            zeros((*grid, keys, values)),
            zeros((*grid, CHUNK, values)),
            zeros(matrix),
            zeros(matrix),
        )
    return Kept(entry, *ends, *saved)


def _keep(call: Call, kept: Kept, local: Local, S, vn, group, n) -> Kept:
    if call.ends is not None:
        chosen = _chosen(call.ends, Here(None, vn, None), group, n)
        kept = kept._replace(
            end_states=kept.end_states.at[group].add(_pick(chosen, S)),
            end_deltas=kept.end_deltas.at[group].add(_pick(chosen, vn)),
        )
    if kept.S is not None:
        kept = kept._replace(
            S=put_step(kept.S, S, group, n),
            vn=put_step(kept.vn, vn, group, n),
            A=put_step(kept.A, local.A, group, n),
            Aqk=put_step(kept.Aqk, local.Aqk, group, n),
        )
    return kept


def _final_state(problem: Problem, inputs: Inputs, segments, call: Call, exits, kept: Kept):
    """The rank's share of the returned state; differentiated in `_final_state_vjp`."""
    if problem.final_state is FinalState.NONE:
        return None
    ends = None if call.ends is None else _gather_raw(call.ends, call.raw)
    return _final_from(
        problem, segments, call, ends, exits, kept.end_states, kept.end_deltas,
        inputs.initial_state, inputs.start_state,
    )  # fmt: skip


def _final_from(
    problem, segments, call: Call, ends: Raw | None, exits, end_states, end_deltas, initial, start
):
    last_rank = True
    if problem.axis_name is not None:
        ranks = jax.lax.axis_size(problem.axis_name)
        last_rank = jax.lax.axis_index(problem.axis_name) == ranks - 1
    rows = segments.index.shape[0]
    exits = exits.reshape(rows, -1, *exits.shape[2:])  # [B, H, K, V]
    if problem.final_state is FinalState.LAST:
        # Padding passes the state on: the last rank's exit state is that of the row's last segment.
        starts = st.start_states(initial, start, 1, exits)[:, 0]
        empty = (segments.count == 0)[..., None, None]
        return jnp.where(last_rank, jnp.where(empty, starts, exits), 0)
    number = problem.max_segments
    starts = st.start_states(initial, start, number, exits)
    tiles = jax.tree.map(functools.partial(st.gather, call.ends), call.tiles)

    def flat(x):
        return x.reshape(-1, *x.shape[2:])

    ended = st.segment_ends(
        problem, ends, tiles, call.ends.here, flat(end_states), flat(end_deltas),
        _chain_states(starts),
    )  # fmt: skip
    ended = jnp.moveaxis(ended.reshape(rows, -1, *ended.shape[1:]), 1, 2)
    empty = (jnp.arange(number) >= segments.count)[..., None, None, None]
    return jnp.where(empty, jnp.where(last_rank, starts, 0), ended)


# --- backward -------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    """Accumulated by the backward's walk."""

    raw: Raw  # [J, G, N, M, C, .] in the inputs' dtypes, the gate's parameters [J, G, 1, 1, .]
    v: jax.Array
    start_state: jax.Array | None  # [J, G, K, V]
    slots: Starts | None  # [J, G, n, ...]


def backward(problem: Problem, inputs: Inputs, segments: Segments, residuals: Kept, d_out, d_final):
    """See `problem.py`."""
    grid, kept, dtype = _grid(problem, inputs), residuals, _dot_dtype(inputs)
    call = _arrange(problem, grid, inputs, segments)
    d_out = deal(grid, d_out)
    pulled = _final_state_vjp(problem, inputs, segments, call, kept, d_final)

    def visit(group, active, d_state, gradients):
        def step(i, loop):
            d_state, gradients = loop
            n = grid.steps - 1 - i
            here = _at(call, group, n)
            tokens, pull = jax.vjp(lambda raw: prepare(problem, raw, here.tiles.valid), here.raw)
            starts = _step_starts(call, here, tokens, group, n)
            local, S, vn = _rebuild(kept, tokens, here, starts, dtype, group, n)
            d_o = jnp.where(here.tiles.valid, at_step(d_out, group, n), 0).astype(jnp.float32)
            d_vn = dot(local.Aqk, d_o, "aa", dtype)
            d_S = dot(tokens.q * local.P, d_o, "aa", dtype)
            if call.ends is not None:
                chosen = _chosen(call.ends, here, group, n)
                d_S += _spread(chosen, pulled.end_states[group])
                d_vn += _spread(chosen, pulled.end_deltas[group])
            d_state, d_vn, d_next = _back_through_tiles(d_state, tokens, local, d_vn, d_S, dtype)
            d_tokens, d_v, d_rhs = _chunk_gradients(
                tokens, here, local, S, vn, d_o, d_vn, d_next, dtype
            )
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


class Pulled(NamedTuple):
    """Gradients that come through the returned state."""

    exits: jax.Array  # [J, G, K, V]
    end_states: jax.Array | None
    end_deltas: jax.Array | None
    raw: Raw | None  # of the tiles segments end in
    initial_state: jax.Array | None
    start_state: jax.Array | None


def _final_state_vjp(problem, inputs: Inputs, segments, call: Call, kept: Kept, d_final) -> Pulled:
    exits = _zeros(call.v, (*call.v.shape[:2], *_state_shape(inputs)))  # any: it is linear in them
    if d_final is None:
        return Pulled(exits, None, None, None, None, None)
    ends = None if call.ends is None else _gather_raw(call.ends, call.raw)
    run = functools.partial(_final_from, problem, segments, call)
    args = ends, exits, kept.end_states, kept.end_deltas, inputs.initial_state, inputs.start_state
    _, pull = jax.vjp(run, *args)
    d_raw, d_exits, d_states, d_deltas, d_initial, d_start = pull(d_final)
    return Pulled(d_exits, d_states, d_deltas, d_raw, d_initial, d_start)


def _rebuild(kept: Kept, tokens, here: Here, starts, dtype, group, n):
    """The step's local quantities, entry states and corrected values: kept, or computed again."""
    if kept.S is None:
        local = _local(tokens, here, starts, dtype)
        _, S, vn = _through_tiles(at_step(kept.entry, group, n), tokens, local, starts, dtype)
        return local, S, vn
    A, Aqk, S, vn = (at_step(t, group, n) for t in (kept.A, kept.Aqk, kept.S, kept.vn))
    return _local(tokens, here, starts, dtype, (A, Aqk)), S, vn


def _back_through_tiles(d_state, tokens: Tokens, local: Local, d_vn, d_S, dtype):
    """Through a step's tiles in reverse, from the parts of d_vn and d_S that need no state.

    Returns (gradient of the entry state [G, K, V], d_vn, gradients of the exit states [G, M, K,
    V]).
    """
    kg, G = tokens.k * local.F, local.P[..., -1, :, None]
    tiles = kg.shape[1]

    def tile(i, loop):
        d_state, d_vn, d_next = loop
        m = tiles - 1 - i
        d_next = jax.lax.dynamic_update_index_in_dim(d_next, d_state, m, 1)
        new = d_vn[:, m] + dot(kg[:, m], d_state, "ab", dtype)
        d_vn = jax.lax.dynamic_update_index_in_dim(d_vn, new, m, 1)
        d_state = G[:, m] * d_state + d_S[:, m] - dot(local.w[:, m], new, "aa", dtype)
        return d_state, d_vn, d_next

    return jax.lax.fori_loop(0, tiles, tile, (d_state, d_vn, jnp.zeros_like(d_S)))


def _chunk_gradients(tokens: Tokens, here: Here, local: Local, S, vn, d_o, d_vn, d_next, dtype):
    """Gradients of tokens, of v and of the solve's right side, all inside chunks."""
    (q, k, beta, _), P, F = tokens, local.P, local.F
    d_rhs = dot(local.A, d_vn, "aa", dtype)
    both = jnp.concatenate([d_o, d_rhs], -2)
    d_state_rows, d_scores = dot(both, S, "bb", dtype), dot(both, vn, "bb", dtype)
    d_q, d_rows, d_columns, d_a = cm.intra_backward(
        local.levels, q, k, beta, -d_scores[..., CHUNK:, :], d_scores[..., :CHUNK, :], dtype
    )
    d_q_state = d_state_rows[..., :CHUNK, :] * P
    d_rows_state = -d_state_rows[..., CHUNK:, :] * P
    d_stored = dot(vn, d_next, "bb", dtype) * F
    d_q += d_q_state
    d_rows += d_rows_state
    d_columns += d_stored
    d_beta = jnp.sum(d_rhs * here.v, -1, keepdims=True) + jnp.sum(d_rows * k, -1, keepdims=True)
    # A token's decay acts on what the entry state gives to it and later tokens, on what earlier
    # tokens give to the exit state, and on what the entry state gives to the exit state.
    d_a += cm.later(q * d_q_state + beta * k * d_rows_state) + cm.earlier(k * d_stored)
    d_a += (P[..., -1, :] * jnp.sum(S * d_next, -1))[..., None, :]
    return Tokens(d_q, beta * d_rows + d_columns, d_beta, d_a), beta * d_rhs, d_rhs


def _through_starts(
    call: Call, here: Here, tokens, d_starts: Starts, gradients: Gradients, d_tokens, group, n
):
    """What given states' contributions add to the gradients."""
    if call.slots is not None:
        chosen = _chosen(call.slots.events, here, group, n)
        slots = jax.tree.map(
            lambda total, d: total.at[group].add(_pick(chosen, d)), gradients.slots, d_starts
        )
        gradients = gradients._replace(slots=slots)
    if call.start_state is not None:

        def run(tokens, state):
            return _shared_start(call._replace(start_state=state[None]), here, tokens, 0)

        _, pull = jax.vjp(run, tokens, call.start_state[group])
        more, d_start = pull(d_starts)
        d_tokens = jax.tree.map(jnp.add, d_tokens, more)
        gradients = gradients._replace(start_state=gradients.start_state.at[group].add(d_start))
    return gradients, d_tokens


def _empty_gradients(call: Call) -> Gradients:
    def zeros(t):
        return _zeros(call.v, t.shape, t.dtype)

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
    if pulled.raw is not None:
        raw = _add_events(call.ends, raw, pulled.raw)
    if call.slots is not None:
        events = call.slots.events
        run = functools.partial(_slot_starts, problem, call, events)
        _, pull = jax.vjp(run, _gather_raw(events, call.raw), inputs.initial_state)
        d_raw, more = pull(gradients.slots)
        raw = _add_events(events, raw, d_raw)
        d_initial = more if d_initial is None else d_initial + more
    rows = inputs.q.shape[0]

    def by_head(x, like):
        return None if x is None else jnp.sum(x.reshape(rows, *like.shape), 0)

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
    gate = (x if x is None else x + d.reshape(x.shape) for x, d in zip(raw[4:], d_raw[4:]))
    return Raw(*tokens, *gate)
