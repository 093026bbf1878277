"""The arrays of a call of the chunked form, reordered for the walk, and the slice of one step."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda.chunked import states as st
from kernels.kda.chunked.layout import Chunks, Grid, at_step, chunk_segments, deal, plan_grid
from kernels.kda.chunked.states import Events, Starts
from kernels.kda.chunked.steps import Here
from kernels.kda.chunked.tokens import Raw, Tokens
from kernels.kda.problem import FinalState, Inputs, Problem
from kernels.segments import Segments
from kernels.vma import zeros_like_varying


class Call(NamedTuple):
    """A call's arrays in the order of the walk; all are [J, G, ...]."""

    raw: Raw  # [J, G, N, M, C, .]; the gate's parameters are [J, G, 1, 1, .]
    v: jax.Array
    chunks: Chunks
    default_initial_state: jax.Array | None  # [J, G, K, V]
    slots: "SlotEvents | None"
    ends: Events | None  # for FinalState.ALL


class SlotEvents(NamedTuple):
    """Slots of initial_state: where their segments start, and what they contribute there."""

    events: Events
    starts: Starts  # [J, G, n, C, V] and [J, G, n, K, V]


def grid_of(problem: Problem, inputs: Inputs) -> Grid:
    rows, heads, length, _ = inputs.q.shape
    ranks = 1 if problem.axis_name is None else jax.lax.axis_size(problem.axis_name)
    return plan_grid(rows * heads, length, ranks)


def arrange(problem: Problem, grid: Grid, inputs: Inputs, segments: Segments) -> Call:
    """Reorders the inputs, and computes what given states contribute to the chunks they enter."""
    rows, heads = inputs.q.shape[:2]
    q, k, v, x, beta = (deal(grid, t) for t in (*inputs[:4], inputs.beta[..., None]))
    a_log = dt_bias = start = None
    if inputs.a_log is not None and inputs.dt_bias is not None:
        a_log = _by_chain(grid, inputs.a_log, rows)[..., None, None, None]
        dt_bias = _by_chain(grid, inputs.dt_bias, rows)[..., None, None, :]
    if inputs.default_initial_state is not None:
        start = _by_chain(grid, inputs.default_initial_state, rows)
    raw = Raw(q, k, x, beta, a_log, dt_bias)
    call = Call(raw, v, chunk_segments(grid, heads, segments), start, None, None)
    if inputs.initial_state is not None:
        events = st.start_events(segments, heads, inputs.initial_state.shape[1])
        starts = slot_starts(problem, call, events, gather_raw(events, raw), inputs.initial_state)
        call = call._replace(slots=SlotEvents(events, starts))
    if problem.final_state is FinalState.ALL and problem.max_segments is not None:
        call = call._replace(ends=st.end_events(segments, heads, problem.max_segments))
    return call


def _by_chain(grid: Grid, x: jax.Array, rows: int) -> jax.Array:
    """From one entry per head [H, ...] to one per chain [J, G, ...]."""
    return jnp.broadcast_to(x, (rows, *x.shape)).reshape(*grid[:2], *x.shape[1:])


def slot_starts(problem, call: Call, events: Events, raw: Raw, initial_state) -> Starts:
    """What initial_state contributes, by slot; raw: the tokens of the events' chunks."""
    chunks = jax.tree.map(functools.partial(st.gather, events), call.chunks)
    starts = st.slot_starts(problem, raw, chunks, events.here, chain_states(initial_state))
    return jax.tree.map(lambda t: t.reshape(*call.v.shape[:2], *t.shape[1:]), starts)


def chain_states(states: jax.Array) -> jax.Array:
    """[B, n, H, K, V] -> [Q, n, K, V]."""
    return jnp.moveaxis(states, 2, 1).reshape(-1, states.shape[1], *states.shape[3:])


def gather_raw(events: Events, raw: Raw) -> Raw:
    """The raw tokens of the events' chunks [Q, n, C, .]; the gate's parameters [Q, 1, 1, .]."""
    gathered = (st.gather(events, t) for t in raw[:4])
    chains = events.chunk.shape[0]
    gate = (None if t is None else t.reshape(chains, 1, 1, t.shape[-1]) for t in raw[4:])
    return Raw(*gathered, *gate)


def step_share(call: Call, group, n) -> Here:
    take = functools.partial(at_step, group=group, step=n)
    raw = Raw(
        *(take(t) for t in call.raw[:4]), *(t if t is None else t[group] for t in call.raw[4:])
    )
    chunks = jax.tree.map(take, call.chunks)
    return Here(raw, jnp.where(chunks.valid, take(call.v), 0).astype(jnp.float32), chunks)


def step_starts(call: Call, here: Here, tokens: Tokens, group, n) -> Starts | None:
    """What given states contribute to this step's chunks."""
    starts = None
    if call.slots is not None:
        mine = chosen(call.slots.events, here.v.shape[:2], group, n)
        starts = jax.tree.map(lambda t: spread(mine, t[group]), call.slots.starts)
    if call.default_initial_state is not None:
        shared = shared_start(call, here, tokens, call.default_initial_state[group])
        starts = shared if starts is None else jax.tree.map(jnp.add, starts, shared)
    return starts


def shared_start(call: Call, here: Here, tokens: Tokens, state: jax.Array) -> Starts:
    """What default_initial_state [G, K, V] contributes to this step's chunks; skipped if no segment
    starts in them."""
    slots = 0 if call.slots is None else call.slots.events.chunk.shape[1]
    run = functools.partial(st.shared_start, slots=slots)
    args = tokens, here.chunks, state
    empty = jax.tree.map(lambda x: zeros_like_varying(here.v, x.shape), jax.eval_shape(run, *args))
    return jax.lax.cond(jnp.any(here.chunks.first), run, lambda *_: empty, *args)


def chosen(events: Events, chunks: tuple[int, ...], group, n) -> jax.Array:
    """[G, M, n] float32 for a step of chunks = (G, M): 1 if the chunk is that of the event."""
    number = n * chunks[1] + jnp.arange(chunks[1])
    chunk, present = (x.reshape(-1, chunks[0], x.shape[1])[group] for x in events)
    return ((chunk[:, None] == number[:, None]) & present[:, None]).astype(jnp.float32)


def spread(chosen, x):
    """From events [G, n, ...] to the chunks they are in [G, M, ...]."""
    return jnp.einsum("gmn,gnab->gmab", chosen, x, precision="highest")


def pick(chosen, x):
    """From chunks [G, M, ...] to their events [G, n, ...]; 0 for events elsewhere."""
    return jnp.einsum("gmn,gmab->gnab", chosen, x, precision="highest")
