"""Which failures are one line, and whose they are."""

import jax
import pytest

from checkpoints.errors import CheckpointError, one_line
from errors import UserError
from training import failures


def collective_failed():
    raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: Connection reset by peer")


def disk_full():
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("fails", "waits"), [(collective_failed, 1), (disk_full, 0)])
def test_a_save_that_another_process_left_waits_for_the_line_that_names_it(
    monkeypatch, fails, waits
):
    waited = []
    monkeypatch.setattr("training.peers.wait_for_cause", lambda: waited.append(1))
    with pytest.raises(CheckpointError) as caught, one_line("/run: cannot write there", "try"):
        fails()
    assert failures.explain(caught.value) is caught.value
    assert len(waited) == waits


def test_what_all_processes_agreed_on_is_printed_at_once(monkeypatch):
    monkeypatch.setattr("training.peers.wait_for_cause", lambda: pytest.fail("waits"))
    error = UserError("config.train.steps: needs to be equal in all processes")
    assert failures.explain(error) is error
