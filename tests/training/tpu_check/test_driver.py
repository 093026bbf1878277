"""Checks in a worker process: crashes, hangs and Ctrl-C end one check, and the table says so."""

import os
import signal
import sys
import threading
import time

import pytest

from training.tpu_check.driver import Driver, Gone, Limits, Worker, run_all
from training.tpu_check.outcome import Machine, Outcome, Status
from training.tpu_check.table import Row, exit_code, table
from training.tpu_check.worker import MARK

# A worker whose checks are words: what it should do. It notes its process in `starts`.
FAKE = f"""
import json, os, signal, sys, time
open("starts", "a").write(f"{{os.getpid()}}\\n")
print("a line of a library")
print('{MARK}{{"device_kind": "TPU v6 lite", "devices": 4}}', flush=True)
for line in sys.stdin:
    word = line.strip()
    if word == "crash":
        print("the device is halted", file=sys.stderr, flush=True)
        os._exit(3)
    if word == "abort":
        os.kill(os.getpid(), signal.SIGABRT)
    if word == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    status = "FAILED" if word == "broken" else "ok"
    record = {{"status": status, "detail": word, "speeds": {{}}}}
    print("{MARK}" + json.dumps(record), flush=True)
"""


def make_driver(tmp_path, program: str = FAKE, check: float = 2.0) -> Driver:
    def start() -> Worker:
        return Worker([sys.executable, "-c", program], os.environ, tmp_path / "log", tmp_path)

    return Driver(start, Limits(start=60.0, check=check), lambda line: None)


def starts(tmp_path) -> list[int]:
    return [int(line) for line in (tmp_path / "starts").read_text().split()]


def gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_check_that_crashes_or_hangs_does_not_end_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr("training.tpu_check.driver.PATIENCE", 0.2)
    names = ["one", "crash", "two", "abort", "hang", "broken", "three"]
    reported: list[Row] = []
    rows, stopped = run_all(make_driver(tmp_path), names, {"three"}, reported.append)
    found = {row.name: (row.outcome.status, row.outcome.detail) for row in rows}
    assert not stopped and rows == reported and list(found) == names
    assert [found[name] for name in ("one", "two", "three")] == [
        (Status.OK, name) for name in ("one", "two", "three")
    ]
    assert found["broken"] == (Status.FAILED, "broken")
    assert found["crash"] == (Status.ERROR, "the process ended (code 3): the device is halted")
    assert "SIGABRT" in found["abort"][1]
    assert found["hang"][1] == "no answer within 2 s; the process was ended"
    processes = starts(tmp_path)
    assert len(processes) == 5  # the first, one after each that went, and a new one for "three"
    assert all(map(gone, processes))
    assert exit_code(rows) == 1


def test_ctrl_c_ends_with_what_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr("training.tpu_check.driver.PATIENCE", 0.2)

    def interrupt(row: Row) -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    began = time.monotonic()
    driver = make_driver(tmp_path, check=300.0)
    rows, stopped = run_all(driver, ["one", "hang", "two"], set(), interrupt)
    assert stopped and time.monotonic() - began < 60
    assert [row.outcome.status for row in rows] == [Status.OK, Status.NOT_RUN, Status.NOT_RUN]
    assert exit_code(rows) == 1
    assert all(map(gone, starts(tmp_path)))


def test_a_machine_without_devices_is_an_error_of_every_check(tmp_path):
    program = f"""print('{MARK}{{"error": "no TPU of a known generation"}}', flush=True)"""
    driver = make_driver(tmp_path, program)
    with pytest.raises(Gone, match="no TPU"):
        driver.open()
    rows, _ = run_all(driver, ["one", "two"], set(), lambda row: None)
    assert [row.outcome.detail for row in rows] == ["no TPU of a known generation"] * 2


def test_the_table_is_markdown_with_one_line_a_check():
    rows = [
        Row("KDA dense", Outcome(Status.OK, "out 1e-3 of 5e-3"), 12.34),
        Row("attention", Outcome(Status.FAILED, "a | b"), 1.0),
        Row("links", Outcome(Status.SKIPPED, "needs 2 devices"), 0.0),
    ]
    machine = Machine("TPU v6 lite", 1, "0.12", "0.0.52")
    text = table(machine, rows, "full sizes", "2026-12-01", "Speeds are saved.")
    lines = text.splitlines()
    assert "1 x TPU v6 lite, jax 0.12, libtpu 0.0.52" in lines[0]
    assert "1 of 3 passed, 1 did not" in lines[0] and lines[0].endswith("Speeds are saved.")
    assert lines[4] == "| KDA dense | ok | out 1e-3 of 5e-3 | 12.3 |"
    assert lines[5] == "| attention | **FAILED** | a / b | 1.0 |"
    assert {line.count("|") for line in lines[2:]} == {5}


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (Status.OK, 0),
        (Status.SKIPPED, 0),
        (Status.FAILED, 1),
        (Status.ERROR, 1),
        (Status.NOT_RUN, 1),
    ],
)
def test_the_exit_code_says_whether_all_passed(status, code):
    rows = [Row("a", Outcome(Status.OK, ""), 0.0), Row("b", Outcome(status, ""), 0.0)]
    assert exit_code(rows) == code
