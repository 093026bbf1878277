"""Where checks run: devices, how programs are compiled for them, run and timed.

Three modes. DEVICE: the TPUs of this machine, full sizes. INTERPRET: simulated CPU devices, small
sizes, Pallas kernels interpreted: unwritten memory is NaN and a race is an error. COMPILE: the full
programs for an absent TPU topology; nothing runs.
"""

import contextlib
import dataclasses
import enum
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.axes import Tree
from training.estimate import bundles, hlo
from training.estimate.topology import Generation


class Mode(enum.StrEnum):
    """See the module docstring."""

    DEVICE = "device"
    INTERPRET = "interpret"
    COMPILE = "compile"


class Layout(enum.StrEnum):
    """How a check's devices are arranged. MINOR, MAJOR: half of them along the context axis, which
    is the mesh's last or first axis: neighbours along it are one or two devices apart."""

    ONE = "one device"
    RANKS = "all devices along context"
    MINOR = "context axis minor"
    MAJOR = "context axis major"


NEEDED = {Layout.ONE: 1, Layout.RANKS: 2, Layout.MINOR: 4, Layout.MAJOR: 4}


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program with the arguments that it is called with.

    schedule: its bundles; empty in INTERPRET.
    """

    compiled: Any
    arguments: tuple[Tree, ...]
    schedule: bundles.Schedule

    @property
    def module(self) -> hlo.Module:
        """Its scheduled HLO."""
        return hlo.parse(self.compiled.as_text())


@dataclasses.dataclass(frozen=True)
class Site:
    """Devices to check. generation: None in INTERPRET. dump: folder to which the compiler writes
    schedules. factors: file of measured speeds, which need not exist."""

    mode: Mode
    devices: tuple[jax.Device, ...]
    generation: Generation | None
    dump: pathlib.Path
    factors: pathlib.Path | None

    @property
    def small(self) -> bool:
        return self.mode is Mode.INTERPRET

    def mesh(self, layout: Layout) -> Mesh:
        """A mesh whose axis "context" splits tokens; the other axis, "data", repeats the work."""
        half = len(self.devices) // 2
        devices = np.array(self.devices, object)
        if layout is Layout.ONE:
            return Mesh(devices[:1], ("context",))
        if layout is Layout.RANKS:
            return Mesh(devices, ("context",))
        if layout is Layout.MINOR:
            return Mesh(devices[: 2 * half].reshape(2, half), ("data", "context"))
        return Mesh(devices[: 2 * half].reshape(half, 2), ("context", "data"))

    def place(self, mesh: Mesh, tree: Tree, spec: PartitionSpec) -> Tree:
        """Host arrays on the mesh, all with the same sharding; in COMPILE their shapes."""
        sharding = NamedSharding(mesh, spec)

        def one(x):
            if self.mode is Mode.COMPILE:
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            return jax.device_put(np.asarray(x), sharding)

        return jax.tree.map(one, tree)

    def normal(self, mesh: Mesh, shape: tuple[int, ...], dtype: str, spec: PartitionSpec) -> Any:
        """Random numbers generated on the mesh; in COMPILE their shape."""
        sharding = NamedSharding(mesh, spec)
        if self.mode is Mode.COMPILE:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        make = jax.jit(
            lambda: jax.random.normal(jax.random.key(0), shape, jnp.dtype(dtype)),
            out_shardings=sharding,
        )
        return make()

    def compile(self, function: Callable, *arguments: Tree) -> Program:
        """Compiles a function, jitted or not, for arguments from `place`."""
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        with self.kernels():
            compiled = jitted.lower(*arguments).compile()
        return Program(compiled, arguments, self._schedule())

    def _schedule(self) -> bundles.Schedule:
        """Bundles of programs compiled since the last call; moves their files to another folder."""
        new = sorted(self.dump.glob("*-final_bundles.txt"))
        folder = self.dump / f"program-{len(list(self.dump.glob('program-*')))}"
        folder.mkdir(parents=True)
        for path in new:
            path.rename(folder / path.name)
        return bundles.read(str(folder))

    def run(self, program: Program) -> Tree:
        """Results of one call, on the devices."""
        with self.kernels():
            return jax.block_until_ready(program.compiled(*program.arguments))

    @contextlib.contextmanager
    def kernels(self) -> Iterator[None]:
        """A context for compilation and calls: in INTERPRET, Pallas kernels are interpreted.

        Raises:
            RuntimeError: the interpreter found a race.
        """
        if self.mode is not Mode.INTERPRET:
            yield
            return
        # Private: there is no public API for the interpreter's record of races.
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call

        params = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
        with pltpu.force_tpu_interpret_mode(params):
            yield
        races = interpret_pallas_call.races
        if races is not None and races.races_found:
            raise RuntimeError("the interpreter found a race between devices")

    def seconds(self, program: Program) -> float:
        """Seconds per call, dispatched without waiting in between: the minimum of five tries."""
        calls = 1 if self.small else 20
        times = []
        for _ in range(2 if self.small else 5):
            with self.kernels():
                start = time.perf_counter()
                for _ in range(calls):
                    result = program.compiled(*program.arguments)
                jax.block_until_ready(result)
            times.append((time.perf_counter() - start) / calls)
        return min(times)

    def latency(self, program: Program) -> float:
        """Median seconds of a call including the wait for its result."""
        times = []
        for _ in range(2 if self.small else 20):
            start = time.perf_counter()
            self.run(program)
            times.append(time.perf_counter() - start)
        return statistics.median(times)
