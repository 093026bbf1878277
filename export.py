"""Writes a checkpoint's parameters as a Hugging Face folder.

    python export.py --workdir runs/kda_cp4 --out exported

The folder holds config.json, generation_config.json, safetensors files and, if the run has one, its
tokenizer. transformers loads "kimi_linear"; flash-linear-attention loads "kda". generate.py
--weights and train.py --init_from accept both.
"""

import argparse

from training import devices, entry


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser; the help texts document the flags."""
    parser = entry.parser(__doc__)
    add = parser.add_argument
    add("--workdir", required=True, help="folder of a run, or of its checkpoints (also gs://)")
    add("--out", required=True, help="folder to write; it must be empty or not exist")
    add(
        "--format",
        default="kimi_linear",
        choices=("kimi_linear", "kda"),
        help="layout of the folder (default kimi_linear)",
    )
    add(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="type of the parameters in the folder (default float32)",
    )
    return parser


def main(flags: argparse.Namespace) -> None:
    """Loads the newest checkpoint and writes the folder."""
    devices.start_jax(1, "auto", devices.Processes())
    from training import export  # imports JAX, whose devices are chosen now

    print(export.export(flags.workdir, flags.out, flags.format, flags.dtype), flush=True)


if __name__ == "__main__":
    entry.run(main, make_parser())
