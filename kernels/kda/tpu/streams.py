"""Double-buffered copies between HBM and VMEM for kernels with their own loops.

A kernel with a grid runs its body two extra times, to fill and drain the pipeline. A kernel without
a grid avoids this but has to copy its tiles itself. A stream is a group of tiles that arrive (or
leave) together at each step; slot `step % 2` of every buffer belongs to the step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Ref = Any  # a Pallas reference; they have no public type
Step = int | jax.Array
View = Callable[[Step], Ref]  # step -> the HBM slice of that step


def divided(step: Step, by: int) -> tuple[Step, Step]:
    """(step // by, step % by) for step >= 0. Avoids `//`: to lower its rounding, JAX would have to
    know the chip."""
    if isinstance(step, int):
        return divmod(step, by)
    return jax.lax.div(step, by), jax.lax.rem(step, by)


class Loads:
    """Tiles copied from HBM. `tiles` pairs a view with its buffer [2, ...]; sems is DMA[2]."""

    def __init__(self, tiles: Sequence[tuple[View, Ref]], sems: Ref):
        self._tiles = tiles
        self._sems = sems

    def _copies(self, step: Step) -> list:
        slot = divided(step, 2)[1]
        return [
            pltpu.make_async_copy(view(step), buffer.at[slot], self._sems.at[slot])
            for view, buffer in self._tiles
        ]

    def start(self, step: Step) -> None:
        for copy in self._copies(step):
            copy.start()

    def arrive(self, step: Step, steps: int) -> None:
        """Starts the next step's tiles, if there is a next step, and waits for this step's."""

        @pl.when(step + 1 < steps)
        def _start_next():
            self.start(step + 1)

        for copy in self._copies(step):
            copy.wait()


class Stores:
    """Tiles copied to HBM."""

    def __init__(self, tiles: Sequence[tuple[View, Ref]], sems: Ref):
        self._tiles = tiles
        self._sems = sems

    def _copies(self, step: Step) -> list:
        slot = divided(step, 2)[1]
        return [
            pltpu.make_async_copy(buffer.at[slot], view(step), self._sems.at[slot])
            for view, buffer in self._tiles
        ]

    def make_room(self, step: Step) -> None:
        """Waits until the tiles of two steps ago have left this step's slot."""

        @pl.when(step >= 2)
        def _wait():
            for copy in self._copies(step - 2):
                copy.wait()

    def start(self, step: Step) -> None:
        for copy in self._copies(step):
            copy.start()

    def drain(self, steps: int) -> None:
        """Waits for the last tiles, after `steps` steps (a static number)."""
        for step in range(max(steps - 2, 0), steps):
            for copy in self._copies(step):
                copy.wait()


def walk(
    groups: int,
    steps: int,
    loads: Loads,
    stores: Stores,
    step: Callable[[jax.Array, jax.Array, Step], None],
    enter: Callable[[jax.Array], None] | None = None,
    leave: Callable[[jax.Array], None] | None = None,
) -> None:
    """Runs step(g, j, slot) for all `steps` of all `groups`, and copies tiles around it; runs
    `enter` and `leave` before and after a group's steps."""
    total = groups * steps
    loads.start(0)

    def group(g, _):
        if enter is not None:
            enter(g)

        def one(j, _):
            at = g * steps + j
            loads.arrive(at, total)
            stores.make_room(at)
            step(g, j, divided(at, 2)[1])
            stores.start(at)
            return 0

        jax.lax.fori_loop(0, steps, one, 0)
        if leave is not None:
            leave(g)
        return 0

    jax.lax.fori_loop(0, groups, group, 0)
    stores.drain(total)
