"""Passing the state between context ranks in the jnp form: ranks walk their tiles in turn.

The work that does not depend on the state is done by all ranks at once before. Compared with
exchanging affine summaries of a rank's tiles this does no extra arithmetic and keeps the float32
order of one device, so that any number of ranks gives the same bits; ranks wait for each other
during the walk. See NOTES.md for the measurement.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels.kda.vma import vary


def walk_in_turn(axis_name: str | None, steps: int, body: Callable, carry, *, upstream=False):
    """`fori_loop(0, steps, body, carry)` on every rank, one rank after the other.

    carry[0] is the state: rank 0 starts from the one given and every other rank from the state its
    predecessor ended with (upstream=True: the last rank starts, and states go to predecessors). The
    rest of the carry stays on its rank. Returns the carry after the rank's own walk.
    """
    if axis_name is None:
        return jax.lax.fori_loop(0, steps, body, carry)
    ranks, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    hops = [(r + 1, r) if upstream else (r, r + 1) for r in range(ranks - 1)]
    place = ranks - 1 - rank if upstream else rank
    carry = vary(carry, axis_name)

    def phase(p, carry):
        state, *rest = jax.lax.fori_loop(0, jnp.where(place == p, steps, 0), body, carry)
        arrived = jax.lax.ppermute(state, axis_name, hops)
        # Only the next rank in line takes what arrives: the others keep theirs.
        return (jnp.where(place == p + 1, arrived, state), *rest)

    carry = jax.lax.fori_loop(0, ranks - 1, phase, carry)
    return jax.lax.fori_loop(0, jnp.where(place == ranks - 1, steps, 0), body, carry)
