"""Processes with different options, code or libraries are refused in one line, before compiling."""

import threading

import jax
import pytest

from configs import base, smoke
from errors import UserError
from tests.trainer import Running, take_port
from training import agree, devices


class Memory:
    """A stand-in for the store that processes share, for threads."""

    def __init__(self):
        self._values = {}

    def key_value_set(self, key, value):
        self._values[key] = value

    def key_value_try_get(self, key):
        if key not in self._values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: " + key)
        return self._values[key]


def verdicts(found: list[agree.Values]) -> list[str]:
    """The error that each process raises, "" for none."""
    store, texts = Memory(), [""] * len(found)

    def run(process):
        try:
            agree.check(store, found[process], process, len(found))
        except UserError as error:
            texts[process] = str(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return texts


def other_value(field, metadata):
    """A value of the option's type that differs from the default."""
    if metadata.choices:
        return next(choice for choice in metadata.choices if choice != field.default)
    if isinstance(field.default, bool):
        return not field.default
    return f"{field.default}x" if isinstance(field.default, str) else field.default + 1


@pytest.mark.parametrize("name", [name for name, _, _ in base.all_options()])
def test_each_option_has_to_be_equal_unless_it_is_listed(name):
    """For all declared options, so that a new one is compared automatically."""
    field, metadata = next((f, m) for n, f, m in base.all_options() if n == name)
    ours, theirs = base.get_config(), base.get_config()
    group, option = name.split(".")
    theirs[group][option] = other_value(field, metadata)
    line = agree.first_difference([agree.values_of(c, "") for c in (ours, ours, theirs)])
    if name in agree.MAY_DIFFER:
        assert not line
    else:
        assert line.startswith(f"config.{name}: needs to be equal in all processes")
        assert f"{theirs[group][option]!r} in process 2" in line and "\n" not in line
        assert f"{ours[group][option]!r} in process 0" in line


def test_what_may_differ_are_options():
    assert {name for name, _, _ in base.all_options()} >= agree.MAY_DIFFER


@pytest.mark.parametrize("name", agree.ENVIRONMENT)
def test_an_environment_that_changes_programs_has_to_be_equal(monkeypatch, name):
    ours = agree.values_of(smoke.get_config(), "")
    monkeypatch.setenv(name, "other")
    assert agree.first_difference([ours, agree.values_of(smoke.get_config(), "")]).startswith(name)


def test_libraries_have_to_be_equal(monkeypatch):
    ours = agree.values_of(smoke.get_config(), "")
    monkeypatch.setattr(agree.importlib.metadata, "version", lambda name: "0.0.1")
    line = agree.first_difference([ours, agree.values_of(smoke.get_config(), "")])
    assert line.startswith("the version of ") and "0.0.1 in process 1" in line


def test_code_has_to_be_equal(tmp_path):
    for name in agree.CODE:
        (tmp_path / name).write_text("x = 1\n") if "." in name else (tmp_path / name).mkdir()
    before = agree.code_digest(tmp_path)
    file = tmp_path / "kernels" / "a.py"
    file.write_text("y = 1\n")
    added = agree.code_digest(tmp_path)
    file.write_text("y = 2\n")
    assert len({before, added, agree.code_digest(tmp_path)}) == 3


def test_all_processes_raise_the_same_line():
    equal = {"a": "1", "b": "2"}
    assert verdicts([equal] * 3) == ["", "", ""]
    lines = verdicts([equal, equal, equal | {"b": "3"}])
    assert len(set(lines)) == 1 and lines[0].startswith("b: needs to be equal")
    assert verdicts([equal, {"a": "1"}])[1].startswith("b: ")


def test_processes_meet_without_a_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "example.com")
    for name in ("NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    devices.bypass_proxies("[fd00::1]:1234")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        hosts = devices.os.environ[name].split(",")
        assert {"localhost", "127.0.0.1", "fd00::1"} <= set(hosts)
    assert devices.os.environ["no_proxy"].startswith("example.com,")


MESH = ["--config.mesh.context=4", "--config.train.steps=2", "--config.eval.batches=2"]
CASES = {
    "learning rate": ["--config.optimizer.learning_rate=0.01"],
    "steps": ["--config.train.steps=3"],
    "evaluations": ["--config.eval.every=1"],  # when collectives happen, from here on
    "saves": ["--config.checkpoint.every=1"],
    "mesh": ["--config.mesh.context=2", "--config.mesh.data=2"],
    "rows": ["--config.data.global_batch_size=4"],
    "epochs": ["--config.data.epochs=1"],
    "first parameters": ["--init_from=elsewhere"],
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES)
def test_two_processes_that_differ_are_refused(tmp_path, case):
    both = [*MESH, f"--coordinator=localhost:{take_port()}", "--processes=2"]
    runs = [
        Running(tmp_path, *both, "--process_id=0"),
        Running(tmp_path, *both, "--process_id=1", *CASES[case]),
    ]
    name = CASES[case][0].removeprefix("--config.").split("=")[0]
    for run in runs:
        text = run.end(2)
        assert text.startswith("error: ") and text.count("\n") == 0 and name in text, text
    assert not any(tmp_path.iterdir())
