"""A whole training step on an absent TPU: the plan of a large decoder.

    python -m benchmarks.step_tpu
    python -m benchmarks.step_tpu --tokens 32768 --topology v6e:2x2 --width 1024

A decoder of four KDA layers, scanned and rematerialised, heads of 128, feed-forward layers of 2.75
times the width, a vocabulary of 32,768, bfloat16, AdamW, one row of T tokens over a context axis
of 4. Prints what `python train.py --plan` prints: memory, bundles, collectives, an estimate.
"""

import argparse

from ml_collections import ConfigDict

from configs import kda_cp4
from training.estimate import report
from training.estimate.plan import make_plan
from training.estimate.topology import Topology


def large_config(tokens: int, width: int, layers: int = 4, pattern: str = "kda") -> ConfigDict:
    """The main config with the sizes named above; `layers` a multiple of the pattern's length."""
    config = kda_cp4.get_config()
    heads = width // 128
    config.model.update(
        vocab_size=32768, d_model=width, pattern=pattern,
        num_repeats=layers // len(pattern.split(",")), d_ff=width * 11 // 4 // 128 * 128,
        kda_heads=heads, key_dim=128, value_dim=128, gate_rank=128, compute_dtype="bfloat16",
        attention_heads=heads, attention_kv_heads=max(heads // 4, 1),
    )  # fmt: skip
    config.data.update(global_batch_size=1, sequence_length=tokens)
    config.optimizer.name = "adamw"
    return config


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--topology", default="tpu7x:2x2x1")
    parser.add_argument("--width", type=int, default=2048)
    args = parser.parse_args()
    plan = make_plan(large_config(args.tokens, args.width), Topology.parse(args.topology))
    print(report.as_text(plan))


if __name__ == "__main__":
    main()
