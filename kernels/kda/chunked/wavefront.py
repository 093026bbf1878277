"""Passing the state between context ranks in the jnp form: a wavefront over chain groups.

Rank r works on chain group j while rank r - 1 works on group j + 1, and between phases each rank
hands the finished group's state [G, K, V] to its successor. Compared with exchanging affine
summaries of the ranks' tokens this does no extra arithmetic and keeps the float32 order of one
device, so any number of ranks gives the same bits; the price is that ranks - 1 phases run with idle
ranks. Measured in NOTES.md.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def wavefront(axis_name: str | None, visit: Callable, states, carry, *, upstream: bool = False):
    """Visit every chain group on every rank, in the order of the ranks.

    visit(group, active, state, carry) -> (state, carry) walks the group's tokens of this rank; with
    active False it must return state and carry unchanged and do no work. states [J, G, K, V] are
    what the first rank's visits start from; every other rank starts from what its predecessor ended
    with. upstream=True: the last rank is first, states travel to lower ranks.

    Returns (the states that this rank's visits ended with [J, G, K, V], carry).
    """
    groups = states.shape[0]
    if axis_name is None:

        def alone(group, loop):
            states, carry = loop
            state, carry = visit(group, True, states[group], carry)
            return jax.lax.dynamic_update_index_in_dim(states, state, group, 0), carry

        return jax.lax.fori_loop(0, groups, alone, (states, carry))

    ranks, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    place = ranks - 1 - rank if upstream else rank
    hops = [(r + 1, r) if upstream else (r, r + 1) for r in range(ranks - 1)]

    def phase(p, loop):
        arrived, ends, carry = loop
        active = (p >= place) & (p < place + groups)
        group = jnp.clip(p - place, 0, groups - 1)
        state = jnp.where(place == 0, states[group], arrived)
        state, carry = visit(group, active, state, carry)
        end = jnp.where(active, state, ends[group])
        ends = jax.lax.dynamic_update_index_in_dim(ends, end, group, 0)
        return jax.lax.ppermute(state, axis_name, hops), ends, carry

    loop = (states[0], jnp.zeros_like(states), carry)
    _, ends, carry = jax.lax.fori_loop(0, ranks + groups - 1, phase, loop)
    return ends, carry
