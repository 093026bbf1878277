"""Continues text from a checkpoint or from a Hugging Face folder of weights.

    python generate.py --workdir runs/kda_cp4 --prompt "def main("

The text is printed as it is generated; at the end the speed is printed to stderr.
"""

import argparse
import sys
import time

from training import devices, entry


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser; the help texts document the flags."""
    parser = entry.parser(__doc__)
    entry.add_model_source(parser)
    add = parser.add_argument
    add("--prompt", action="append", help="text to continue; may be given several times")
    add("--prompt_file", help="file whose text is continued")
    add("--max_tokens", type=int, default=256, help="tokens to generate, >= 1 (default 256)")
    add(
        "--temperature",
        type=float,
        default=1.0,
        help="divides the logits, >= 0; 0: always take the most likely token (default 1)",
    )
    add(
        "--top_k",
        type=int,
        default=0,
        help="sample from the k most likely tokens, >= 0; 0: from all (default 0)",
    )
    add(
        "--top_p",
        type=float,
        default=1.0,
        help="sample from the most likely tokens with this total probability, > 0 and <= 1 "
        "(default 1)",
    )
    add(
        "--attention_memory",
        type=int,
        default=4096,
        help="tokens before a new one that attention layers, if any, can see (default 4096)",
    )
    add("--seed", type=int, default=0, help="seed for sampling, >= 0 (default 0)")
    return parser


def main(flags: argparse.Namespace) -> None:
    """Loads the model, prints the continuations and the speed."""
    devices.start_jax(flags.tensor, "auto", devices.Processes())
    from training import generate  # imports JAX, whose devices are chosen now

    sampling = generate.sampling(flags.temperature, flags.top_k, flags.top_p)
    prompts = generate.read_prompts(flags.prompt or [], flags.prompt_file)
    session = generate.open_session(
        generate.Source(flags.workdir, flags.weights, flags.tokenizer, flags.compute_dtype),
        flags.tensor,
        flags.attention_memory,
    )
    began = time.perf_counter()
    texts = [""] * len(prompts)
    for row, text in session.stream(prompts, flags.max_tokens, sampling, flags.seed):
        texts[row] += text
        if len(prompts) == 1:  # the pieces of several texts would be interleaved
            print(text, end="", flush=True)
    if len(prompts) == 1:
        print(flush=True)
    else:
        for prompt, text in zip(prompts, texts):
            print(f"=== {prompt.decode(errors='replace')}\n{text}", flush=True)
    print(session.speed(time.perf_counter() - began), file=sys.stderr, flush=True)


if __name__ == "__main__":
    entry.run(main, make_parser())
