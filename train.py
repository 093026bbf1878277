"""Trains a model: python train.py --config configs/kda_cp4.py [--config.train.steps=20 ...]

Repeating the command resumes from the last checkpoint. A mistake in options or data ends with one
line on stderr and exit code 2; a failure of the run ends with one line and exit code 1.
"""

import math
import os
import sys
import traceback

from absl import flags as absl_flags
from ml_collections import ConfigDict

from configs import check
from configs import flags as command_line
from training import agree, devices, failures, peers, process
from training.estimate import command
from training.signals import Signals


def main(argv: list[str]) -> int:
    """Trains to the last step, or until a signal; returns the exit code."""
    process.open_streams()
    process.quiet_libraries()
    signals = Signals()  # installed first so that startup can be interrupted
    try:
        config, flags = command_line.parse(argv)
        check.check(config)
        if flags.plan:
            return command.run(config, flags.plan, flags.plan_json, flags.plan_factors)
        start_jax(config, flags)
        train(config, flags, signals)
    except Exception as error:
        return fail(error)
    return 0


def start_jax(config: ConfigDict, flags: absl_flags.FlagValues) -> None:
    """Chooses devices, before JAX is imported; see training/devices.py."""
    processes = devices.Processes(
        flags.coordinator, flags.processes, flags.process_id, flags.start_timeout
    )
    values = agree.values_of(config, flags.init_from)
    needed, cache = math.prod(config.mesh.values()), config.train.compilation_cache
    devices.start_jax(needed, cache, processes, values)


def train(config: ConfigDict, flags: absl_flags.FlagValues, signals: Signals) -> None:
    """Runs the training in its folder."""
    from training import run  # imports JAX, whose devices are chosen now

    name = command_line.config_name(command_line.config_file(flags))
    workdir = flags.workdir or os.path.join("runs", name)
    if flags.eval_only:
        run.evaluate(config, workdir, flags.init_from, flags.eval_json)
    else:
        run.run(config, workdir, flags.init_from, signals)


def fail(error: Exception) -> int:
    """Prints one line if the cause is known, else the traceback; returns the exit code."""
    known = failures.explain(error)
    process.claim_last_line()
    if known is None:
        traceback.print_exception(error)
    else:
        print("error: " + " ".join(str(known).split()), file=sys.stderr, flush=True)
    peers.let_others_print()
    return known.exit_code if known else 1


if __name__ == "__main__":
    process.leave(main(sys.argv))
