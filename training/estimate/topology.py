"""TPU generations: their names, sizes and speeds, as assumed by the estimates.

HBM sizes and bandwidths are those of `jax._src.tpu_info` (JAX 0.12), FLOP/s the published peaks.
`clock` is the bundle rate at which the compiler's own program for a product of two bfloat16
matrices of 8192 x 8192 reaches the published peak. A bundle of a Pallas kernel takes
`kernel_stalls` times as long, a factor calibrated on tpu7x (docs/measurements.md). Link bandwidths
are published totals divided by the number of links, in one direction. `make tpu-check` measures
these speeds (factors.py).
"""

import math
import re
from dataclasses import dataclass

from errors import UserError


class TopologyError(UserError):
    """A topology name cannot be used; one line."""


@dataclass(frozen=True)
class Generation:
    """One TPU generation. All figures are per JAX device.

    name: as in --plan. compiler_name: libtpu's. dimensions: of the torus of chips. devices_a_chip:
    two if each core is a device. cores: TensorCores of a device. hbm_bytes: capacity.
    kernel_stalls: see above. hop_seconds: a message's latency from a device to its neighbour.
    measured: where and when the speeds were measured; "" for the built-in ones.
    """

    name: str
    compiler_name: str
    dimensions: int
    devices_a_chip: int
    cores: int
    hbm_bytes: float
    hbm_bytes_a_second: float
    flops_a_second: float
    clock: float
    link_bytes_a_second: float
    kernel_stalls: float = 1.85
    hop_seconds: float = 1e-6
    measured: str = ""


GENERATIONS = {
    "v5e": Generation("v5e", "v5e", 2, 1, 1, 17.2e9, 8.2e11, 197e12, 1.256e9, 4.5e10),
    "v5p": Generation("v5p", "v5p", 3, 1, 2, 103e9, 2.46e12, 459e12, 1.704e9, 9e10),
    "v6e": Generation("v6e", "v6e", 2, 1, 1, 34.4e9, 1.64e12, 918e12, 2.216e9, 9e10),
    "tpu7x": Generation("tpu7x", "tpu7x", 3, 2, 1, 103e9, 3.7e12, 1153.5e12, 2.271e9, 9e10),
}
_ALIASES = {"v5litepod": "v5e", "v7x": "tpu7x", "7x": "tpu7x", "ironwood": "tpu7x"}


@dataclass(frozen=True)
class Topology:
    """A slice: its generation and the chips along each axis."""

    generation: Generation
    chips: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name that libtpu's compiler takes."""
        return f"{self.generation.compiler_name}:{'x'.join(map(str, self.chips))}"

    @property
    def devices(self) -> int:
        return math.prod(self.chips) * self.generation.devices_a_chip

    @classmethod
    def parse(cls, text: str, flag: str = "--plan") -> "Topology":
        """From "v6e:4x4", "tpu7x:4x4x4" or "v7x-4x4x4"; flag: for the error.

        Raises:
            TopologyError: an unknown generation, or sizes that its slices cannot have.
        """
        found = re.fullmatch(r"(?:tpu-?)?(\w+?)[:\-](\d+(?:x\d+)*)", text.lower())
        name = found.group(1) if found else ""
        generation = GENERATIONS.get({"7x": "tpu7x"}.get(name, _ALIASES.get(name, name)))
        if found is None or generation is None:
            raise TopologyError(
                f"{flag}={text}: needs generation:chips with one of {', '.join(GENERATIONS)}; "
                "try v6e:2x2 or tpu7x:2x2x1"
            )
        chips = tuple(map(int, found.group(2).split("x")))
        if len(chips) != generation.dimensions or min(chips) < 1:
            near = "2x2" if generation.dimensions == 2 else "2x2x1"
            raise TopologyError(
                f"{flag}={text}: {generation.name} needs {generation.dimensions} sizes; "
                f"try {generation.name}:{near}"
            )
        return cls(generation, chips)
