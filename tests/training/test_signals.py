"""Signals, but for what only whole runs show: test_train.py."""

import threading

from training.signals import Signals


class AskedMeanwhile(threading.Event):
    """Set by another thread as soon as it was looked at."""

    def is_set(self):
        was = super().is_set()
        self.set()
        return was


def test_a_profile_that_is_asked_for_while_one_looks_is_not_forgotten():
    signals = Signals.__new__(Signals)  # without handlers, which would be pytest's as well
    signals._profile = AskedMeanwhile()
    assert [signals.take_profile() for _ in range(2)] == [False, True]
