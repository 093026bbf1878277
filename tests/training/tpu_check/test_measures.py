"""Arithmetic of the checks: worst errors, speeds, memory, waiting. Nothing compiles."""

import argparse
import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from tests.training.estimate.programs import BUNDLES, TEXT
from training.estimate import factors, hlo, program
from training.estimate.bundles import Loop, Schedule
from training.estimate.timeline import seconds_of
from training.estimate.topology import GENERATIONS, Topology
from training.tpu_check import __main__ as command
from training.tpu_check import speed, step, values
from training.tpu_check.checks import CHECKS, FRESH
from training.tpu_check.outcome import Machine, Outcome, Status

V6E = GENERATIONS["v6e"]


def fake_site(seconds: float, **more):
    """A site on v6e on which every program takes this long."""
    given = {"small": False, "generation": V6E, "devices": (None,) * 4} | more
    return SimpleNamespace(seconds=lambda program: seconds, **given)


def fake_program(bundles: int = 0, shape=(8192, 8192), nbytes: int = 0):
    argument = SimpleNamespace(shape=shape, nbytes=nbytes)
    return SimpleNamespace(schedule=Schedule({"dot": bundles}), arguments=(argument,))


def test_the_worst_error_is_named_and_no_number_is_the_worst_of_all():
    limits = {"out": 1e-2, "final": 1e-2, "q": 2e-2}
    passed, text = values.worst({"out": 1e-3, "final": 2e-3, "q": 1e-2}, limits)
    assert passed and text.startswith("worst: q 1.0e-02 of 0.02, out 1.0e-03")
    passed, text = values.worst({"out": 1e-3, "final": 3e-2, "q": math.nan}, limits)
    assert not passed and "beyond its bound: final 3.0e-02 of 0.01, q nan" in text


def test_packed_rows_have_segments_of_all_kinds():
    """Padding first, between segments and inside one; edges inside chunks; each id one run."""
    ids = values.packed_ids(4, 2000)
    inside = between = 0
    for row in ids:
        assert row[0] == 0 and (np.diff(row[row > 0]) >= 0).all()
        edges = np.flatnonzero(np.diff(row)) + 1
        assert len(edges) > 3 and (edges % 64 != 0).sum() > 3
        gaps = [(row[a - 1], row[b]) for a, b in itertools.pairwise(edges) if row[a] == 0]
        inside += sum(before == after for before, after in gaps)
        between += sum(before != after for before, after in gaps)
    assert inside and between


@pytest.mark.parametrize(
    ("share", "passes"), [(1.0, True), (0.5, True), (0.1, False), (9.0, False)]
)
def test_a_products_time_gives_the_clock_unless_it_is_far_off(share, passes):
    bundles = 2_654_000
    outcome = speed.judge_product(fake_site(bundles / (share * V6E.clock)), [fake_program(bundles)])
    assert (outcome.status is Status.OK) == passes
    expected = {"clock": pytest.approx(share * V6E.clock)} if passes else {}
    assert outcome.speeds == expected


def test_bytes_over_time_are_the_speed_of_hbm():
    outcome = speed.judge_hbm(fake_site(1e-3), [fake_program(nbytes=8 * 10**8)])
    assert outcome.speeds == {"hbm_bytes_a_second": pytest.approx(1.6e12)}


def test_links_have_a_speed_and_a_latency():
    times = {800 * 10**6: 20 * (200e6 / 8e10 + 2e-6), 0: 20 * 2e-6}
    site = fake_site(0.0)
    site.seconds = lambda program: times[program.arguments[0].nbytes]
    outcome = speed.judge_links(site, [fake_program(nbytes=n) for n in times])
    assert outcome.speeds == {
        "link_bytes_a_second": pytest.approx(8e10),
        "hop_seconds": pytest.approx(2e-6),
    }


def works_with_a_kernel():
    """Of the known program, with one product as a Pallas kernel."""
    text = TEXT.replace("product.1", "kda_forward.1")
    bundles = {name.replace("product.1", "kda_forward.1"): n for name, n in BUNDLES.items()}
    found = program.works(hlo.parse(text), bundles)
    kernel = next(w for w in found if w.visit.instruction.name == "kda_forward.1")
    attributes = kernel.visit.instruction.attributes + f", {program.KERNEL}"
    changed = dataclasses.replace(kernel.visit.instruction, attributes=attributes)
    visit = dataclasses.replace(kernel.visit, instruction=changed)
    return [dataclasses.replace(w, visit=visit) if w is kernel else w for w in found]


def test_stalls_are_those_for_which_the_estimate_is_the_measured_time():
    found = works_with_a_kernel()
    slow = dataclasses.replace(V6E, kernel_stalls=3.3)
    seconds = sum(w.visit.times * seconds_of(w, slow) for w in found)
    assert speed.kernel_bundles(found) == 3 * 500
    assert speed.stalls_of(found, seconds, V6E) == pytest.approx(3.3)


def test_a_plan_with_the_saved_speeds_takes_as_long_as_the_kernels_took(tmp_path, monkeypatch):
    """Whatever clock was measured beside them."""
    found = [w for w in works_with_a_kernel() if program.is_kernel(w.visit.instruction)]
    monkeypatch.setattr(speed, "works", lambda module, latest: found)
    seconds = 2e-6
    measured = speed.judge_kernels(
        False, fake_site(seconds), [SimpleNamespace(module=None, schedule=Schedule())]
    )
    path = tmp_path / "factors.json"
    driver = SimpleNamespace(machine=Machine("TPU v6 lite", 4, "0.12", "0.0.52"))
    speeds = command.Speeds(str(path), driver)
    speeds.add({"clock": 0.7 * V6E.clock, "hbm_bytes_a_second": 1.5e12} | measured.speeds)
    generation = factors.calibrated(Topology.parse("v6e:2x2"), path).generation
    assert generation.clock == 0.7 * V6E.clock
    took = sum(w.visit.times * seconds_of(w, generation) for w in found)
    assert took == pytest.approx(seconds)


def test_waiting_is_that_of_the_timeline_at_the_measured_speed(monkeypatch):
    """Two groups of 100 bundles that pass states over four ranks: each rank waits for one group."""
    group = Loop(1, 2, [100], sends=[1], sent=0)
    schedule = Schedule({"kda_forward.1": 200}, {"kda_forward.1": Loop(0, 1, [group])})
    kernel = works_with_a_kernel()
    kernel = [w for w in kernel if w.visit.instruction.name == "kda_forward.1"]
    visit = dataclasses.replace(kernel[0].visit, times=1, loops=())
    works = [dataclasses.replace(kernel[0], visit=visit, bundles=200, hbm_bytes=0)]
    monkeypatch.setattr(speed, "works", lambda module, latest: works)
    monkeypatch.setattr(speed, "collectives", lambda *arguments: [])
    programs = [SimpleNamespace(module=None, schedule=schedule)] * 2
    still = dataclasses.replace(V6E, hop_seconds=0.0)
    model = speed.waiting_model(programs, 2.0, 4, still)
    assert model.work == pytest.approx(2.0)
    assert model.seconds == pytest.approx(2.0 + 3 * 1.0)


@pytest.mark.parametrize(
    ("peak", "passes"), [(1.0, True), (1.09, True), (1.2, False), (0.0, False)]
)
def test_a_peak_beyond_the_compilers_fails(monkeypatch, peak, passes):
    monkeypatch.setattr(step, "compiled_peak_bytes", lambda compiled: 10**9)
    monkeypatch.setattr(step, "_step_seconds", lambda site, program: 0.5)
    monkeypatch.setattr(step, "_estimates", lambda *arguments: ("1 ms", "2 ms"))
    stats = {"peak_bytes_in_use": int(peak * 10**9 * 0.9), "peak_bytes_reserved": int(peak * 10**8)}
    idle = SimpleNamespace(memory_stats=lambda: None)
    site = fake_site(0.0, devices=(idle, SimpleNamespace(memory_stats=lambda: stats)))
    outcome = step.judge_large(site, [SimpleNamespace(compiled=None)])
    assert (outcome.status is Status.OK) == passes
    assert f"peak {peak:.3f} GB" in outcome.detail


def test_speeds_are_saved_once_all_are_measured(tmp_path):
    path = tmp_path / "factors.json"
    driver = SimpleNamespace(machine=Machine("TPU v6 lite", 4, "0.12", "0.0.52"))
    speeds = command.Speeds(str(path), driver)
    speeds.add({"clock": 2e9})
    assert not path.exists() and "hbm_bytes_a_second not measured" in speeds.text
    speeds.add({"kernel_bundle_seconds": 0.75e-9, "hbm_bytes_a_second": 1.5e12})
    speeds.add({})
    speeds.add({"link_bytes_a_second": 8e10, "hop_seconds": 2e-6})
    record = factors.read(path)["v6e"]
    assert record.speeds() == {
        "clock": 2e9, "kernel_stalls": 1.5, "hbm_bytes_a_second": 1.5e12,
        "link_bytes_a_second": 8e10, "hop_seconds": 2e-6,
    }  # fmt: skip
    assert str(path) in speeds.text and (record.devices, record.libtpu) == (4, "0.0.52")


def test_a_file_of_speeds_that_cannot_be_written_is_a_line_of_the_table(tmp_path):
    driver = SimpleNamespace(machine=Machine("TPU v6 lite", 4, "0.12", "0.0.52"))
    path = tmp_path / "factors.json"
    path.write_text("something else")
    speeds = command.Speeds(str(path), driver)
    speeds.add({"clock": 2e9, "kernel_bundle_seconds": 1e-9, "hbm_bytes_a_second": 1.5e12})
    assert "could not be saved" in speeds.text and path.read_text() == "something else"
    none = command.Speeds("none", driver)
    none.add({"clock": 2e9, "kernel_bundle_seconds": 1e-9, "hbm_bytes_a_second": 1.5e12})
    assert none.text == ""


def test_checks_have_names_of_their_own_and_cover_every_layout():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names) and set(names) >= FRESH
    assert {check.devices for check in CHECKS} == {1, 2, 4}


def flags(**given) -> argparse.Namespace:
    return argparse.Namespace(**{"interpret": False, "compile": "", "devices": 0, **given})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "no TPU on this machine; try --interpret"),
        ({"devices": -1}, "try --devices=1"),
        ({"compile": "v9:1x1"}, "--compile=v9:1x1: needs generation"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(monkeypatch, given, says):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr("training.devices.accelerator", lambda: False)
    with pytest.raises(ValueError, match=says):
        command.mode_of(flags(**given))


@pytest.mark.parametrize("pattern", ["nothing like this", "("])
def test_a_pattern_without_checks_is_refused(pattern):
    with pytest.raises(ValueError, match="--only="):
        command.names_of(pattern)


def test_the_workers_environment_adds_to_the_users(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--theirs")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    found = command.environment_of(command.Mode.DEVICE, "/dump")
    assert found["LIBTPU_INIT_ARGS"].startswith("--theirs --xla_jf_dump_to=/dump ")
    assert found["JAX_PLATFORMS"] == "tpu,cpu"
    assert command.environment_of(command.Mode.INTERPRET, "/dump")["JAX_PLATFORMS"] == "cpu"


def test_outcomes_travel_as_json():
    outcome = Outcome(Status.FAILED, 'a "b"', {"clock": 1.5})
    assert Outcome.from_json(outcome.as_json()) == outcome
    assert json.loads(outcome.as_json())["status"] == "FAILED"
