"""Options from the command line, and every mistake as one line before anything starts."""

import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

import train
from configs import base, check, document, flags, kda_cp4, smoke
from errors import RunError, UserError

SMOKE = "configs/smoke.py"


def parse(*arguments, config=SMOKE):
    """The config for a command line, with flags as in a fresh interpreter."""
    for name in [name for name in flags._FLAGS if name.startswith("config")]:
        delattr(flags._FLAGS, name)
    flags._FLAGS.unparse_flags()
    return flags.parse(["train.py", f"--config={config}", *arguments])[0]


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("config.mesh: needs 4"), 2, "error: config.mesh: needs 4\n"),
        (RunError("disk full"), 1, "error: disk full\n"),
        (ValueError("cannot reshape array"), 1, "Traceback"),
    ],
)
def test_the_kind_of_an_error_decides_not_its_text(monkeypatch, capsys, error, code, says):
    """No exception leaves main."""

    def start(*_):
        raise error

    monkeypatch.setattr(train.process, "quiet_libraries", lambda: None)
    monkeypatch.setattr(train, "Signals", lambda: None)
    monkeypatch.setattr(
        train.command_line,
        "parse",
        lambda argv: (smoke.get_config(), types.SimpleNamespace(plan="")),
    )
    monkeypatch.setattr(train, "start_jax", start)
    assert train.main(["train.py"]) == code
    assert capsys.readouterr().err.startswith(says)


@pytest.mark.parametrize("module", [base, kda_cp4, smoke])
def test_each_config_is_locked_and_passes_its_own_check(module):
    config = module.get_config()
    check.check(config)
    with pytest.raises(AttributeError):
        config.train.stesp = 1


@pytest.mark.parametrize(
    ("argument", "group", "option", "value"),
    [
        ("--config.train.steps=1e3", "train", "steps", 1000),
        ("--config.train.steps=1_000", "train", "steps", 1000),
        ("--config.optimizer.learning_rate=1", "optimizer", "learning_rate", 1.0),
        ("--config.optimizer.learning_rate=1e-4", "optimizer", "learning_rate", 1e-4),
        ("--config.model.carry=False", "model", "carry", False),
        ("--noconfig.model.carry", "model", "carry", False),
        ("--config.train.skip_nonfinite", "train", "skip_nonfinite", True),
        ("--config.data.path=none", "data", "path", ""),
        ("--config.model.pattern=kda,attention", "model", "pattern", "kda,attention"),
    ],
)
def test_values_are_taken_where_the_meaning_is_plain(argument, group, option, value):
    taken = parse(argument)[group][option]
    assert taken == value and type(taken) is type(value)


def test_value_in_an_argument_of_its_own():
    assert parse("--config.train.steps", "7").train.steps == 7


def test_the_last_of_two_values_counts():
    assert parse("--config.train.steps=7", "--config.train.steps=8").train.steps == 8


# What is given; what the message must name; what it must advise.
MISTAKES = [
    (["--config.train.stesp=20"], "config.train.stesp", "config.train.steps"),
    (["--config.trian.steps=20"], "config.trian.steps", "config.train.steps"),
    (["--config.train.steps.x=20"], "config.train.steps.x", "not a group"),
    (["--config.train=20"], "config.train", "--config.train."),
    (["--config.train.steps"], "config.train.steps", "--config.train.steps=20"),
    (["--config.train.steps=1.5"], "config.train.steps=1.5", "whole number"),
    (["--config.train.steps=many"], "config.train.steps=many", "whole number"),
    (["--config.train.steps=none"], "config.train.steps=none", "needs 0"),
    (["--config.train.steps=0"], "config.train.steps=0", ">= 1"),
    (["--config.train.seed=3e9"], "config.train.seed=3000000000", "<= 2147483647"),
    (
        ["--config.data.global_batch_size=1e30"],
        "config.data.global_batch_size=10000000000",
        "<= 2147483647",
    ),
    (["--config.mesh.tensor=1e30"], "config.mesh.tensor=10000000000", "<= 2147483647"),
    (["--config.train.spike_window=1e30"], "config.train.spike_window=1", "<= 2147483647"),
    (["--config.optimizer.learning_rate=fast"], "config.optimizer.learning_rate=fast", "number"),
    (["--config.optimizer.learning_rate=nan"], "config.optimizer.learning_rate=nan", "finite"),
    (["--config.optimizer.learning_rate=-1"], "config.optimizer.learning_rate=-1.0", "> 0"),
    (["--config.optimizer.b2=1"], "config.optimizer.b2=1.0", "< 1"),
    (["--config.optimizer.name=sgd"], "config.optimizer.name='sgd'", "adamw"),
    (["--config.model.kda_implementation=x"], "config.model.kda_implementation='x'", "try auto"),
    (["--config.optimizer.warmup_steps=20"], "config.optimizer.warmup_steps=20", "try 2"),
    (
        ["--config.optimizer.schedule=wsd", "--config.optimizer.decay_steps=16"],
        "config.optimizer.decay_steps=16",
        "try 15",
    ),
    (["--config.model.carry=perhaps"], "config.model.carry=perhaps", "true or false"),
    (["--config.mesh.context=3"], "config.data.sequence_length=128", "126 or 129"),
    (
        ["--config.mesh.data=2", "--config.data.global_batch_size=3"],
        "config.data.global_batch_size=3",
        "2 or 4",
    ),
    (
        ["--config.data.global_batch_size=8", "--config.train.grad_accum_steps=3"],
        "config.train.grad_accum_steps=3",
        "2 or 4",
    ),
    (
        ["--config.train.tbptt_windows=2", "--config.data.packing=whole"],
        "config.train.tbptt_windows=2",
        'data.packing="stream"',
    ),
    (["--steps=5"], "--steps", "--config.train.steps"),
    (["--steps", "3"], "--steps", "--config.train.steps"),
    (["--lr=1e-3"], "--lr", "--config.optimizer.learning_rate"),
    (["--config.optimizer.lr=1"], "config.optimizer.lr", "config.optimizer.learning_rate"),
    (["--config.model.width=64"], "config.model.width", "config.model.d_model"),
    (["--config.data.rows=2"], "config.data.rows", "config.data.global_batch_size"),
    (["--config.train.accumulation=2"], "accumulation", "config.train.grad_accum_steps"),
    (["--config.model.heads=2"], "config.model.heads", "config.model.kda_heads"),
    (["--config.data.batch=2"], "config.data.batch", "config.data.global_batch_size"),
    (["--dtype=bf16"], "--dtype", "--config.model.compute_dtype"),
    (["--output_dir=x"], "--output_dir", "--workdir=FOLDER"),
    (["--gpus=2"], "--gpus", "--config.mesh.data"),
    (["--resume"], "--resume", "the same command resumes"),
    (["20"], "'20'", "--name=value"),
    (["--processes=2", "--process_id=0"], "--coordinator", "localhost"),
    (["--coordinator=a:1", "--processes=2", "--process_id=2"], "--process_id=2", "0 to 1"),
    (["--coordinator=a", "--processes=2", "--process_id=1"], "--coordinator=a", "host:port"),
    (["--coordinator=a:b", "--processes=1", "--process_id=0"], "--coordinator=a:b", "try a:1234"),
    (["--coordinator=a:99999", "--processes=1", "--process_id=0"], "a:99999", "from 1 to 65535"),
    (["--processes=-1"], "--processes=-1", "--coordinator"),
    (["--flagfile=/none"], "'/none'", "flagfile"),
    (["--coordinator=auto", "--processes=2"], "--coordinator=auto", "without --processes"),
    (["--config.checkpoint.directory=s3://a/b"], "config.checkpoint.directory='s3://a/b'", "gs://"),
    (["--config.checkpoint.directory=gs://"], "config.checkpoint.directory='gs://'", "gs://bucket"),
    (["--workdir=gs://a/b"], "--workdir=gs://a/b", "--config.checkpoint.directory=gs://a/b"),
]


@pytest.mark.parametrize(("arguments", "names", "advises"), MISTAKES)
def test_a_mistake_is_one_line_that_names_it_and_says_what_works(arguments, names, advises):
    with pytest.raises(ValueError) as caught:
        check.check(parse(*arguments))
    text = str(caught.value)
    assert names in text and advises in text and "\n" not in text, text


def test_a_missing_config_file_is_told_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"no such file; try configs/kda_cp4\.py"):
        parse(config="configs/kda_cp.py")


def test_a_broken_config_file_is_one_line(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("def get_config():\n    return 1 / 0\n")
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        parse(config=str(broken))
    broken.write_text("raise SystemExit(3)\n")
    with pytest.raises(ValueError, match="SystemExit"):
        parse(config=str(broken))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.train.stesp = 2", r"config\.train\.stesp: there is no such.*train\.steps"),
        ("config.trian = config.train", r"config\.trian: needs to be one of the option groups"),
        ("del config['eval']", r"config\.eval: needs to be one of the option groups"),
        ("del config.eval['every']", r"config\.eval\.every: is missing; .* try 200"),
        ("config.train.steps = None", r"config\.train\.steps=None: needs a value of type int"),
    ],
)
def test_what_a_config_file_adds_removes_or_retypes_is_refused(tmp_path, line, message):
    """Config files unlock the options, so nothing else notices."""
    file = tmp_path / "own.py"
    start = "from configs import base\ndef get_config():\n  config = base.get_config()\n"
    file.write_text(f"{start}  with config.unlocked():\n    {line}\n  return config\n")
    with pytest.raises(ValueError, match=message):
        check.check(parse(config=str(file)))


def test_a_config_without_its_flag_is_pointed_to():
    with pytest.raises(UserError, match=r"try --config configs/mine\.py"):
        flags.parse(["train.py", "configs/mine.py"])


def test_docs_list_the_options_as_they_are_declared():
    file = pathlib.Path(base.__file__).parents[1] / "docs" / "configuration.md"
    assert file.read_text() == document.markdown(), "run: python -m configs.document > " + str(file)


def test_help_shows_every_option_with_default_and_constraint(capsys):
    with pytest.raises(SystemExit) as caught:
        flags.parse(["train.py", "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    for name, field, metadata in base.all_options():
        line = next(x for x in text.splitlines() if x.startswith(f"  --config.{name}="))
        assert str(field.default) in line and metadata.constraint() in line
    assert all(metadata.help for _, _, metadata in base.all_options())


def test_every_option_is_read():
    """Outside its declaration the product contains `.name`, or the name in quotes."""
    root = pathlib.Path(base.__file__).parents[1]
    rooms = ("configs", "data", "model", "training", "checkpoints", "kernels")
    declarations = {"options.py", "config.py"}
    paths = [p for room in rooms for p in (root / room).rglob("*.py") if p.name not in declarations]
    text = "\n".join(path.read_text() for path in [*paths, root / "train.py"])
    config = (root / "model" / "config.py").read_text()
    properties = re.findall(r"self\.(\w+)", config)
    unread = [
        name
        for name, _, _ in base.all_options()
        if not re.search(rf"\.{name.split('.')[1]}\b|\"{name.split('.')[1]}\"", text)
        and name.split(".")[1] not in properties
    ]
    assert not unread


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", SMOKE, "--config.train.stesp=20"],
        ["--config", "configs/none.py"],
        ["--config", SMOKE, "--config.data.tokenizer=/none.json"],
        ["--config", SMOKE, "--config.data.source=text", "--config.data.path=/none"],
        ["--config", SMOKE, "--config.mesh.tensor=4"],
        ["--config", SMOKE, "--config.model.pattern=mamba"],
        ["--config", SMOKE, "--config.model.kda_implementation=mosaic_tpu"],
        ["--config", SMOKE, "--config.mesh.tensor=1000000"],
    ],
)
def test_train_py_ends_with_one_line_and_code_2(arguments, tmp_path):
    command = [sys.executable, "train.py", *arguments, f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert not done.stdout and not (tmp_path / "run").exists()


def test_devices_that_are_not_there_are_one_line(tmp_path):
    command = [sys.executable, "train.py", "--config", SMOKE, f"--workdir={tmp_path / 'run'}"]
    environment = os.environ | {"JAX_PLATFORMS": "abacus"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: JAX_PLATFORMS=abacus: ") and done.stderr.count("\n") == 1


def test_home_is_expanded_in_paths(monkeypatch):
    """A shell does not expand --name=~/folder."""
    monkeypatch.setenv("HOME", "/home/me")
    arguments = ["--workdir=~/run", "--init_from=~/old", "--config.checkpoint.directory=~/ck"]
    config = parse(*arguments, "--config.data.tokenizer=~/t.json")
    found = flags._FLAGS
    assert found.workdir == "/home/me/run" and found.init_from == "/home/me/old"
    assert config.checkpoint.directory == "/home/me/ck"
    assert config.data.tokenizer == "/home/me/t.json"
