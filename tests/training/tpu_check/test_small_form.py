"""The check in its interpreted small form: it finds broken kernels, and runs to its end; and its
full form compiles for every generation. Programs run in other processes but for single checks."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from kernels.kda.tpu import backward_kernel, forward_kernel, relay
from kernels.short_conv import tpu as short_conv_tpu
from tests.trainer import ROOT
from training.tpu_check import worker
from training.tpu_check.checks import CHECKS
from training.tpu_check.outcome import Status
from training.tpu_check.site import Mode, Site


@pytest.fixture
def site(tmp_path) -> Site:
    return Site(Mode.INTERPRET, tuple(jax.devices()[:2]), None, tmp_path, None)


def test_a_broken_kernel_is_found(site, monkeypatch):
    """One tap's sum is 1 % too large."""
    kernel = short_conv_tpu._forward_kernel

    def broken(activation, *references):
        kernel(activation, *references)
        y = references[-2]  # the output stands before the scratch
        y[...] = (y[...].astype(jnp.float32) * 1.01).astype(y.dtype)

    monkeypatch.setattr(short_conv_tpu, "_forward_kernel", broken)
    outcome = worker.run("short convolution, one device", site)
    assert outcome.status is Status.FAILED, outcome
    assert "beyond its bound: out 1.0e-02 of 0.0025" in outcome.detail


def test_a_check_that_raises_or_needs_more_devices_says_so(site, monkeypatch):
    def fail(*arguments, **options):
        raise ValueError("the compiler\nrefuses | this")

    monkeypatch.setattr(Site, "compile", fail)
    outcome = worker.run("time of a product", site)
    assert outcome.status is Status.ERROR
    assert outcome.detail == "ValueError: the compiler refuses / this"
    outcome = worker.run("KDA dense, context axis minor", site)
    assert outcome.status is Status.SKIPPED and "needs 4 devices, there are 2" in outcome.detail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "wrong"), [(forward_kernel, ("out", "final")), (backward_kernel, ("q", "k", "v"))]
)
def test_a_broken_relay_is_found(site, monkeypatch, module, wrong):
    """What a rank sends to its neighbour is 5 % too large."""

    def hand_on(line, round, state):
        if line is not None:
            line.reserve(round)
            line.reply(round)[...] = state[...] * 1.05
            line.send(round)

    assert module.hand_on is relay.hand_on
    monkeypatch.setattr(module, "hand_on", hand_on)
    outcome = worker.run("KDA dense, all devices along context", site)
    assert outcome.status is Status.FAILED, outcome
    beyond = outcome.detail.split("beyond its bound: ")[1]
    assert any(f"{name} " in beyond for name in wrong), outcome


def run(*arguments: str) -> tuple[int, str]:
    """(exit code, what it printed)."""
    done = subprocess.run(
        [sys.executable, "-m", "training.tpu_check", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_small_form_runs_to_its_end(tmp_path):
    file = tmp_path / "table.md"
    code, text = run("--interpret", f"--output={file}", "--factors=none")
    assert code == 0, text
    rows = [line for line in file.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(CHECKS) and all("| ok |" in row for row in rows), text


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_full_form_compiles(topology):
    code, text = run("--compile", topology)
    assert code == 0, text
    assert text.count(": ok, compiles: peak") == len(CHECKS), text
