"""Writers, time accounting and the values computed from a step's metrics."""

import json
import math
import pathlib
import re
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from tests.model_cases import KDA, MIXED
from tests.training.step_numbers import numbers
from training import goodput, metrics, report
from training.descriptions import DESCRIPTIONS
from training.evaluate import gzip_bits_per_byte
from training.goodput import Goodput
from training.metrics import Writers
from training.profiler import Profiler
from training.report import Meter, NonFiniteError, Progress


def scalars(folder, name="learning/loss"):
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(folder, start, steps, value, close=True):
    writers = Writers(str(folder), start, 10)
    for step in steps:
        writers.write(step, {"learning/loss": value})
    if close:
        writers.close()


def test_each_step_stands_once_after_a_kill_and_a_resume(tmp_path):
    """Steps 4 to 6 were written, then lost with the process: the resumed run writes them again."""
    write(tmp_path, 0, range(1, 7), 1.0, close=False)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "learn')
    write(tmp_path, 3, range(4, 9), 2.0)
    expected = [(step, 1.0 if step <= 3 else 2.0) for step in range(1, 9)]
    assert [(line["step"], line["learning/loss"]) for line in lines(tmp_path)] == expected
    assert scalars(tmp_path) == expected


@pytest.mark.parametrize("back", [10, 3 * 3600, 40 * 86400])
def test_a_clock_that_is_set_back_changes_nothing(tmp_path, monkeypatch, back):
    """The second process starts `back` seconds before the first."""
    now = [1.8e9]
    monkeypatch.setattr("time.time", lambda: now[0])
    write(tmp_path, 0, range(1, 7), 1.0)
    now[0] -= back
    write(tmp_path, 3, range(4, 9), 2.0)
    now[0] -= back
    write(tmp_path, 6, range(7, 10), 3.0)
    expected = [(s, 1.0 if s <= 3 else 2.0 if s <= 6 else 3.0) for s in range(1, 10)]
    assert scalars(tmp_path) == expected
    times = [line["time"] for line in lines(tmp_path)]
    assert times == sorted(times) and [line["step"] for line in lines(tmp_path)] == [*range(1, 10)]
    names = sorted(tmp_path.glob("events.*"), key=lambda path: path.stat().st_mtime_ns)
    assert names == sorted(names) and len(names) == 3


def test_two_starts_within_a_second_are_two_files(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1.8e9)
    for start in range(5):
        write(tmp_path, start, [start + 1], float(start))
    assert scalars(tmp_path) == [(n + 1, float(n)) for n in range(5)]
    assert len(list(tmp_path.glob("events.*"))) == 5


def test_tensorboard_shows_descriptions_and_hyperparameters(tmp_path):
    run = tmp_path / "kda_small"
    run.mkdir()
    writers = Writers(str(run), 0, 10)
    options = {"train.steps": 20, "optimizer.name": "muon", "model.carry": True}
    writers.hyperparameters(0, options)
    writers.write(1, {"learning/loss": 1.0, "layer_00/load": 1.0})
    writers.close()
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    assert list(runs.Runs()) == ["kda_small"], "a run is shown by its name"
    metadata = runs.SummaryMetadata("kda_small", "learning/loss")
    assert metadata.summary_description == DESCRIPTIONS["learning/loss"]
    content = runs.SummaryMetadata("kda_small", "_hparams_/session_start_info").plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    assert found["train.steps"].number_value == 20 and found["model.carry"].bool_value is True
    assert found["optimizer.name"].string_value == "muon"


def test_the_docs_list_every_logged_name():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    listed = dict(re.findall(r"^\| `([a-z_]+/[a-zN_]+)` \| (.*) \|$", text, re.M))
    assert listed == DESCRIPTIONS


def test_a_run_that_starts_anew_in_its_folder_leaves_nothing_of_the_old(tmp_path):
    """No checkpoint was saved before the kill: step 0 is where it starts again."""
    write(tmp_path, 0, range(1, 4), 1.0)
    write(tmp_path, 0, range(1, 3), 2.0)
    assert [(line["step"], line["learning/loss"]) for line in lines(tmp_path)] == [(1, 2), (2, 2)]
    assert scalars(tmp_path) == [(1, 2.0), (2, 2.0)]


def test_not_a_number_is_null_in_json(tmp_path):
    write(tmp_path, 0, [1], math.nan)
    assert lines(tmp_path)[0]["learning/loss"] is None
    assert math.isnan(scalars(tmp_path)[0][1])


def test_other_processes_write_nothing(tmp_path):
    writers = Writers(str(tmp_path), 0, 10, primary=False)
    writers.write(1, {"learning/loss": 1.0})
    writers.text(0, "config", "x")
    writers.close()
    assert not list(tmp_path.iterdir())


def test_plain_lines_in_a_log(tmp_path, capsys):
    writers = Writers(str(tmp_path), 0, 10)
    values = {"learning/loss": 1.5, "perf/step_time_seconds": 60.0, "perf/tokens_per_second": 1234}
    writers.write(4, values)
    writers.close()
    shown = capsys.readouterr().out
    assert "step 4/10" in shown and "loss 1.5000" in shown and "1,234 tokens/s" in shown
    assert "left 06:00" in shown


def test_a_bar_on_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(metrics.sys.stderr, "isatty", lambda: True)
    writers = Writers(str(tmp_path), 2, 10)
    writers.write(4, {"learning/loss": 1.5, "perf/tokens_per_second": 1234})
    writers.close()
    shown = capsys.readouterr()
    assert "step 4/10" not in shown.out and "4/10" in shown.err and "loss 1.5000" in shown.err


def test_every_second_has_one_kind(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(goodput.time, "monotonic", lambda: now[0])
    clock = Goodput(age=4.0)
    now[0] += 1
    clock.switch("training")
    now[0] += 10
    with clock.during("evaluation"):
        now[0] += 2
        with clock.during("compilation"):
            now[0] += 3
        now[0] += 4
    now[0] += 5
    assert clock.seconds() == {
        "training": 15.0,
        "compilation": 3.0,
        "data": 0.0,
        "checkpoint": 0.0,
        "evaluation": 6.0,
        "restart": 5.0,
    }
    assert clock.metrics()["goodput/productive_share"] == pytest.approx(15 / 29)
    with pytest.raises(ValueError, match="not one of"):
        clock.switch("idle")


def test_what_a_restart_throws_away_is_restart_time(tmp_path, monkeypatch):
    monkeypatch.setattr(goodput.time, "monotonic", lambda: 0.0)
    path = str(tmp_path / "goodput.json")
    lived = Goodput(path)
    lived.resume({"training": 50.0, "data": 5.0}, {})
    lived.write()
    assert goodput.read(path)["training"] == 50.0
    resumed = Goodput(path)
    resumed.resume({"training": 30.0, "data": 4.0}, goodput.read(path))
    seconds = resumed.seconds()
    assert (seconds["training"], seconds["data"], seconds["restart"]) == (30.0, 4.0, 21.0)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"training": "long"}'])
def test_a_broken_file_of_seconds_is_no_failure(tmp_path, content):
    (tmp_path / "goodput.json").write_text(content)
    assert goodput.read(str(tmp_path / "goodput.json")) == {}


def test_speed_is_of_the_steps_that_were_measured(monkeypatch):
    """Three steps of 2 s, 900 of 1000 tokens real; no step includes the pauses."""
    now = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    meter = Meter(1000, MIXED, None, Progress(), skip_nonfinite=False)
    meter.start()
    for step in (1, 2):
        now[0] += 2
        meter.finish(step, numbers(attended=5e4), 0.5)
    now[0] += 100  # evaluation
    meter.start()
    now[0] += 2
    meter.finish(3, numbers(attended=5e4), 0.2)
    values = meter.report()
    assert values["perf/step_time_seconds"] == 2.0
    assert values["perf/tokens_per_second"] == 450.0
    assert values["perf/padded_tokens_per_second"] == 500.0
    assert values["perf/tokens_per_second_per_device"] == 450.0 / 8
    assert values["perf/data_wait_seconds"] == pytest.approx(0.4)
    # By hand: 2 repeats, 4 heads of 8 channels, forward 4 a key and channel, training three times.
    attention = 3 * 2 * 4 * (4 * 8) * 5e4
    flops = (900 * report.train_flops_per_token(MIXED) + attention) / 2.0 / 8
    assert values["perf/tflops_per_second_per_device"] == pytest.approx(flops / 1e12)
    assert "perf/mfu" not in values and "memory/peak_bytes_per_device" not in values, "a CPU"
    assert values["memory/host_rss_bytes"] > 1e6
    now[0] += 3
    meter.finish(4, numbers(), 0.0)
    assert meter.report()["perf/step_time_seconds"] == 3.0


def test_whatever_a_step_returns_is_reported_as_its_name_says():
    """A mean over the interval; totals, `last` and `max` by the name's last word."""
    progress = Progress(tokens_seen=100)
    meter = Meter(1000, KDA, None, progress, skip_nonfinite=True)
    seen = {"steps_skipped": (0, 1, 1), "loss": (2.0, math.nan, 5.0)}
    for name in ("moe/share", "layer_00/load_max", "moe/load_last", "new"):
        seen[name] = (1.0, 4.0, 2.0)
    for step in range(3):
        meter.finish(step, numbers(**{name: x[step] for name, x in seen.items()}), 0.0)
    found = meter.report()
    assert found["learning/loss"] == 3.5, "of the finite ones"
    assert found["moe/share"] == found["learning/new"] == pytest.approx(7 / 3)
    assert found["layer_00/load_max"] == 4.0 and found["moe/load_last"] == 2.0
    assert found["learning/steps_skipped"] == 1
    assert found["learning/tokens_seen"] == progress.tokens_seen == 100 + 3 * 900
    assert not {"learning/finite", "learning/stop", "learning/attended"} & set(found)
    meter.finish(4, numbers(loss=7.0), 0.0)
    assert meter.report()["learning/loss"] == 7.0, "an interval starts after each report"


def test_a_step_that_is_not_finite_is_an_error_that_names_it():
    meter = Meter(1, KDA, None, Progress(), skip_nonfinite=False)
    with pytest.raises(NonFiniteError, match="step 12: loss nan") as caught:
        meter.finish(12, numbers(loss=math.nan, finite=False), 0.0)
    assert caught.value.step == 12
    skipping = Meter(1, KDA, None, Progress(), skip_nonfinite=True)
    assert skipping.finish(12, numbers(loss=math.nan, finite=False), 0.0)["tokens"] == 900


def test_gzip_is_taken_of_each_row_as_it_goes_on():
    import gzip

    texts = [[b"abc", b"xyz"], [b"def", b""]]
    bits, size = gzip_bits_per_byte(texts)
    assert size == 9 and bits == 8 * len(gzip.compress(b"abcdefxyz", 9)) / 9
    assert gzip_bits_per_byte([[b""]]) == (0.0, 0)


def test_traces_begin_and_end_with_their_steps(tmp_path, monkeypatch):
    calls, said = [], []
    monkeypatch.setattr("jax.profiler.start_trace", lambda *_, **__: calls.append("start"))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    profiler = Profiler(str(tmp_path), 3, 2, said.append)
    traced = []
    for step in range(1, 9):
        profiler.before(step, asked=step == 7)
        if calls and calls[-1] == "start":
            traced.append(step)
        if profiler.ends_with(step):
            profiler.stop()
    assert traced == [3, 4, 7, 8] and calls == ["start", "stop"] * 2 and len(said) == 2


def test_the_clock_is_monotonic_time():
    """Goodput counts real time if nothing is faked."""
    began = time.monotonic()
    clock = Goodput()
    clock.switch("training")
    time.sleep(0.05)
    assert 0.05 <= clock.seconds()["training"] <= time.monotonic() - began
