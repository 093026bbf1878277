"""export.py, generate.py and --init_from of an exported folder, as a user runs them."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.trainer import ROOT, environment, train

SIZES = ("--config.model.num_repeats=1", "--config.train.steps=2", "--config.eval.every=0")


def run(script: str, *arguments, code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("entries") / "run"
    train(folder, *SIZES)
    return folder


@pytest.fixture(scope="module")
def exported(workdir):
    folder = workdir.parent / "exported"
    line = run("export.py", "--workdir", workdir, "--out", folder).stdout
    assert line.startswith("step 2 of ") and line.rstrip().endswith("(kimi_linear)")
    return folder


def test_generate_reads_a_run_and_its_export_and_says_the_same(workdir, exported):
    flags = ("--prompt", "def ", "--max_tokens", 12, "--temperature", 0, "--seed", 3)
    from_run = run("generate.py", "--workdir", workdir, *flags)
    # The export is computed in bfloat16 unless the config is asked; two steps of training leave
    # close ties, so the comparison is of a model in float32.
    from_export = run("generate.py", "--weights", exported, "--compute_dtype", "float32", *flags)
    assert from_run.stdout == from_export.stdout and from_run.stdout.endswith("\n")
    assert "tokens/s" in from_run.stderr


def test_several_prompts_are_printed_one_after_another(workdir):
    flags = ("--prompt", "a", "--prompt", "bb", "--max_tokens", 3)
    lines = run("generate.py", "--workdir", workdir, *flags).stdout.splitlines()
    assert [line for line in lines if line.startswith("===")] == ["=== a", "=== bb"]


def test_init_from_an_exported_folder_starts_from_its_parameters(workdir, exported, tmp_path):
    """The first loss is that of --init_from the run itself."""
    losses = []
    for name, source in (("a", workdir), ("b", exported)):
        train(tmp_path / name, *SIZES, f"--init_from={source}")
        first = (tmp_path / name / "metrics.jsonl").read_text().splitlines()[0]
        losses.append(json.loads(first)["learning/loss"])
    np.testing.assert_array_equal(losses[0], losses[1])


@pytest.mark.parametrize(
    ("script", "flags", "text"),
    [
        ("generate.py", ("--workdir", "none"), "error: none: "),
        ("generate.py", ("--weights", "none"), "config.json: cannot be read"),
        ("generate.py", (), "--workdir --weights is required; try --help"),
        ("generate.py", ("--weights", "{exported}", "--top_p", 2), "--top_p=2.0: needs"),
        ("generate.py", ("--weights", "{exported}", "--max_tokens", 0), "--max_tokens=0: needs"),
        ("generate.py", ("--weights", "{exported}", "--tensor", 3), "config.mesh.tensor"),
        ("generate.py", ("--weights", "{exported}", "--tokenizer", "x.json"), "no such file"),
        ("export.py", ("--workdir", "{run}", "--out", "{run}"), "needs an empty or new folder"),
        ("export.py", ("--workdir", "{run}", "--out", "x", "--format", "y"), "invalid choice: 'y'"),
    ],
)
def test_a_mistake_is_one_line(script, flags, text, workdir, exported):
    given = [str(flag).format(exported=exported, run=workdir) for flag in flags]
    done = run(script, *given, code=2)
    assert text in done.stderr and done.stderr.count("\n") == 1, done.stderr
