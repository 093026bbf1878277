"""export.py, generate.py and --init_from of an exported folder, as a user runs them."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.trainer import ROOT, environment, train

SIZES = ("--config.model.num_repeats=1", "--config.train.steps=2", "--config.eval.batches=2")
SIZES += tuple(  # a hybrid of KDA and MLA
    f"--config.model.{option}"
    for option in ("pattern=kda,mla", "mla_kv_rank=32", "mla_nope_dim=16", "mla_rope_dim=8",
                   "mla_value_dim=16", "attention_memory=128")
)  # fmt: skip


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
    # The export is computed in bfloat16 by default; two steps of training leave
    # close ties, so the comparison is of a model in float32.
    from_export = run("generate.py", "--weights", exported, "--compute_dtype", "float32", *flags)
    assert from_run.stdout == from_export.stdout and from_run.stdout.endswith("\n")
    assert "tokens/s" in from_run.stderr


def test_several_prompts_are_printed_one_after_another(workdir):
    flags = ("--prompt", "a", "--prompt", "bb", "--max_tokens", 3)
    lines = run("generate.py", "--workdir", workdir, *flags).stdout.splitlines()
    assert [line for line in lines if line.startswith("===")] == ["=== a", "=== bb"]


def test_init_from_an_exported_folder_starts_from_its_parameters(workdir, exported, tmp_path):
    """The first loss equals that of --init_from the run itself."""
    losses = []
    for name, source in (("a", workdir), ("b", exported)):
        train(tmp_path / name, *SIZES, f"--init_from={source}")
        first = (tmp_path / name / "metrics.jsonl").read_text().splitlines()[0]
        losses.append(json.loads(first)["learning/loss"])
    np.testing.assert_array_equal(losses[0], losses[1])


def files(folder) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_eval_only_finds_the_loss_that_the_run_reported_and_changes_nothing(
    workdir, exported, tmp_path
):
    last = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
    before = files(workdir)
    result = tmp_path / "result.json"
    line = train(workdir, *SIZES, "--eval_only", f"--eval_json={result}").stdout
    found = json.loads(result.read_text())
    assert found["eval/loss"] == last["eval/loss"]
    assert f"loss {found['eval/loss']:.4f}" in line
    assert files(workdir) == before
    done = train(tmp_path / "none", *SIZES, "--eval_only", f"--init_from={exported}")
    assert f"loss {found['eval/loss']:.4f}" in done.stdout and not (tmp_path / "none").exists()


def test_eval_only_reads_other_data_and_other_lengths_of_rows(workdir, tmp_path):
    text = tmp_path / "other.txt"
    text.write_bytes(b"xyzzy " * 500)
    flags = ("--config.data.source=text", f"--config.data.path={text}")
    flags += (f"--config.data.eval_path={text}", "--config.data.sequence_length=64")
    flags += ("--config.model.carry=false", "--config.model.attention_memory=0")
    line = train(workdir, *SIZES, *flags, "--eval_only").stdout
    assert "bits/byte" in line and "parameters from step 2" in line


@pytest.mark.parametrize(
    ("script", "flags", "text"),
    [
        ("generate.py", ("--workdir", "none"), "none: there is no such checkpoint folder"),
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
    done = run(script, *given, code=1 if "none" in flags and "--workdir" in flags else 2)
    assert text in done.stderr and done.stderr.count("\n") == 1, done.stderr
