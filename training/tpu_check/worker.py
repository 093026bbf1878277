"""The process that runs checks: names of checks on stdin, a line of JSON for each on stdout.

    python -m training.tpu_check.worker MODE TOPOLOGY DEVICES DUMP FACTORS

Started by driver.py, which ends it if a check crashes or hangs.
"""

import importlib.metadata
import os
import pathlib
import sys
import traceback
from typing import Any

from training.tpu_check.outcome import Machine, Outcome, Status, first_line

MARK = "tpu-check:"  # prefix of our lines: libraries write to stdout as well


def main(mode: str, topology: str, devices: str, dump: str, factors: str) -> None:
    """Reports its machine, then runs the requested checks."""
    try:
        site, machine = open_site(mode, topology, int(devices), pathlib.Path(dump), factors)
    except Exception as error:  # the driver reports it
        reply(Machine(error=first_line(error)).as_json())
        return
    reply(machine.as_json())
    for line in sys.stdin:
        reply(run(line.strip(), site).as_json())


def reply(text: str) -> None:
    print(MARK + text, flush=True)


def run(name: str, site) -> Outcome:
    """Runs one check; an exception is its outcome."""
    from training.tpu_check.checks import BY_NAME
    from training.tpu_check.site import Mode

    check = BY_NAME[name]
    if len(site.devices) < check.devices:
        return Outcome(
            Status.SKIPPED, f"needs {check.devices} devices, there are {len(site.devices)}"
        )
    try:
        programs = check.programs(site)
        if site.mode is Mode.COMPILE:
            return compiled(programs)
        return check.judge(site, programs)
    except Exception as error:
        traceback.print_exception(error)  # to the driver's log
        return Outcome(Status.ERROR, first_line(error))


def compiled(programs) -> Outcome:
    """The compiler's figures for a check's programs."""
    peak = max(p.compiled.memory_analysis().peak_memory_in_bytes for p in programs)
    bundles = sum(program.schedule.total for program in programs)
    return Outcome.of(bundles > 0, f"compiles: peak {peak / 1e6:,.1f} MB, {bundles:,} bundles")


def open_site(mode: str, topology: str, count: int, dump: pathlib.Path, factors: str):
    """The devices of a mode, the first `count` of them (0: all), and their description.

    Raises:
        RuntimeError, UserError: there are no such devices.
    """
    import jax

    from training.estimate.factors import generation_of
    from training.estimate.topology import Topology
    from training.tpu_check.site import Mode, Site

    jax.config.update("jax_enable_compilation_cache", False)  # a cached program has no schedule
    kind = Mode(mode)
    if kind is Mode.INTERPRET:
        jax.config.update("jax_num_cpu_devices", count)
    generation = None
    if kind is Mode.COMPILE:
        from jax.experimental import topologies

        chosen = Topology.parse(topology)
        generation = chosen.generation
        found: list[Any] = topologies.get_topology_desc(
            platform="tpu", topology_name=chosen.name
        ).devices
    else:
        found = jax.devices()
    if kind is Mode.DEVICE:
        generation = generation_of(found[0].device_kind)
        if generation is None:
            raise RuntimeError(f"no TPU of a known generation: found {found[0].device_kind}")
    devices: tuple[Any, ...] = tuple(found[: count or None])
    site = Site(kind, devices, generation, dump, pathlib.Path(factors) if factors else None)
    kinds = (devices[0].device_kind, len(devices), jax.__version__)
    return site, Machine(*kinds, importlib.metadata.version("libtpu"))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
