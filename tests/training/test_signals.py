"""Signals, except for what needs whole runs: see test_train.py."""

import signal
import threading

import pytest

from training import signals as signals_module
from training.signals import Signals, Wait


@pytest.mark.parametrize(
    ("told", "wait", "code"),
    [
        (100.0, Wait("while starting", 0.0, 0, since=50.0), 0),
        (100.0, Wait("while waiting", 8.0, 1, since=99.0), None),  # 108 s is not over
        (100.0, Wait("while waiting", 8.0, 1, since=90.0), None),
        (95.0, Wait("while waiting", 8.0, 1, since=90.0), 1),
        (20.0, Wait("while waiting", 8.0, 1, since=99.0), None),  # it has only just begun
        (20.0, None, None),
        (None, Wait("while waiting", 0.0, 1, since=90.0), None),
    ],
)
def test_a_wait_ends_so_long_after_the_request_and_its_own_beginning(
    monkeypatch, capsys, told, wait, code
):
    ended = []
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr(signals_module.time, "monotonic", lambda: 105.0)
    signals = Signals.__new__(Signals)  # without handlers, which would be pytest's as well
    signals._wait, signals._stop, signals._told = wait, told and signal.SIGTERM, told or 0.0
    signals._end_wait()
    assert ended == ([] if code is None else [code])
    assert capsys.readouterr().err.count("\n") == len(ended)


def test_a_wait_inside_another_one_leaves_it_as_it_was():
    """As a save does that is made while an evaluation waits for documents."""
    signals = Signals.__new__(Signals)
    signals._wait = None
    with signals.waiting("outer", 8.0):
        outer = signals._wait
        with signals.waiting("inner", 3.0):
            assert signals._wait.what == "inner"
        assert signals._wait is outer
    assert signals._wait is None


class AskedMeanwhile(threading.Event):
    """Set by another thread as soon as it was looked at."""

    def is_set(self):
        was = super().is_set()
        self.set()
        return was


def test_a_profile_that_is_asked_for_while_one_looks_is_not_forgotten():
    signals = Signals.__new__(Signals)
    signals._profile = AskedMeanwhile()
    assert [signals.take_profile() for _ in range(2)] == [False, True]
