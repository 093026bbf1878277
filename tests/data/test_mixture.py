"""Mixtures: shares of tokens, positions in each source, and what is refused."""

import itertools
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.mixture import Mixture
from data.options import DataConfig, mixture_weights, parts_of
from data.packing import Record
from data.pipeline import Batches, count_batches
from errors import UserError
from tests.data.loader_cases import change, loader, make_mesh, take
from tests.data.memory_source import corpus, naive_stream_rows, tokens_of

LENGTHS = st.lists(st.integers(-1, 30), min_size=1, max_size=6).filter(lambda x: max(x) > 0)


def naive_mixture(streams: list[list[dict[str, int]]], weights: list[float]) -> list[dict]:
    """A stream's tokens: documents in turn, each of the source furthest below its share."""
    documents = []
    for stream in streams:
        begins = [i for i, token in enumerate(stream) if token["positions"] == 0] + [len(stream)]
        documents.append([stream[a:b] for a, b in itertools.pairwise(begins)])
    made, counts, total = [], [0] * len(streams), sum(weights)
    while any(documents):
        left = [number for number, rest in enumerate(documents) if rest]
        behind = {n: weights[n] / total * sum(counts) - counts[n] for n in left}
        most = max(behind.values())
        number = max((n for n in left if behind[n] == most), key=lambda n: (weights[n], -n))
        document = documents[number].pop(0)
        counts[number] += len(document)
        made += document
    return made


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=3),
    weights=st.lists(st.sampled_from([1.0, 2.0, 8.0]), min_size=3, max_size=3),
    rows=st.integers(1, 3),
    length=st.integers(2, 24),
    epochs=st.integers(1, 2),
    data=st.data(),
)
def test_documents_come_in_turn_by_their_shares(lengths, weights, rows, length, epochs, data):
    """All fields against a mixer that goes document by document, and again from any batch on."""
    weights = weights[: len(lengths)]
    corpora = tuple(
        corpus(sizes, rows=rows, sequence_length=length, epochs=epochs, seed=seed)
        for seed, sizes in enumerate(lengths)
    )
    mixture = Mixture(corpora, tuple(weights))
    start = np.asarray([Record().to_ints() * len(lengths)] * rows, np.int64)
    config = DataConfig()
    total = count_batches(mixture, config, start, windows=1, limit=10**6)

    def read(records: np.ndarray, count: int) -> list:
        options = {"rows": list(range(rows)), "windows": 1, "workers": 0, "positions": True}
        made = iter(Batches(mixture, config, records=records, **options))
        return [next(made) for _ in range(count)]

    made = read(start, total + 1)
    assert not made[-1].live and (total == 0 or made[-2].live)
    for row in range(rows):
        streams = [
            tokens_of(
                sizes, [int(d) for e in range(epochs) for d in part.assigner.documents(row, e)]
            )
            for sizes, part in zip(lengths, corpora)
        ]
        expected = naive_stream_rows(naive_mixture(streams, weights), length)
        found = [
            {name: field[0, row].tolist() for name, field in batch.batch._asdict().items()}
            for batch in made
        ]
        assert found[: len(expected)] == expected
        assert not any(any(batch["segment_ids"]) for batch in found[len(expected) :])
    cut = data.draw(st.integers(0, total), label="cut")
    again = read(made[cut].records, total - cut)
    for one, other in zip(again, made[cut + 1 :], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one.batch, other.batch))
        assert np.array_equal(one.records, other.records)


@pytest.fixture
def config(tmp_path) -> DataConfig:
    """Texts of one letter a source; the second one's completions alone count."""
    (tmp_path / "plain texts").mkdir()
    for number in range(30):
        (tmp_path / "plain texts" / f"{number}.txt").write_text("p" * (10 + number))
    pairs = [json.dumps({"prompt": "q" * 9, "completion": "c" * n}) for n in range(1, 30)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs))
    return DataConfig(
        mixture=f"3 text {tmp_path}/plain texts; 1 jsonl {tmp_path}/pairs.jsonl;2 ledger",
        loss_on="completion",
        task_length=256,
        sequence_length=64,
        global_batch_size=4,
        eval_fraction=0.2,
    )


def test_parts_have_their_own_options(config):
    assert mixture_weights(config) == (3.0, 1.0, 2.0)
    assert [part.source for part in parts_of(config)] == ["text", "jsonl", "ledger"]
    assert parts_of(config)[0].path.endswith("plain texts")
    assert [part.loss_on for part in parts_of(config)] == ["text", "completion", "text"]


def test_shares_are_logged_and_met(config):
    with loader(config) as mixed:
        batches = take(mixed, 60)
        values = mixed.progress()
    shares = [values[f"data/share_{number}"] for number in range(3)]
    # 4 streams of 3,840 tokens, exact to a document of 256 tokens each.
    np.testing.assert_allclose(shares, [3 / 6, 1 / 6, 2 / 6], atol=256 / 3840)
    assert values["data/epoch_0"] > 3 > 1 > values["data/epoch_2"] > 0
    tokens = np.asarray([batch["tokens"] for batch in batches])
    weights = np.asarray([batch["loss_weights"] for batch in batches])
    targets = np.asarray([batch["targets"] for batch in batches])
    letters = (tokens == ord("p")).sum() / tokens.size
    assert abs(letters - 3 / 6) < 0.06
    assert not weights[(targets == ord("q")) & (tokens == ord("q"))].any()
    counted = weights[(targets == ord("c")) & (tokens == ord("c"))]
    assert counted.size > 500 and counted.mean() == 1


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_position_is_exact(config, workers):
    """The batches after it, on another mesh and with other workers too."""
    with loader(config, windows=2) as mixed:
        take(mixed, 3)
        position = json.loads(json.dumps(mixed.state()))
        expected = take(mixed, 4)
    mesh = make_mesh(data=2, context=4)
    with loader(change(config, workers=workers), mesh=mesh, windows=2) as mixed:
        assert mixed.restore(position) == ""
        assert take(mixed, 4) == expected


def test_evaluation_reads_every_source_once(config):
    with loader(change(config, task_documents=20), "eval") as mixed:
        first, again = ([jax.device_get(batch.tokens) for batch in mixed] for _ in range(2))
        expected = sum(len(source) for source in mixed.sources)
        assert mixed.counts()["documents"] == expected
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_other_weights_or_sources_are_other_data(config):
    with loader(config) as mixed:
        take(mixed, 2)
        position = mixed.state()
    for mixture in (config.mixture.replace("3 text", "4 text"), config.mixture + ";1 stack"):
        with (
            loader(change(config, mixture=mixture)) as other,
            pytest.raises(UserError, match=r"config.data.mixture: the saved data position"),
        ):
            other.restore(position)
        allowed = change(config, mixture=mixture, on_data_change="continue")
        with loader(allowed) as other:
            assert "from their beginning" in other.restore(position)
            next(other)
    with (
        loader(change(config, global_batch_size=2, on_data_change="continue")) as other,
        pytest.raises(UserError, match="a mixture cannot continue with other rows"),
    ):
        other.restore(position)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mixture": "text a; 1 text b"}, r"config.data.mixture=.*weight source path"),
        ({"mixture": "0 text a; 1 text b"}, r"config.data.mixture=.*above 0"),
        ({"mixture": "1 texts a"}, r"config.data.mixture=.*one of stdlib"),
        ({"mixture": "1 text"}, r"config.data.path='': needs the path"),
        ({"path": "x"}, r"config.data.path='x': needs to be empty"),
        ({"packing": "whole"}, r"config.data.packing='whole': needs 'stream'"),
    ],
)
def test_mistakes_are_refused(config, options, said):
    with pytest.raises(UserError, match=said):
        loader(change(config, **options))
