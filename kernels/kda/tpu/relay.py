"""Passing recurrent state from rank to rank by remote DMA inside a kernel.

The ranks of the context axis form a line; a `Relay` moves one message a round along it, forward
(step 1: state of the forward kernel) or back (step -1: its cotangent). In round j a rank takes
message j from the neighbour behind it, works, and sends its own message j to the neighbour ahead,
so rank r works on round j while rank r - 1 works on round j + 1.

Protocol, per neighbouring pair (sender s, receiver t). Each wait has exactly one matching signal:
    t tells s once, through the barrier semaphore, that it is in the kernel: its memory is live;
    s waits for that before its first copy, not before its local work
    round j: s waits, for j >= 2, until t has taken message j - 2 out of the slot; copies; t waits
A rank cannot run one kernel call ahead of a neighbour: the message it waits for is sent only after
the neighbour has taken its barrier signal, so signals of two calls never mix.
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
FIRST_COLLECTIVE_ID = 11  # the ids of all relays follow it, two a mesh axis


@dataclass(frozen=True)
class RankLine:
    """Where the ranks are, statically: all mesh axes, which one is the context axis, its size."""

    axes: tuple[str, ...]
    axis: int
    size: int

    def collective_id(self, step: int) -> int:
        """Of a kernel with a relay in this direction: the barrier semaphores of kernels along
        another axis, or in the other direction, are others."""
        return FIRST_COLLECTIVE_ID + 2 * self.axis + (step < 0)


def rank_line(axis_name: str) -> RankLine:
    """The line of `axis_name` in the mesh of the enclosing shard_map."""
    axes = tuple(jax.sharding.get_abstract_mesh().axis_names)
    if axis_name not in axes:
        raise ValueError(f"axis {axis_name!r} is not an axis of the mesh, which has {axes}")
    return RankLine(axes, axes.index(axis_name), jax.lax.axis_size(axis_name))


def coordinates(line: RankLine) -> jax.Array:
    """This device's position along every mesh axis, int32 [axes]: an operand of the kernel.

    A kernel must not ask for its own rank: lowering would insert a cast between varying types that
    Mosaic does not know when shard_map checks them.
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
    `message(j)`, `release(j)`; `reserve(j)`, write `reply(j)`, `send(j)`; last `close`.
    The rank at the line's beginning receives nothing and the one at its end sends nothing.
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
        """Mesh coordinates of a neighbour; clamped at the line's ends, where none is used."""
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
        """Tell the source that this device is in the kernel and can receive."""

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
        """The message is read: its slot may be written again (if a round still needs it)."""

        @pl.when(self.has_source & (j + SLOTS < self._rounds))
        def _say_taken():
            pl.semaphore_signal(self._s["taken"], 1, device_id=self._source)

    def reserve(self, j) -> None:
        """Wait until the reply's own slot has left this device."""

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
    """Fill `state` with round j's message, or by `start` where no rank sends one."""
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
    """Send `state` on as round j's message, where there is a rank to take it."""
    if relay is None:
        return
    relay.reserve(j)
    relay.reply(j)[...] = state[...]
    relay.send(j)
