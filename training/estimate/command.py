"""The command `python train.py --config C --plan TOPOLOGY`."""

import pathlib
import sys

from ml_collections import ConfigDict

from training.estimate import factors, report, suggest
from training.estimate.topology import Topology
from training.progress import elapsed


def run(config: ConfigDict, topology: str, json_path: str, factors_path: str) -> int:
    """Prints the plan, and writes it as JSON if a path is given; returns the exit code.

    Args:
        factors_path: --plan_factors, see `factors.chosen`.

    Raises:
        UserError: unknown topology, a file of factors that cannot be read, or a mesh or memory that
            does not fit (with settings that would); one line.
    """
    chosen = factors.calibrated(Topology.parse(topology), factors.chosen(factors_path))
    suggest.check_devices(config, chosen)
    with elapsed(f"compiling for {chosen.name}", _to_stderr):
        plan, changes = suggest.plan_or_nearest(config, chosen)
    if changes:
        print(f"the config does not fit {chosen.name}; it does with {' '.join(changes)}:")
    print(report.as_text(plan), flush=True)
    if json_path:
        pathlib.Path(json_path).write_text(report.as_json(plan) + "\n")
    return 0


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
