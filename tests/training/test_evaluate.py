"""Waits and failures of an evaluation; its numbers: test_step.py and whole runs."""

import contextlib

import pytest

from errors import DataError
from training.evaluate import Evaluator


class Documents:
    """Batches that are there only at the third look; then they fail, where they are to."""

    def __init__(self, fails=False):
        self.looks, self.fails = 0, fails

    def ready(self, timeout):
        self.looks += 1
        return self.looks % 3 == 0

    def __iter__(self):
        yield "batch"
        if self.fails:
            raise DataError("a file has changed")


def batches_of(documents, events):
    """What an evaluation reads, without a model."""

    @contextlib.contextmanager
    def waiting():
        events.append("waits")
        yield
        events.append("is there")

    evaluator = Evaluator.__new__(Evaluator)
    evaluator._batches, evaluator._waiting = documents, waiting
    return evaluator._together(lambda: events.append("between"))


def test_a_wait_for_documents_can_be_ended_and_lets_the_step_be_saved():
    events = []
    assert list(batches_of(Documents(), events)) == ["batch"]
    assert events == ["waits", "between", "between", "is there"] * 2


@pytest.mark.parametrize("fails", ["here", "in process 1", "nowhere"])
def test_documents_that_fail_in_one_process_end_the_evaluation_of_all(monkeypatch, fails):
    seen = []

    def process_allgather(value):
        seen.append(bool(value))
        return [bool(value), len(seen) == 2 and fails == "in process 1"]

    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("training.evaluate.multihost_utils.process_allgather", process_allgather)
    batches = batches_of(Documents(fails == "here"), [])
    assert next(batches) == "batch"
    if fails == "nowhere":
        assert list(batches) == []
        return
    says = "a file has changed" if fails == "here" else "process 1 can no longer read its documents"
    with pytest.raises(DataError, match=says):
        next(batches)
