"""The loader: placement on the mesh, end of data, saving, resuming, several processes."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from jax.sharding import PartitionSpec

from data import stream
from data.documents import DocumentSource
from data.loader import make_loader
from data.options import DataConfig
from data.packing import Record
from data.pipeline import Batches
from data.readers import reader
from errors import DataError
from tests.data.loader_cases import ROOT, change, loader, make_config, make_mesh, plain, take


@pytest.fixture
def config(tmp_path) -> DataConfig:
    return make_config(tmp_path)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 4), (2, 2, 2), (1, 1, 4)])
@pytest.mark.parametrize("windows", [1, 3])
def test_batches_lie_on_the_mesh(config, shape, windows):
    """Sharded as documented, and on every mesh equal to the host's own rows."""
    mesh = make_mesh(*shape)
    with loader(config, mesh=mesh, windows=windows) as placed:
        mixture = placed._mixture
        start = np.asarray([Record().to_ints()] * 4)
        made = iter(
            Batches(
                mixture,
                config,
                rows=list(range(4)),
                records=start,
                windows=windows,
                workers=0,
                positions=True,
            )
        )
        for _ in range(3):
            batch, expected = next(placed), next(made).batch
            assert plain(batch) == plain(expected)
            for name, field in batch._asdict().items():
                spec = PartitionSpec(None, ("data", "fsdp", "expert"), "context")
                if name == "continues":
                    spec = PartitionSpec(None, ("data", "fsdp", "expert"))
                else:
                    assert field.shape == (windows, 4, 64)
                assert field.sharding.spec == spec
                assert field.sharding.mesh == mesh


def test_positions_are_made_only_when_asked_for(config):
    with loader(config, positions=False) as source, loader(config) as other:
        batch, full = next(source), next(other)
    assert batch.positions is None
    assert plain(batch) == {k: v for k, v in plain(full).items() if k != "positions"}


def test_targets_cross_ranks_and_rows(config):
    """The last token of a rank or row predicts the next token, wherever that is."""
    with loader(config, mesh=make_mesh(context=4)) as placed:
        first, second = take(placed, 2)
    crossing = 0
    for row in range(4):
        tokens = first["tokens"][0][row] + second["tokens"][0][row]
        targets = first["targets"][0][row] + second["targets"][0][row]
        weights = first["loss_weights"][0][row] + second["loss_weights"][0][row]
        for place in (15, 31, 47, 63):
            if tokens[place] != 257:
                assert (targets[place], weights[place]) == (tokens[place + 1], 1.0)
                crossing += 1
            else:
                assert (targets[place], weights[place]) == (0, 0.0)
    assert crossing > 8


@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_rows_of_a_single_text_file_differ(tmp_path, packing):
    """Rows read different parts: no line is read twice within an epoch."""
    file = tmp_path / "input.txt"
    text = b"".join(b"%07d\n" % number for number in range(64_000))
    file.write_bytes(text)
    options = DataConfig(
        source="text", path=str(file), eval_path=str(file), global_batch_size=4, sequence_length=512
    )
    with loader(change(options, packing=packing)) as source:
        made = [np.asarray(next(source).tokens)[0] for _ in range(100)]
    for rows in made:
        assert len({row.tobytes() for row in rows}) == 4
    # The lines that lie whole in a row of a batch, which tells them apart in either packing.
    parts = [bytes(row[row < 256].astype(np.uint8)).split(b"\n") for rows in made for row in rows]
    lines = [line for part in parts for line in part[1:-1] if len(line) == 7]
    assert len(lines) > 20_000
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_fewer_documents_than_rows_are_refused(tmp_path, count, shards):
    """In endless training, because all rows would read the same text."""
    lines = [json.dumps({"text": f"{number} document "}) for number in range(count)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    options = DataConfig(
        source="jsonl",
        path=str(tmp_path / "a.jsonl"),
        eval_path=str(tmp_path / "a.jsonl"),
        sequence_length=8,
        global_batch_size=4,
    )
    mesh = make_mesh(data=shards)
    if count == 4:
        with loader(options, mesh=mesh) as source:
            assert len({tuple(row) for row in take(source, 1)[0]["tokens"][0]}) == 4
        return
    with pytest.raises(ValueError) as caught:
        loader(options, mesh=mesh)
    fewer = count // shards * shards
    assert str(caught.value) == (
        "config.data.global_batch_size=4: needs at least as many training documents, or rows would "
        f"read the same text at the same steps; there {'are 3' if count == 3 else 'is 1'}; "
        + (f"try --config.data.global_batch_size={fewer}, or " if fewer else "")
        + f"cut {'them' if count == 3 else 'it'} into more documents"
    )
    for made in (loader(change(options, epochs=1), mesh=mesh), loader(options, "eval", mesh=mesh)):
        tokens = [np.count_nonzero(batch.segment_ids) for batch in made]
        assert sum(tokens) == count * (len("0 document ") + 2)
    if fewer:
        loader(change(options, global_batch_size=fewer), mesh=mesh).close()


def test_empty_documents_do_not_count_for_rows(config):
    for file in sorted(Path(config.path).iterdir())[2:]:
        file.write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"there are 2; try --config\.data\.global_batch_size=2, or cut"
    ):
        loader(change(config, eval_path=config.path))


def test_evaluation_is_the_same_every_time(config):
    config = change(config, packing="stream")
    source = loader(config, "eval")
    first = [plain(batch) for batch in source]
    assert [plain(batch) for batch in source] == first
    interrupted = iter(source)
    next(interrupted)
    assert [plain(batch) for batch in source] == first
    other_seed = make_loader(
        config, split="eval", mesh=make_mesh(context=2), seed=1, positions=True
    )
    assert [plain(batch) for batch in other_seed] == first
    limited = loader(config, "eval", max_batches=2)
    assert [plain(batch) for batch in limited] == first[:2]
    held_out = sum(len(source.sources[0][i].text) + 2 for i in range(len(source.sources[0])))
    assert sum(np.count_nonzero(batch["segment_ids"]) for batch in first) == held_out
    assert np.any(np.asarray(first[-1]["segment_ids"])[..., -1] == 0)
    for batch in first:
        padded = np.asarray(batch["segment_ids"]) == 0
        for name in ("tokens", "targets", "positions", "loss_weights", "target_bytes"):
            assert not np.asarray(batch[name])[padded].any()


def test_looking_ahead_moves_nothing(config):
    """The position, the batches and the end are those of a loader without the calls."""
    asked, other = (loader(change(config, epochs=1)) for _ in range(2))
    batches = 0
    for batch in other:
        before = asked.state()
        assert asked.has_more() and asked.has_more() and asked.state() == before
        np.testing.assert_array_equal(next(asked).tokens, batch.tokens)
        assert asked.state() == other.state()
        batches += 1
    assert batches > 3 and not asked.has_more() and not asked.has_more()
    with pytest.raises(StopIteration):
        next(asked)
    assert asked.state() == other.state()


def test_evaluation_of_an_end_read_in_parts_is_that_of_one_read_whole(tmp_path, monkeypatch):
    """Batch by batch, also after a restore, across cuts at lines and inside lines."""
    monkeypatch.setattr(stream, "SPAN_BYTES", 100)
    text = "".join("漢字 " * (i % 60) + "\n" for i in range(200)).encode()
    (tmp_path / "book.txt").write_bytes(text)
    config = DataConfig(source="text", path=str(tmp_path), eval_fraction=0.5, sequence_length=64)
    made = []
    for mapped in (len(text), 1000):
        monkeypatch.setattr(reader, "LONG_BYTES", mapped)
        with loader(config, "eval") as source:
            assert isinstance(
                source.sources[0][0].text, bytes if mapped == len(text) else reader.FileText
            )
            made.append([[plain(batch), source.state()] for batch in source])
            source.restore(made[0][20][1])
            assert take(source, 3) == [batch for batch, _ in made[0][21:24]]
    assert made[0] == made[1]


def test_training_ends_with_its_epochs(config):
    """All tokens of two epochs, then the end, repeatedly; without epochs there is no end."""
    source = loader(change(config, epochs=2))
    tokens = sum(int(np.count_nonzero(batch.segment_ids)) for batch in source)
    assert tokens == 2 * sum(
        len(source.sources[0][i].text) + 2 for i in range(len(source.sources[0]))
    )
    with pytest.raises(StopIteration):
        next(source)
    with loader(config) as endless:
        passed = 0
        while passed < 3 * tokens:
            passed += int(np.count_nonzero(next(endless).segment_ids))
        assert endless.counts()["padding"] == 0


def test_what_was_met_is_counted(tmp_path):
    contents = [b"x", b"", b"\xff\xfe!", b"long " * 40, b"fine", b"y", b"caf\xe9", b""]
    for number, text in enumerate(contents):
        (tmp_path / f"{number}.txt").write_bytes(text)
    options = DataConfig(
        source="text",
        path=str(tmp_path),
        eval_path=str(tmp_path),
        sequence_length=32,
        global_batch_size=2,
        epochs=1,
    )
    for packing in ("stream", "whole"):
        source = loader(change(options, packing=packing))
        places = sum(batch.tokens.size for batch in source)
        counts = source.counts()
        tokens = sum(len(text) + 2 for text in contents if text)
        assert counts == {
            "documents": 6,
            "empty": 2,
            "broken": 0,
            "invalid_utf8": 2,
            "one_byte": 2,
            "longer_than_row": 1,
            "tokens": tokens,
            "padding": places - tokens,
        }
        line = source.summary()
        assert "6 documents" in line and "2 empty" in line and "\n" not in line


@pytest.mark.parametrize(("broken", "announced"), [(0, 0), (1, 0), (20, 1), (150, 1)])
def test_many_broken_documents_are_reported_when_first_seen(tmp_path, broken, announced):
    good = [json.dumps({"text": f"document {i}"}) for i in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(good + ['{"text": null}'] * broken))
    path = str(tmp_path / "a.jsonl")
    config = DataConfig(source="jsonl", path=path, eval_path=path, sequence_length=32, epochs=2)
    lines: list[str] = []
    with loader(config, log=lines.append) as source:
        made = sum(1 for _ in itertools.takewhile(lambda _: not lines, source))
        assert len(lines) == announced
        made += sum(1 for _ in source)
        assert source.counts()["broken"] == 2 * broken and made > 50
    assert len(lines) == announced
    for line in lines:
        assert "documents so far are broken or null and skipped" in line and path in line


def test_the_epoch_is_counted(config):
    with loader(change(config, epochs=2)) as source:
        assert source.progress() == {"learning/epoch": 0}
        epochs = [source.progress()["learning/epoch"] for _ in source]
    assert epochs == sorted(epochs)
    assert source.progress() == {"learning/epoch": 2}


def test_a_wait_for_data_has_a_limit(config, monkeypatch):
    """`ready` waits no longer than its limit; after that nothing else waits."""
    read, gate = DocumentSource.__getitem__, threading.Event()
    monkeypatch.setattr(
        DocumentSource, "__getitem__", lambda self, i: gate.wait() and read(self, i)
    )
    with loader(change(config, epochs=1)) as source:
        began = time.monotonic()
        assert not source.ready(0.2) and not source.ready(0.0)
        assert 0.2 <= time.monotonic() - began < 5
        gate.set()
        batches = 0
        while source.ready(60) and source.has_more():
            next(source)
            batches += 1
        assert batches > 3 and source.ready(0.0) and not source.has_more()


@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_what_comes_after_the_last_full_row_is_counted(tmp_path, packing):
    (tmp_path / "1.txt").write_bytes(b"x" * 30)  # with its begin and end a row to the full
    (tmp_path / "2.txt").write_bytes(b"")
    options = DataConfig(
        source="text",
        path=str(tmp_path),
        eval_path=str(tmp_path),
        sequence_length=32,
        global_batch_size=1,
        packing=packing,
    )
    source = loader(options, "eval")
    assert len(list(source)) == 1
    counts = source.counts()
    assert (counts["documents"], counts["empty"], counts["padding"]) == (1, 1, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_reading_reaches_the_caller(config, workers):
    """With one line, at the batch that needs the file; another call neither hangs nor skips."""
    with loader(change(config, workers=workers)) as source:
        before = take(source, 1)
        for file in Path(config.path).iterdir():
            file.rename(file.with_suffix(".gone"))
        with pytest.raises(DataError, match=r"config\.data\.path: .* can no longer be read"):
            take(source, 100)
        if workers:
            return  # what follows is the same, and starting workers takes seconds
        with pytest.raises(DataError, match=r"config\.data\.path"):
            take(source, 100)
        state = source.state()
        for file in Path(config.path).iterdir():
            file.rename(file.with_suffix(".txt"))
        after = take(source, 30)
    with loader(config) as whole:
        whole.restore(state)
        assert take(whole, 30) == after
        assert before[0] not in after


GROUP = """
import sys
sys.path.insert(0, {root!r})
if __name__ == "__main__":
    import json, signal
    from tests.data.loader_cases import DataConfig, make_loader, make_mesh
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: None)
    options = DataConfig(**json.loads(sys.argv[1]))
    loader = make_loader(options, split="train", mesh=make_mesh(), seed=7)
    loader.start()
    while True:
        print("on", flush=True)
        sys.stdin.readline()
        for _ in range(50):
            next(loader)
"""


def test_signals_to_the_group_are_the_parents_and_workers_end_with_it(config):
    """From Slurm, systemd or a terminal, while workers start and later. A kill leaves none."""
    options = json.dumps(change(config, workers=2).__dict__)
    parent = subprocess.Popen(
        [sys.executable, "-c", GROUP.format(root=str(ROOT)), options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert parent.stdin and parent.stdout
    # Workers that die while they start are waited for without end.
    watchdog = threading.Timer(300, parent.kill)
    watchdog.start()
    try:
        for wait in (0.3, 0, 0):
            assert parent.stdout.readline() == "on\n"
            time.sleep(wait)
            helpers = psutil.Process(parent.pid).children()
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
                os.killpg(parent.pid, number)
            parent.stdin.write("go on\n")
            parent.stdin.flush()
        assert parent.stdout.readline() == "on\n"
        assert len(helpers) == 3  # with multiprocessing's, which clears up
        assert [helper.is_running() for helper in helpers] == [True] * 3
        parent.kill()
        assert not psutil.wait_procs(helpers, timeout=120)[1]
    finally:
        watchdog.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()


def test_a_loader_can_start_ahead(config, monkeypatch):
    """It reads before a batch is requested, and a position restored after that takes effect."""
    read, reads = DocumentSource.__getitem__, []
    monkeypatch.setattr(
        DocumentSource, "__getitem__", lambda self, i: reads.append(i) or read(self, i)
    )
    with loader(config) as source:
        assert not reads
        source.start()
        deadline = time.monotonic() + 30
        while not reads:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        made = take(source, 5)
        state = source.state()
        rest = take(source, 2)
    with loader(config) as again:
        again.start()
        assert take(again, 3) == made[:3]
        again.restore(state)
        again.start()
        assert take(again, 2) == rest


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        (
            (2, 2, 1),
            {"global_batch_size": 6},
            "config.data.global_batch_size=6: needs a multiple of mesh.data * fsdp * expert",
        ),
        ((1, 1, 4), {"sequence_length": 66}, "config.data.sequence_length=66: needs a multiple of"),
        ((2, 1, 1), {"global_batch_size": 1}, "= 2, such as 2"),
        ((1, 1, 1), {"path": "/nowhere"}, "config.data.path='/nowhere': no such file"),
        ((1, 1, 1), {"tokenizer": "/nowhere.json"}, "config.data.tokenizer='/nowhere.json'"),
    ],
)
def test_errors_come_when_the_loader_is_made(config, shape, options, said):
    with pytest.raises(ValueError) as caught:
        loader(change(config, **options), mesh=make_mesh(*shape))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_importing_starts_nothing():
    """Options and Batch need neither JAX nor grain; the loader starts no backend."""
    code = """
import sys
import data.batch, data.options
assert not {"jax", "grain", "pyarrow"} & set(sys.modules)
import data.loader
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert not {"pyarrow.parquet", "tokenizers", "sentencepiece"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)
