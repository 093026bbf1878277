"""Speeds measured on a TPU, which replace a plan's built-in ones: a file that --plan reads.

`make tpu-check` measures them and writes the file: JSON, one record per TPU generation. It is
~/.config/kda-trainer/tpu_factors.json (below $XDG_CONFIG_HOME if that is set), unless
--plan_factors, or --factors of the check, names another.
"""

import dataclasses
import json
import math
import os
import pathlib

from errors import UserError
from training.estimate.topology import GENERATIONS, Generation, Topology

BUILT_IN = "none"  # --plan_factors: no file


@dataclasses.dataclass(frozen=True)
class Factors:
    """Measured speeds of one generation, as the fields of `Generation` of the same names.

    device_kind, devices: of the machine, as reported by JAX. date: of the measurement. libtpu:
    version of the compiler whose bundles were counted. None: not measured, such as links between
    devices on a machine with one device.
    """

    device_kind: str
    devices: int
    date: str
    libtpu: str
    clock: float
    kernel_stalls: float
    hbm_bytes_a_second: float
    link_bytes_a_second: float | None = None
    hop_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.speeds().items():
            if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name} must be a number above 0, got {value!r}")

    def speeds(self) -> dict[str, float]:
        """The measured speeds, by name."""
        values = {name: getattr(self, name) for name in SPEEDS}
        return {name: value for name, value in values.items() if value is not None}

    def describe(self) -> str:
        """Where and when, in words."""
        return f"measured {self.date} on {self.devices} x {self.device_kind}, libtpu {self.libtpu}"


SPEEDS = ("clock", "kernel_stalls", "hbm_bytes_a_second", "link_bytes_a_second", "hop_seconds")


def default_path() -> pathlib.Path:
    """The default location of the file."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join("~", ".config")
    return pathlib.Path(base).expanduser() / "kda-trainer" / "tpu_factors.json"


def chosen(option: str) -> pathlib.Path | None:
    """The file that an option names; None for the built-in speeds.

    Args:
        option: a path; "" for the default place, if there is a file; "none".
    """
    path = chosen_for_writing(option)
    return path if option or (path and path.exists()) else None


def chosen_for_writing(option: str) -> pathlib.Path | None:
    """The file that an option names; the default place for "", None for "none"."""
    if option:
        return None if option == BUILT_IN else pathlib.Path(option).expanduser()
    return default_path()


def read(path: pathlib.Path) -> dict[str, Factors]:
    """Factors by the generation's name.

    Raises:
        UserError: there is no such file, or it is not a file of factors.
    """
    try:
        found = json.loads(path.read_text())
        return {name: Factors(**record) for name, record in found.items()}
    except OSError as error:
        reason = error.strerror or "cannot be read"
    except (ValueError, TypeError, AttributeError) as error:
        reason = f"not a file of measured speeds ({' '.join(str(error).split())[:120]})"
    raise UserError(
        f"{path}: {reason}; needs what `make tpu-check` writes; try --plan_factors={BUILT_IN}"
    )


def write(path: pathlib.Path, generation: str, factors: Factors) -> None:
    """Adds or replaces a generation's factors and keeps those of others.

    Raises:
        UserError: the existing file is not a file of factors.
        OSError: it cannot be written.
    """
    known = read(path) if path.exists() else {}
    records = {
        name: dataclasses.asdict(each) for name, each in (known | {generation: factors}).items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(records, indent=2) + "\n")
    new.replace(path)


def calibrated(topology: Topology, path: pathlib.Path | None) -> Topology:
    """The topology with a file's speeds, if the file has any for this generation.

    Raises:
        UserError: as `read`.
    """
    factors = None if path is None else read(path).get(topology.generation.name)
    if path is None or factors is None:
        return topology
    generation = with_factors(topology.generation, factors, f"{factors.describe()} ({path})")
    return dataclasses.replace(topology, generation=generation)


def with_factors(generation: Generation, factors: Factors, measured: str) -> Generation:
    """The generation with the measured speeds."""
    return dataclasses.replace(generation, **factors.speeds(), measured=measured)  # type: ignore[arg-type]


def generation_of(device_kind: str) -> Generation | None:
    """The generation of a JAX device by its `device_kind`, None for other devices."""
    names = {
        "TPU v5 lite": "v5e",
        "TPU v5e": "v5e",
        "TPU v5": "v5p",
        "TPU v5p": "v5p",
        "TPU v6 lite": "v6e",
        "TPU v6e": "v6e",
        "TPU7x": "tpu7x",
    }
    return GENERATIONS.get(names.get(device_kind, ""))
