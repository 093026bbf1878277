"""Passes recurrent state from rank to rank by remote DMA inside a kernel.

The ranks of the context axis form a line. A `Relay` moves one message per round along it, forward
(step 1: the state, in the forward kernel) or backward (step -1: its cotangent). In round j a rank
receives message j from one neighbour, works, and sends its own message j to the other. With step 1,
rank r thus works on round j while rank r - 1 works on round j + 1.

Protocol, for each pair of neighbours (sender s, receiver t). Each wait has exactly one matching
signal:
    t signals s once, via the barrier semaphore, that it is in the kernel: its memory is live;
    s waits for this signal before its first copy, not before its local work
    round j: for j >= 2, s waits until t has read message j - 2 from the slot; s copies; t waits
A rank cannot be one kernel call ahead of a neighbour: the message it waits for is sent only after
the neighbour has received its barrier signal, so signals of two calls never mix.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.kda.tpu.streams import divided

SLOTS = 2
FIRST_COLLECTIVE_ID = 11  # the ids of all relays start here, two per mesh axis


@dataclass(frozen=True)
class RankLine:
    """The line of ranks, statically: all mesh axes, which one is the context axis, its size."""

    axes: tuple[str, ...]
    axis: int
    size: int

    def collective_id(self, step: int) -> int:
        """The collective id of a kernel with a relay in this direction. Kernels along another axis,
        or in the other direction, get other ids and so other barrier semaphores."""
        return FIRST_COLLECTIVE_ID + 2 * self.axis + (step < 0)


def rank_line(axis_name: str) -> RankLine:
    """The line of `axis_name` in the mesh of the enclosing shard_map."""
    axes = tuple(jax.sharding.get_abstract_mesh().axis_names)
    if axis_name not in axes:
        raise ValueError(f"axis {axis_name!r} is not an axis of the mesh, which has {axes}")
    return RankLine(axes, axes.index(axis_name), jax.lax.axis_size(axis_name))


def coordinates(line: RankLine) -> jax.Array:
    """This device's position along every mesh axis, int32 [axes]: an operand of the kernel.

    A kernel must not query its own rank: if shard_map checks varying types, lowering would insert a
    cast between them that Mosaic does not support.
    """
    return jnp.stack([jax.lax.axis_index(name) for name in line.axes]).astype(jnp.int32)


def relay_scratch(message: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """Scratch of a relay with messages of this shape; pass the references to `Relay`."""
    shape = (SLOTS, *message.shape)
    return {
        "inbox": pltpu.VMEM(shape, message.dtype),
        "outbox": pltpu.VMEM(shape, message.dtype),
        "arrived": pltpu.SemaphoreType.DMA((SLOTS,)),
        "departed": pltpu.SemaphoreType.DMA((SLOTS,)),
        "taken": pltpu.SemaphoreType.REGULAR,
    }


class Relay:
    """One kernel's messages along the line; `scratch` holds references from `relay_scratch`.

    Call `open` first, then for every round j = 0 .. rounds - 1: `receive(j)`, read
    `message(j)`, `release(j)`; `reserve(j)`, write `reply(j)`, `send(j)`; at the end `close`.
    The first rank of the line receives nothing and the last one sends nothing.
    """

    def __init__(
        self, line: RankLine, coords: Any, step: int, rounds: int, scratch: dict[str, Any]
    ):
        rank = coords[line.axis]
        self._rounds = rounds
        self._s = scratch
        self._barrier = pltpu.get_barrier_semaphore()
        self.has_source = rank > 0 if step > 0 else rank < line.size - 1
        self.has_target = rank < line.size - 1 if step > 0 else rank > 0
        self._source = self._peer(line, coords, -step)
        self._target = self._peer(line, coords, step)

    @staticmethod
    def _peer(line: RankLine, coords: Any, step: int) -> tuple:
        """Mesh coordinates of a neighbour; clamped at the line's ends, where they are not used."""
        where = [coords[i] for i in range(len(line.axes))]
        where[line.axis] = jnp.clip(where[line.axis] + step, 0, line.size - 1)
        return tuple(where)

    def _copy(self, j):
        s, slot = self._s, divided(j, SLOTS)[1]
        return pltpu.make_async_remote_copy(
            s["outbox"].at[slot],
            s["inbox"].at[slot],
            s["departed"].at[slot],
            s["arrived"].at[slot],
            device_id=self._target,
        )

    def open(self) -> None:
        """Signals the source that this device is in the kernel and can receive."""

        @pl.when(self.has_source)
        def _say_ready():
            pl.semaphore_signal(self._barrier, 1, device_id=self._source)

    def message(self, j):
        return self._s["inbox"].at[divided(j, SLOTS)[1]]

    def reply(self, j):
        return self._s["outbox"].at[divided(j, SLOTS)[1]]

    def receive(self, j) -> None:
        @pl.when(self.has_source)
        def _wait_message():
            self._copy(j).wait_recv()

    def release(self, j) -> None:
        """Signals that the message was read, so that its slot may be reused (if needed)."""

        @pl.when(self.has_source & (j + SLOTS < self._rounds))
        def _say_taken():
            pl.semaphore_signal(self._s["taken"], 1, device_id=self._source)

    def reserve(self, j) -> None:
        """Waits until the previous message has left the reply's slot."""

        @pl.when(self.has_target & (j >= SLOTS))
        def _wait_departed():
            self._copy(j - SLOTS).wait_send()

    def send(self, j) -> None:
        @pl.when(self.has_target & (j == 0))
        def _wait_ready():
            pl.semaphore_wait(self._barrier, 1)

        @pl.when(self.has_target & (j >= SLOTS))
        def _wait_taken():
            pl.semaphore_wait(self._s["taken"], 1)

        @pl.when(self.has_target)
        def _start():
            self._copy(j).start()

    def close(self) -> None:
        for j in range(max(self._rounds - SLOTS, 0), self._rounds):

            @pl.when(self.has_target)
            def _wait_departed(j=j):
                self._copy(j).wait_send()


def take_or(relay: Relay | None, j, state: Any, start: Callable[[], None]) -> None:
    """Fills `state` with round j's message, or with `start` if no rank sends one."""
    if relay is None:
        start()
        return
    pl.when(~relay.has_source)(start)

    @pl.when(relay.has_source)
    def _take():
        relay.receive(j)
        state[...] = relay.message(j)[...]
        relay.release(j)


def hand_on(relay: Relay | None, j, state: Any) -> None:
    """Sends `state` as round j's message, if there is a rank to receive it."""
    if relay is None:
        return
    relay.reserve(j)
    relay.reply(j)[...] = state[...]
    relay.send(j)
