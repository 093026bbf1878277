"""Positions of the loader: what follows a restored position, on any mesh, with any workers."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from data.loader import make_loader
from data.options import DataConfig
from tests.data.loader_cases import ROOT, change, loader, make_config, make_mesh, plain, take


@pytest.fixture
def config(tmp_path) -> DataConfig:
    return make_config(tmp_path)


@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_restored_anywhere_the_same_batches_follow(config, packing):
    """From every position of two epochs, whatever was prefetched; the position is plain JSON."""
    config = change(config, packing=packing, epochs=2, packing_bins=3)
    states, made = [], []
    with loader(change(config, prefetch=5)) as source:
        for batch in source:
            made.append(plain(batch))
            states.append(json.loads(json.dumps(source.state())))
        counts = source.counts()
    assert len(made) > 40
    assert len({json.dumps(batch) for batch in made}) == len(made)
    with loader(change(config, prefetch=1)) as again:
        for place in range(0, len(made), 7):
            assert again.restore(states[place]) == ""
            assert take(again, min(2, len(made) - place - 1)) == made[place + 1 : place + 3]
        again.restore(states[9])
        assert take(again, len(made) - 10) == made[10:]
        assert again.state() == states[-1]
        assert not list(again)
        assert again.counts() == counts


CHILD = """
import json, sys
sys.path.insert(0, {root!r})
if __name__ == "__main__":
    import hashlib, jax, numpy as np
    from jax.sharding import Mesh
    from data.loader import make_loader
    from data.options import DataConfig
    given = json.load(sys.stdin)
    mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1, 1, 1),
                ("data", "fsdp", "expert", "context", "tensor"))
    for options, state, count in given:
        loader = make_loader(DataConfig(**options), split="train", mesh=mesh, seed=7, windows=2,
                             positions=True)
        loader.restore(state)
        digests = []
        for _ in range(count):
            batch = next(loader)
            digests.append(hashlib.sha256(b"".join(
                np.asarray(field).tobytes() for field in batch)).hexdigest())
        print(json.dumps([digests, loader.state()]))
    # Left open: the thread and the workers must not keep the process from ending.
"""


def test_a_new_process_goes_on_with_workers(config):
    """N batches here; n here and N - n in a new process with two workers, which ends normally."""
    given, expected = [], []
    for packing in ("stream", "whole"):
        options = change(config, packing=packing, epochs=3)
        with loader(options, windows=2) as source:
            take(source, 11)
            state = source.state()
            digests = [
                hashlib.sha256(b"".join(np.asarray(f).tobytes() for f in batch)).hexdigest()
                for batch in (next(source) for _ in range(15))
            ]
            expected.append([digests, source.state()])
        # One of them is enough for workers: starting them takes most of this test's time.
        workers = 2 if packing == "stream" else 0
        given.append([change(options, workers=workers).__dict__, state, 15])
    child = subprocess.run(
        [sys.executable, "-c", CHILD.format(root=str(ROOT))],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert child.returncode == 0, child.stderr
    assert [json.loads(line) for line in child.stdout.splitlines()] == expected
    assert "Exception ignored" not in child.stderr


def test_another_sequence_length_goes_on_with_the_same_tokens(config):
    with loader(config) as source:
        take(source, 5)
        state = source.state()
        rest = take(source, 4)
    with loader(change(config, sequence_length=32)) as shorter:
        assert shorter.restore(state) == ""
        halves = take(shorter, 8)
    for row in range(4):
        long = [token for batch in rest for token in batch["tokens"][0][row]]
        assert [token for batch in halves for token in batch["tokens"][0][row]] == long
        assert halves[0]["continues"][0][row] == rest[0]["continues"][0][row]


@pytest.mark.parametrize(
    ("options", "said", "can_go_on"),
    [
        (
            {"global_batch_size": 2},
            "config.data.global_batch_size: the saved data position is for 4, this run has 2",
            True,
        ),
        ({"packing": "whole"}, "config.data.packing", False),
        ({"eval_fraction": 0.5}, "config.data.eval_fraction", True),
        ({"eval_fraction": 0.5, "packing": "whole"}, "config.data.eval_fraction", True),
        ({"tokenizer": "words"}, "config.data.tokenizer", False),
    ],
)
def test_a_position_of_other_data_is_refused(config, options, said, can_go_on):
    """The message offers to continue only if that is possible."""
    with loader(config) as source:
        next(source)
        state = source.state()
    if "tokenizer" in options:
        state["data"]["tokenizer"] = "words"
    given = change(config, **{k: v for k, v in options.items() if k != "tokenizer"})
    other = loader(given)
    with pytest.raises(ValueError) as caught:
        other.restore(state)
    assert str(caught.value).startswith(said)
    assert ("continue" in str(caught.value)) == can_go_on
    assert "set it back" in str(caught.value) and "start in a new --workdir" in str(caught.value)
    assert "\n" not in str(caught.value)
    with contextlib.nullcontext() if can_go_on else pytest.raises(ValueError, match=said):
        assert loader(change(given, on_data_change="continue")).restore(state).startswith(said)
    with pytest.raises(ValueError, match="version 9"):
        other.restore({**state, "version": 9})


def test_another_seed_is_refused(config):
    with loader(config) as source:
        next(source)
        state = source.state()
    with pytest.raises(ValueError, match=r"config\.train\.seed: .* 7, this run has 8"):
        make_loader(config, split="train", mesh=make_mesh(), seed=8).restore(state)


def test_going_on_with_other_rows_loses_nothing(config):
    """Every token of the epoch once, across three numbers of rows and a restart in between."""
    config = change(config, epochs=1, on_data_change="continue")
    with loader(config) as source:
        expected = sum(len(source.sources[0][i].text) + 2 for i in range(len(source.sources[0])))
        made = take(source, 6)
        state = source.state()
    with loader(change(config, global_batch_size=2)) as source:
        line = source.restore(state)
        assert line.startswith(
            "config.data.global_batch_size: the saved data position is for 4, this run has 2"
        )
        assert "reassigned to 2 rows" in line and "\n" not in line
        made += take(source, 5)
        assert not np.any(made[6]["continues"])
        state = source.state()
    with loader(change(config, global_batch_size=2)) as source:
        assert source.restore(state) == ""  # the same rows again: nothing to reassign
        made += take(source, 4)
        state = source.state()
    with loader(change(config, global_batch_size=3)) as source:
        assert source.restore(state)
        made += [plain(batch) for batch in source]
        assert source.counts()["tokens"] == expected
        assert source.counts()["documents"] == len(source.sources[0])
    assert sum(np.count_nonzero(batch["segment_ids"]) for batch in made) == expected
    ends = sum(np.count_nonzero(np.asarray(batch["tokens"]) == 257) for batch in made)
    assert ends == len(source.sources[0])


def test_going_on_with_other_documents_starts_them(config):
    with loader(config) as source:
        take(source, 9)
        state = source.state()
    other = loader(change(config, eval_fraction=0.5, on_data_change="continue"))
    line = other.restore(state)
    assert line.startswith("config.data.eval_fraction: ") and "from their beginning" in line
    fresh = loader(change(config, eval_fraction=0.5))
    assert take(other, 3) == take(fresh, 3)
    assert other.state()["batches"] == 12
