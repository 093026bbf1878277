"""Shared by the entry points other than train.py: flags, and one-line errors."""

import argparse
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from errors import UserError
from training import failures, process


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; try --help")


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that reports mistakes as one-line errors and does not accept abbreviated flags."""
    return _Parser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_model_source(parser: argparse.ArgumentParser) -> None:
    """Flags that name a model: --workdir or --weights, --tokenizer, --tensor."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workdir", help="folder of a run, or of its checkpoints (also gs://)")
    source.add_argument("--weights", help="folder with config.json and safetensors files")
    parser.add_argument(
        "--tokenizer",
        help="bytes, or the path of a tokenizer.json or .model (default: the run's, or the "
        "tokenizer.json in the folder of weights)",
    )
    parser.add_argument(
        "--compute_dtype",
        choices=("bfloat16", "float32"),
        help="type of the computation (default: the run's, bfloat16 for weights)",
    )
    parser.add_argument(
        "--tensor", type=int, default=1, help="devices over which heads are split, >= 1 (default 1)"
    )


def run(main: Callable[[argparse.Namespace], None], flags: argparse.ArgumentParser) -> NoReturn:
    """Parses the command line, runs `main`, and ends the process with its exit code."""
    process.open_streams()
    process.quiet_libraries()
    try:
        main(flags.parse_args())
    except KeyboardInterrupt:
        process.leave(130)
    except Exception as error:
        known = failures.explain(error)
        if known is None:
            traceback.print_exception(error)
            process.leave(1)
        print("error: " + " ".join(str(known).split()), file=sys.stderr, flush=True)
        process.leave(known.exit_code)
    process.leave(0)
