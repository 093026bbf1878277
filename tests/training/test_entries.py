"""export.py, generate.py and --init_from of an exported folder, as a user runs them."""

import gc
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.safetensors_io import Reader, Writer
from model.decoder import forward, init_carry
from model.loss import logits
from tests.model_cases import make_mesh
from tests.tolerances import MODEL_FLOAT32
from tests.trainer import ROOT, environment, train
from training.export import export
from training.weights import read_folder

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
    """The evaluation before the first step, and its loss, are those of --init_from the run itself;
    the former is the run's own last one."""
    last = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
    values = []
    for name, source in (("a", workdir), ("b", exported)):
        done = train(tmp_path / name, *SIZES, f"--init_from={source}")
        assert "step 0/2" in done.stdout and "validation loss" in done.stdout
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        first, second = json.loads(lines[0]), json.loads(lines[1])
        assert (first["step"], second["step"]) == (0, 1) and first["eval/loss"] == last["eval/loss"]
        values.append([first["eval/loss"], second["learning/loss"]])
    np.testing.assert_array_equal(values[0], values[1])


def test_evaluation_data_may_change_when_a_run_is_resumed(workdir, tmp_path):
    """Its position in the training data is kept; a line says what changed."""
    texts = {name: tmp_path / f"{name}.jsonl" for name in ("train", "old", "new")}
    for name, path in texts.items():
        lines = (json.dumps({"text": f"{number} of {name} " * 60}) for number in range(8))
        path.write_text("\n".join(lines))
    data = ("--config.data.source=jsonl", f"--config.data.path={texts['train']}")
    run_dir = tmp_path / "run"
    train(run_dir, *SIZES, *data, f"--config.data.eval_path={texts['old']}")
    more = (*SIZES, "--config.train.steps=3", *data)
    done = train(run_dir, *more, f"--config.data.eval_path={texts['new']}")
    assert "resumed from step 2" in done.stdout and "carried state starts" not in done.stdout
    assert f"config.data.eval_path is '{texts['old']}' there and '{texts['new']}'" in done.stdout


def test_export_holds_one_parameter_at_a_time(workdir, tmp_path, monkeypatch):
    """Counted whenever a tensor is written."""
    live = []
    add = Writer.add

    def counted(writer, name, array):
        live.append(sum(x.nbytes for x in jax.live_arrays()) - before)
        add(writer, name, array)

    monkeypatch.setattr(Writer, "add", counted)
    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    export(str(workdir), str(tmp_path / "out"), "kimi_linear", "float32")
    reader = Reader(str(tmp_path / "out"))
    sizes = [entry.nbytes for entry in reader.entries.values()]
    largest = 4 * 384 * 64  # the embedding, its vocabulary padded to 384
    assert max(live) <= largest + 1024, (max(live), largest)
    assert sum(sizes) > 4 * largest, "the bound would not tell one from all"


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


def loss_of_rows(exported, tokens: np.ndarray, length: int) -> float:
    """Nats per token of one document in rows that start from an empty state, in one forward."""
    mesh = make_mesh()
    params, cfg = read_folder(str(exported), mesh, {"compute_dtype": "float32"})
    count = -(-len(tokens) // length)
    ids = np.zeros(count * length, np.int32)
    ids[: len(tokens)] = tokens
    ids = ids.reshape(count, length)
    real = np.arange(count * length).reshape(count, length) < len(tokens)
    arrays = jnp.asarray(ids), jnp.asarray(real, jnp.int32), jnp.zeros(count, bool)
    hidden, _, _ = forward(params, cfg, *arrays, init_carry(cfg, count), mesh)
    scores = np.asarray(logits(params, cfg, hidden, mesh), np.float64).reshape(-1, cfg.vocab_size)
    of_targets = scores[np.arange(len(tokens) - 1), tokens[1:]]
    return float(np.mean(np.log(np.exp(scores[: len(tokens) - 1]).sum(1)) - of_targets))


def test_eval_only_overrides_data_row_length_carry_and_memory(workdir, exported, tmp_path):
    """Rows of 64 tokens with everything carried are one long row; without carry, each is alone."""
    text, result = tmp_path / "other.txt", tmp_path / "result.json"
    text.write_bytes(bytes(np.random.default_rng(0).integers(32, 127, 600).tolist()))
    tokens = np.asarray([256, *text.read_bytes(), 257])
    data = ("--config.data.source=text", f"--config.data.path={text}")
    data += (f"--config.data.eval_path={text}", "--config.data.sequence_length=64")

    def evaluated(*flags: str) -> float:
        json_flag = f"--eval_json={result}"
        line = train(workdir, *SIZES, *data, *flags, "--eval_only", json_flag).stdout
        assert "bits/byte" in line and "parameters from step 2" in line
        return json.loads(result.read_text())["eval/loss"]

    carried = evaluated("--config.model.attention_memory=1024", "--config.eval.batches=0")
    alone = evaluated("--config.model.carry=false", "--config.model.attention_memory=0",
                      "--config.eval.batches=0")  # fmt: skip
    assert carried == pytest.approx(loss_of_rows(exported, tokens, 640), rel=MODEL_FLOAT32)
    assert alone == pytest.approx(loss_of_rows(exported, tokens, 64), rel=MODEL_FLOAT32)
    assert abs(carried - alone) > 100 * MODEL_FLOAT32, "carry would not matter here"


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
