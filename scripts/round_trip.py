"""Train, export, load in transformers, import, continue, generate; stops where one differs.

    python scripts/round_trip.py [--folder /tmp/round_trip] [--config configs/smoke.py]
        [--steps 4] [--config.group.option=value ...]

Without options the model is a hybrid of a KDA and an MLA layer, in float32. The step in
transformers runs where TRANSFORMERS_PYTHON names a Python with torch and transformers, and is
skipped with a line where it does not. Every command is printed before it runs. Exit code 1, with
one line, where a command fails or a comparison does not hold.
"""

import argparse
import json
import os
import pathlib
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
REFEREE = ROOT / "tests" / "referee_transformers.py"
HYBRID = tuple(
    f"--config.model.{option}"
    for option in ("pattern=kda,mla", "num_repeats=1", "mla_kv_rank=32", "mla_nope_dim=16",
                   "mla_rope_dim=8", "mla_value_dim=16", "attention_memory=128")
)  # fmt: skip
TOLERANCE = 1e-5  # relative RMS of float32 logits
TOKENS = (2, 96)  # rows and tokens whose logits are compared


def main() -> None:
    """Runs all steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="/tmp/round_trip", help="a new folder")
    parser.add_argument("--config", default="configs/smoke.py")
    parser.add_argument("--steps", type=int, default=4)
    flags, options = parser.parse_known_args()
    if os.path.exists(flags.folder):
        parser.error(f"--folder={flags.folder}: exists; try another, or remove it")
    folder = pathlib.Path(flags.folder)
    run, exported, further = (str(folder / name) for name in ("run", "exported", "further"))
    trainer = ["train.py", "--config", flags.config, *(options or HYBRID)]
    call(*trainer, "--workdir", run, f"--config.train.steps={flags.steps}")
    call("export.py", "--workdir", run, "--out", exported)
    compare_with_transformers(exported, folder)
    evaluations = []
    for number, source in enumerate(([], ["--init_from", exported])):
        path = str(folder / f"eval_{number}.json")
        call(*trainer, "--workdir", run, "--eval_only", "--eval_json", path, *source)
        evaluations.append(json.loads(pathlib.Path(path).read_text())["eval/loss"])
    check("validation loss of the run and of the export", *evaluations)
    texts = []
    for source in (("--workdir", run), ("--weights", exported, "--compute_dtype", "float32")):
        flags_of_text = ("--prompt", "The ", "--max_tokens", "32", "--temperature", "0")
        texts.append(call("generate.py", *source, *flags_of_text))
    check("texts of the run and of the export", *texts)
    steps = f"--config.train.steps={flags.steps}"
    call(*trainer, "--workdir", further, "--init_from", exported, steps)
    lines = (folder / "further" / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0])["eval/loss"]
    check("validation loss of the run and before the export's first step", evaluations[0], first)
    print("all steps agree")


def call(*command: str) -> str:
    """Runs a Python script of this project, prints it and its output, and returns the output."""
    print("$ python " + shlex.join(command), flush=True)
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(done.stdout, end="", flush=True)
    if done.returncode:
        sys.exit(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def check(what: str, ours: object, theirs: object) -> None:
    """Ends the script where two results differ."""
    if ours != theirs:
        sys.exit(f"{what} differ: {ours!r} and {theirs!r}")
    print(f"equal: {what}")


def compare_with_transformers(exported: str, folder: pathlib.Path) -> None:
    """The logits of transformers and ours, of random tokens."""
    python = os.environ.get("TRANSFORMERS_PYTHON")
    if not python:
        print("skipped: TRANSFORMERS_PYTHON names no Python with torch and transformers")
        return
    tokens, theirs = str(folder / "tokens.npy"), str(folder / "logits.npy")
    print(f"$ TRANSFORMERS_PYTHON {REFEREE.relative_to(ROOT)} {exported} {tokens} {theirs}")
    code = f"from scripts import round_trip as r; r.write_tokens({exported!r}, {tokens!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    # Settings for the OpenBLAS of this environment slow down that one's.
    env = {name: x for name, x in os.environ.items() if not name.startswith("OPENBLAS")}
    arguments = [python, str(REFEREE), exported, tokens, theirs]
    subprocess.run(arguments, check=True, env=env, stderr=subprocess.DEVNULL)
    code = f"from scripts import round_trip as r; r.compare({exported!r}, {tokens!r}, {theirs!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def write_tokens(exported: str, path: str) -> None:
    """Random ids of the export's vocabulary."""
    import numpy as np

    size = json.loads((pathlib.Path(exported) / "config.json").read_text())["vocab_size"]
    np.save(path, np.random.default_rng(0).integers(0, size, TOKENS))


def compare(exported: str, tokens: str, theirs: str) -> None:
    """Prints the relative RMS error of the logits; an error where it is over TOLERANCE."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from model.decoder import forward, init_carry
    from model.loss import logits
    from training.mesh import arrange
    from training.weights import read_folder

    mesh = arrange({}, jax.devices()[:1])
    params, cfg = read_folder(exported, mesh, {"compute_dtype": "float32"})
    ids = jnp.asarray(np.load(tokens), jnp.int32)
    start, carry = jnp.zeros(len(ids), bool), init_carry(cfg, len(ids))
    hidden, _, _ = forward(params, cfg, ids, jnp.ones_like(ids), start, carry, mesh)
    ours = np.asarray(logits(params, cfg, hidden, mesh), np.float64)
    expected = np.load(theirs).astype(np.float64)
    error = np.sqrt(np.mean((ours - expected) ** 2) / np.mean(expected**2))
    print(f"relative RMS error of {ids.size} tokens' logits: {error:.1e}")
    if not error < TOLERANCE:
        sys.exit(f"transformers' logits differ: {error:.1e}, {TOLERANCE:.0e} is allowed")


if __name__ == "__main__":
    main()
