"""Checks kernels, memory and estimates on the TPU of this machine; `make tpu-check`.

    python -m training.tpu_check                      on a TPU of 1 to 8 chips, under ten minutes
    python -m training.tpu_check --interpret          small sizes, interpreted on simulated devices
    python -m training.tpu_check --compile v6e:2x2    compiles all programs for an absent TPU

Prints a Markdown table to paste into an issue; exit code 0 if every check passed, else 1. A run on
a TPU writes the speeds that it measured to a file that `train.py --plan` reads. Ctrl-C
prints the table so far and ends the run.
"""

import argparse
import datetime
import functools
import os
import pathlib
import re
import signal
import sys
import tempfile
import time

from errors import RunError, UserError
from training import devices, entry, process
from training.estimate import factors
from training.estimate.bundles import compiler_environment
from training.estimate.factors import Factors
from training.estimate.topology import Topology
from training.tpu_check.checks import CHECKS, FRESH
from training.tpu_check.driver import Driver, Gone, Limits, Worker, run_all
from training.tpu_check.site import Mode
from training.tpu_check.speed import KERNEL_BUNDLE
from training.tpu_check.table import Row, exit_code, table

ROOT = pathlib.Path(__file__).parents[2]
SIMULATED = 4  # devices of --interpret unless --devices says otherwise
ON_DEVICE = Limits(start=300.0, check=300.0)
ELSEWHERE = Limits(start=300.0, check=3600.0)  # interpreted or compiled on a few cores
HOW = {
    Mode.DEVICE: "full sizes",
    Mode.INTERPRET: "small sizes, interpreted",
    Mode.COMPILE: "full sizes, compiled only",
}
ALWAYS = ("clock", KERNEL_BUNDLE, "hbm_bytes_a_second")  # speeds that every machine measures


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser; the help texts document the flags."""
    parser = entry.parser(__doc__)
    add = parser.add_argument
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--interpret", action="store_true", help="small sizes, without a TPU")
    how.add_argument("--compile", metavar="TOPOLOGY", default="", help="only compile, for it")
    add("--devices", type=int, default=0, help="use the first N devices (default: all)")
    add("--only", default="", help="checks whose name matches this regular expression")
    add("--list", action="store_true", help="print the names of the checks and exit")
    add("--output", default="", help="file that the table is also written to")
    add(
        "--factors",
        default="",
        help="file of measured speeds; none: write none (default: the one that --plan reads, "
        f"{factors.default_path()})",
    )
    return parser


def main(flags: argparse.Namespace) -> None:
    """Runs the checks; ends the process with code 1 if one did not pass."""
    names = names_of(flags.only)
    if flags.list:
        print("\n".join(names))
        return
    mode = mode_of(flags)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the worker ends as well
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tpu_check_") as folder:
        start = functools.partial(start_worker, flags, mode, pathlib.Path(folder))
        driver = Driver(start, ON_DEVICE if mode is Mode.DEVICE else ELSEWHERE, to_stderr)
        speeds = Speeds(flags.factors, driver)

        def report(row: Row) -> None:
            done = names.index(row.name) + 1
            since = time.monotonic() - began
            outcome = row.outcome
            print(
                f"[{done:2d}/{len(names)}] {since:5.0f} s  {row.name}: {outcome.status}, "
                f"{outcome.detail}",
                flush=True,
            )
            if mode is Mode.DEVICE:
                speeds.add(outcome.speeds)

        try:
            driver.open()
        except Gone as gone:
            raise RunError(f"tpu-check: the checks did not start ({gone})") from None
        rows, stopped = run_all(driver, names, FRESH, report)
    text = table(driver.machine, rows, HOW[mode], today(), speeds.text)
    print(f"\n{text}", flush=True)
    if flags.output:
        pathlib.Path(flags.output).write_text(text + "\n")
    process.leave(1 if stopped else exit_code(rows))


def names_of(pattern: str) -> list[str]:
    """Names of the checks to run.

    Raises:
        UserError: the pattern matches none.
    """
    try:
        names = [check.name for check in CHECKS if re.search(pattern, check.name, re.IGNORECASE)]
    except re.error as error:
        raise UserError(f"--only={pattern}: not a regular expression ({error})") from None
    if not names:
        raise UserError(f"--only={pattern}: matches no check; try --list")
    return names


def mode_of(flags: argparse.Namespace) -> Mode:
    """The mode that the flags request.

    Raises:
        UserError: an unknown topology, no devices, or no TPU here.
    """
    if flags.devices < 0:
        raise UserError(f"--devices={flags.devices}: needs a number >= 1; try --devices=1")
    if flags.compile:
        Topology.parse(flags.compile, "--compile")
        return Mode.COMPILE
    if flags.interpret:
        return Mode.INTERPRET
    if "JAX_PLATFORMS" not in os.environ and not devices.accelerator():
        raise UserError("tpu-check: there is no TPU on this machine; try --interpret")
    return Mode.DEVICE


def start_worker(flags: argparse.Namespace, mode: Mode, folder: pathlib.Path) -> Worker:
    """A worker with an empty folder for schedules."""
    dump = pathlib.Path(tempfile.mkdtemp(prefix="worker_", dir=folder))
    count = flags.devices or (SIMULATED if mode is Mode.INTERPRET else 0)
    path = factors.chosen_for_writing(flags.factors)
    command = [sys.executable, "-m", "training.tpu_check.worker", mode.value, flags.compile]
    command += [str(count), str(dump), str(path or "")]
    return Worker(command, environment_of(mode, str(dump)), folder / "worker.log", ROOT)


def environment_of(mode: Mode, dump: str) -> dict[str, str]:
    """The worker's environment: platforms, and where the compiler writes schedules."""
    given, compiler = dict(os.environ), compiler_environment(dump)
    if mode is Mode.COMPILE:
        return given | compiler
    if mode is Mode.INTERPRET:
        flags = f"{devices.PATIENCE} {given.get('XLA_FLAGS', '')}"
        return given | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    platforms = given.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        given["JAX_PLATFORMS"] = f"{platforms},cpu"  # references are computed on the host
    wanted = compiler["LIBTPU_INIT_ARGS"]
    return given | {"LIBTPU_INIT_ARGS": f"{given.get('LIBTPU_INIT_ARGS', '')} {wanted}".strip()}


class Speeds:
    """Collects measured speeds and writes the file of factors as soon as all are measured."""

    def __init__(self, option: str, driver: Driver):
        self._path = factors.chosen_for_writing(option)
        self._driver = driver
        self._found: dict[str, float] = {}
        self.text = ""

    def add(self, found: dict[str, float]) -> None:
        """Adds speeds; once the file can be written, it is rewritten with each addition."""
        self._found |= found
        if not found or self._path is None:
            return
        if missing := [name for name in ALWAYS if name not in self._found]:
            self.text = f"No speeds are saved: {', '.join(missing)} not measured."
            return
        machine = self._driver.machine
        generation = factors.generation_of(machine.device_kind)
        assert generation is not None
        speeds = {name: x for name, x in self._found.items() if name != KERNEL_BUNDLE}
        speeds["kernel_stalls"] = self._found[KERNEL_BUNDLE] * self._found["clock"]
        record = Factors(machine.device_kind, machine.devices, today(), machine.libtpu, **speeds)
        try:
            factors.write(self._path, generation.name, record)
            self.text = f"Measured speeds are in {self._path}; `--plan` uses them."
        except (OSError, UserError) as error:
            self.text = f"Measured speeds could not be saved ({error})."


def today() -> str:
    return datetime.date.today().isoformat()


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    entry.run(main, make_parser())
