"""Whole runs in folders with unusual names, and two runs in one folder."""

import os
import subprocess

import pytest

from tests.trainer import LIMIT, ROOT, command, environment, steps_on_disk
from training.lock import lock

FEW = ["--config.checkpoint.every=1", "--config.eval.every=0"]


def run(workdir, *arguments: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(workdir, *FEW, *arguments),
        cwd=ROOT,
        env=environment() | variables,
        capture_output=True,
        timeout=LIMIT,
    )


def test_what_the_terminal_cannot_show_is_escaped(tmp_path):
    workdir, encoding = tmp_path / "é 漢", "ascii:strict"
    for steps, code in (("2", 0), ("3", 0)):
        done = run(workdir, f"--config.train.steps={steps}", PYTHONIOENCODING=encoding)
        assert done.returncode == code, done.stderr
        shown = str(workdir).encode(encoding.split(":")[0], "backslashreplace")
        assert b"is saved in " + shown in done.stdout
    assert b"resumed from step 2" in done.stdout
    assert steps_on_disk(workdir)[-1] == 3


@pytest.mark.parametrize("name", [b"run\xff", b"a[1]b", b"gs:"])
def test_a_folder_that_cannot_be_saved_to_is_refused_before_step_1(tmp_path, name):
    done = run(os.fsdecode(bytes(tmp_path) + b"/" + name), "--config.train.steps=1")
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1, done.stderr
    assert b"--workdir" in done.stderr and b"step 1/" not in done.stdout


def test_two_runs_of_different_workdirs_cannot_save_into_one_folder(tmp_path):
    """In reverse, and through another name of the folder."""
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with lock(str(tmp_path / "a" / "checkpoints"), "config.checkpoint.directory"):
        for place in (
            [tmp_path / "a"],
            [tmp_path / "b", f"--config.checkpoint.directory={tmp_path}/link/checkpoints"],
        ):
            done = run(*place, "--config.train.steps=1")
            assert done.returncode == 1 and done.stderr.count(b"\n") == 1, done.stderr
            assert b"another run is using it" in done.stderr
