"""Logits of an exported folder by transformers, for tests/training/test_referee.py.

    PYTHON_WITH_TRANSFORMERS tests/referee_transformers.py FOLDER TOKENS.npy LOGITS.npy

Runs in a separate environment (torch and transformers 5.24, neither fla nor triton), never in
the project's. TOKENS: int64 [B, T].
"""

import sys

import numpy as np
import torch
import transformers


def main(folder: str, tokens: str, logits: str) -> None:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise SystemExit(f"{kind}: {sorted(report[kind])[:5]}")
    with torch.no_grad():
        scores = model.eval()(torch.from_numpy(np.load(tokens)), use_cache=False).logits
    np.save(logits, scores.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
