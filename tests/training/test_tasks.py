"""Training on a mixture of a generated task and text: one run, whatever cuts it up."""

import pytest

from tests.tolerances import RESUMED_ON_ANOTHER_MESH
from tests.trainer import Running, learning, reports, take_port, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROW = 64
FLAGS = [
    "--config.data.mixture=2 ledger; 1 stdlib",
    "--config.data.task_length=256",
    f"--config.data.sequence_length={ROW}",
    "--config.eval.batches=16",
    "--config.train.tbptt_windows=2",
    "--config.train.steps=6",
]
CONTEXT_4 = "--config.mesh.context=4"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six steps on one device."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, *FLAGS)
    return folder


def test_a_resumed_run_has_the_same_losses(whole, tmp_path):
    train(tmp_path, *FLAGS, "--config.train.steps=3")
    done = train(tmp_path, *FLAGS)
    assert "resumed from step 3" in done.stdout
    found = learning(tmp_path)
    assert found[3].pop("eval/loss") > 0, "a run of three steps is evaluated at its end"
    assert found == learning(whole)
    last = reports(tmp_path)[6]
    assert 0 < last["learning/accuracy"] < 1 and 0 < last["eval/accuracy"] < 1
    # A document of text may be longer than the rows so far; of two streams one may be in it.
    assert last["data/share_0"] + last["data/share_1"] == pytest.approx(1)


def test_context_ranks_and_processes_have_the_same_losses(whole, tmp_path):
    one = learning(whole)
    train(tmp_path / "context", *FLAGS, CONTEXT_4)
    address = f"--coordinator=localhost:{take_port()}"
    options = [*FLAGS, CONTEXT_4, address, "--processes=2"]
    both = [Running(tmp_path / "two", *options, f"--process_id={i}") for i in range(2)]
    for process in both:
        process.end(0)
    for folder in ("context", "two"):
        found = learning(tmp_path / folder)
        assert found.keys() == one.keys()
        for step, values in one.items():
            assert found[step] == pytest.approx(values, rel=RESUMED_ON_ANOTHER_MESH), step
