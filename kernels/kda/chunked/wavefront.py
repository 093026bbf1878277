"""Passes the state between context ranks in the jax.numpy form: a wavefront over chain groups.

Rank r works on chain group j while rank r - 1 works on group j + 1; between phases each rank sends
the finished group's state [G, K, V] to its successor. Compared with exchanging affine summaries of
the ranks' tokens, this needs no extra arithmetic and keeps the order of float32 operations of one
device. The price is that some ranks are idle in ranks - 1 phases. NOTES.md has measurements, and
why results may still differ in the last bit.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def wavefront(axis_name: str | None, visit: Callable, states, carry, *, upstream: bool = False):
    """Visits every chain group on every rank, in the order of the ranks.

    visit(group, active, state, carry) -> (state, carry) processes the group's tokens of this rank;
    with active False it must return state and carry unchanged and do no work. states [J, G, K, V]
    are the start states of the first rank's visits; every other rank starts from its predecessor's
    final states. upstream=True reverses the order: the last rank is first, and states are sent to
    lower ranks.

    Returns (the final states of this rank's visits [J, G, K, V], carry).
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
