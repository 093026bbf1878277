"""Measured speeds: written, read again, and used by a plan."""

import dataclasses
import json
import pathlib

import pytest

from errors import UserError
from training.estimate import factors
from training.estimate.factors import Factors
from training.estimate.hlo import Computation, Instruction
from training.estimate.plan import assumptions
from training.estimate.program import Visit, Work
from training.estimate.timeline import seconds_of
from training.estimate.topology import GENERATIONS, Topology

V6E = Factors("TPU v6 lite", 4, "2026-12-01", "0.0.52", 2e9, 1.5, 1.5e12, 8e10, 2e-6)


def test_what_is_written_is_read_and_other_generations_stay(tmp_path):
    path = tmp_path / "deep" / "factors.json"
    alone = dataclasses.replace(V6E, devices=1, link_bytes_a_second=None, hop_seconds=None)
    factors.write(path, "v6e", V6E)
    factors.write(path, "v5e", alone)
    newer = dataclasses.replace(V6E, date="2026-12-02")
    factors.write(path, "v6e", newer)
    assert factors.read(path) == {"v6e": newer, "v5e": alone}


def test_a_plan_uses_the_speeds_of_its_generation_and_says_so(tmp_path):
    path = tmp_path / "factors.json"
    factors.write(path, "v6e", dataclasses.replace(V6E, link_bytes_a_second=None))
    built_in = GENERATIONS["v6e"]
    found = factors.calibrated(Topology.parse("v6e:2x2"), path).generation
    assert (found.clock, found.kernel_stalls, found.hop_seconds) == (2e9, 1.5, 2e-6)
    assert found.link_bytes_a_second == built_in.link_bytes_a_second
    assert found.hbm_bytes == built_in.hbm_bytes
    text = "\n".join(assumptions(found))
    assert "measured 2026-12-01 on 4 x TPU v6 lite, libtpu 0.0.52" in text and str(path) in text
    kernel = Instruction(name="k", opcode="custom-call", outputs=(), operands=(),
                         attributes='custom_call_target="tpu_custom_call"')  # fmt: skip
    work = Work(Visit(kernel, Computation("c", (kernel,), "k"), 1, ()), 1000, 0)
    assert seconds_of(work, found) == pytest.approx(1000 * 1.5 / 2e9)
    assert seconds_of(work, built_in) == pytest.approx(1000 * 1.85 / built_in.clock)


def test_without_measured_speeds_the_built_in_ones_are_named(tmp_path):
    path = tmp_path / "factors.json"
    factors.write(path, "v5e", V6E)
    topology = Topology.parse("v6e:2x2")
    assert factors.calibrated(topology, path) == factors.calibrated(topology, None) == topology
    assert "built in" in assumptions(topology.generation)[0]


def test_the_place_is_the_users_or_the_options(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    place = tmp_path / "kda-trainer" / "tpu_factors.json"
    assert factors.default_path() == place
    assert factors.chosen("") is None
    factors.write(place, "v6e", V6E)
    assert factors.chosen("") == place
    assert factors.chosen("none") is None
    assert factors.chosen("x.json") == pathlib.Path("x.json")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert factors.default_path() == pathlib.Path.home() / ".config/kda-trainer/tpu_factors.json"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]",
        '{"v6e": {}}',
        json.dumps({"v6e": dataclasses.asdict(V6E) | {"clock": -1.0}}),
        json.dumps({"v6e": dataclasses.asdict(V6E) | {"kernel_stalls": "2"}}),
    ],
    ids=["absent", "empty", "a list", "no fields", "negative", "a text"],
)
def test_a_file_that_holds_something_else_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "factors.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=r"try --plan_factors=none$") as error:
        factors.read(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("TPU7x", "tpu7x")],
)
def test_generations_are_known_by_jaxs_names(kind, name):
    assert factors.generation_of(kind) == GENERATIONS[name]
    assert factors.generation_of("cpu") is None
