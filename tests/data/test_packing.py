"""Packing and assignment: every token once, in order, with the right flags."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import assignment, stream
from data.assignment import DocumentAssigner, SavedAssignment
from data.mixture import Mixture
from data.options import DataConfig
from data.packing import Record
from data.pipeline import Batches, HostBatch, count_batches, shared_out
from data.readers.reader import Document
from data.stream import Corpus, Counts, StreamReader
from data.tokenizer import ByteTokenizer
from errors import DataError
from tests.data.memory_source import EOS, FIRST, corpus, naive_row, naive_stream_rows, tokens_of

# Lengths in words: empty, broken (-1), one word, around a row's length and far beyond it.
LENGTHS = st.lists(st.integers(-1, 40), min_size=1, max_size=12).filter(lambda x: max(x) > 0)


def make(shared: Corpus, packing="stream", *, rows, records, windows=1, bins=3) -> list[HostBatch]:
    """Returns the batches of some rows up to the first without a token."""
    config = DataConfig(packing=packing, packing_bins=bins)
    made = []
    for batch in Batches(
        Mixture((shared,)),
        config,
        rows=rows,
        records=records,
        windows=windows,
        workers=0,
        positions=True,
    ):
        if not batch.live:
            return made
        made.append(batch)
    raise AssertionError("unreachable: the dataset is endless")


def start(rows: int) -> np.ndarray:
    return np.asarray([Record().to_ints()] * rows, np.int64)


def assigned(shared: Corpus, row: int, epochs: int) -> list[int]:
    """Returns the documents of a stream over all epochs."""
    return [int(d) for epoch in range(epochs) for d in shared.assigner.documents(row, epoch)]


def rows_of(made: list[HostBatch], row: int) -> list[dict[str, list]]:
    """Returns a stream's rows, in order, as the oracle writes them."""
    return [
        {name: field[window, row].tolist() for name, field in part.batch._asdict().items()}
        for part in made
        for window in range(part.batch.tokens.shape[0])
    ]


@settings(max_examples=120, deadline=None)
@given(
    lengths=LENGTHS,
    hosts=st.integers(1, 3),
    rows_a_host=st.integers(1, 3),
    length=st.integers(2, 24),
    epochs=st.integers(1, 3),
    windows=st.integers(1, 3),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_streams_hold_every_token_once_in_order(
    lengths, hosts, rows_a_host, length, epochs, windows, seed, data
):
    """All fields against a token-by-token packer, over hosts, epochs and a restart."""
    rows = hosts * rows_a_host
    shared = corpus(lengths, rows=rows, sequence_length=length, epochs=epochs, seed=seed)
    config = DataConfig(packing="stream")
    total = count_batches(Mixture((shared,)), config, start(rows), windows=windows, limit=10**6)
    seen: Counter = Counter()
    longest = 0
    for host in range(hosts):
        mine = list(range(host * rows_a_host, (host + 1) * rows_a_host))
        made = make(shared, rows=mine, records=start(rows_a_host), windows=windows)
        assert len(made) <= total
        longest = max(longest, len(made))
        for place, row in enumerate(mine):
            expected = naive_stream_rows(tokens_of(lengths, assigned(shared, row, epochs)), length)
            got = rows_of(made, place)
            assert got[: len(expected)] == expected
            padding = {**naive_row([], length), "continues": False}
            assert got[len(expected) :] == [padding] * (len(got) - len(expected))
            for made_row in got:
                seen.update(token for token in made_row["tokens"] if token >= FIRST)
        if made:
            cut = data.draw(st.integers(0, len(made) - 1))
            again = make(shared, rows=mine, records=made[cut].records, windows=windows)
            assert [part.batch.tokens.tolist() for part in again] == [
                part.batch.tokens.tolist() for part in made[cut + 1 :]
            ]
            assert [part.records.tolist() for part in again] == [
                part.records.tolist() for part in made[cut + 1 :]
            ]
    assert longest == total
    every = [token["tokens"] for token in tokens_of(lengths, list(range(len(lengths))))]
    assert seen == {token: epochs for token in every if token >= FIRST}


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    rows=st.integers(1, 3),
    length=st.integers(3, 24),
    bins=st.integers(1, 4),
    epochs=st.integers(1, 2),
    data=st.data(),
)
def test_whole_documents_stay_whole(lengths, rows, length, bins, epochs, data):
    """Rows against a naive first-fit; a restart anywhere continues with the same rows."""
    shared = corpus(lengths, rows=rows, sequence_length=length, epochs=epochs)
    made = make(shared, "whole", rows=list(range(rows)), records=start(rows), bins=bins)
    for row in range(rows):
        expected = naive_whole_rows(tokens_of(lengths, assigned(shared, row, epochs)), length, bins)
        got = rows_of(made, row)
        assert got[: len(expected)] == expected
        assert not any(sum(r["segment_ids"]) for r in got[len(expected) :])
    for part in made:
        assert not part.batch.continues.any()
    cut = data.draw(st.integers(0, len(made) - 1))
    again = make(shared, "whole", rows=list(range(rows)), records=made[cut].records, bins=bins)
    for first, second in zip(made[cut + 1 :], again, strict=True):
        np.testing.assert_array_equal(first.batch.tokens, second.batch.tokens)
        np.testing.assert_array_equal(first.records, second.records)


def naive_whole_rows(tokens: list[dict[str, int]], length: int, bins: int) -> list[dict]:
    pieces: list[list[dict[str, int]]] = []
    for token in tokens:
        if token["positions"] % length == 0:
            pieces.append([])
        pieces[-1].append({**token, "positions": token["positions"] % length})
    rows: list[list[dict[str, int]]] = []
    group: list[list[dict[str, int]]] = []
    for piece in pieces:
        fits = [row for row in group if len(row) + len(piece) <= length]
        if not fits and len(group) == bins:
            rows += group
            group = []
        if fits:
            fits[0].extend(piece)
        else:
            group.append(list(piece))
    return [{**naive_row(row, length), "continues": False} for row in rows + group]


@settings(max_examples=150, deadline=None)
@given(
    lengths=LENGTHS,
    changes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    length=st.integers(2, 24),
    epochs=st.integers(1, 3),
    data=st.data(),
)
def test_assigning_anew_loses_and_repeats_nothing(lengths, changes, length, epochs, data):
    """A run that continues with other rows, several times, reads each token once per epoch."""
    seen: Counter = Counter()
    previous = None
    for number, rows in enumerate(changes):
        shared = corpus(
            lengths,
            rows=rows,
            sequence_length=length,
            epochs=epochs,
            seed=number,
            previous=previous,
        )
        begin = Record()._replace(position=assignment.Position(block=shared.assigner.first_block))
        records = np.asarray([begin.to_ints()] * rows)
        made = make(shared, rows=list(range(rows)), records=records)
        last = number == len(changes) - 1
        kept = len(made) if last or not made else data.draw(st.integers(0, len(made)))
        for part in made[:kept]:
            seen.update(part.batch.tokens.ravel().tolist())
            records = part.records
        assert not made or not made[0].batch.continues.any()
        positions = [[*Record.from_ints(ints).position] for ints in records]
        previous = SavedAssignment(positions=positions, seed=number, previous=previous)
    every = tokens_of(lengths, list(range(len(lengths))))
    assert {token: n for token, n in seen.items() if token >= FIRST} == {
        token["tokens"]: epochs for token in every if token["tokens"] >= FIRST
    }
    assert seen[EOS] == epochs * sum(length > 0 for length in lengths)


class BytesSource:
    """Texts in memory."""

    described = "memory"

    def __init__(self, texts: list[bytes]):
        self._texts = texts
        self.sizes = np.asarray([len(text) for text in texts], np.int64)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Document:
        return Document(self._texts[index])


@settings(max_examples=80, deadline=None)
@given(
    text=st.one_of(
        st.binary(min_size=1, max_size=60),
        st.text(alphabet="ab\nüß漢🎉", min_size=1, max_size=40).map(str.encode),
    ),
    span=st.integers(4, 9),
    length=st.integers(2, 9),
    data=st.data(),
)
def test_long_documents_come_in_blocks_unnoticed(text, span, length, data):
    """The bytes are right for any block size, from any position, and flaws are counted once."""
    shared = Corpus(
        BytesSource([text]),
        ByteTokenizer(),
        DocumentAssigner(np.asarray([len(text)]), streams=1, seed=0, epochs=1, shuffle=True),
        length,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "SPAN_BYTES", span)
        made = make(shared, rows=[0], records=start(1))
        cut = data.draw(st.integers(0, len(made) - 1))
        again = make(shared, rows=[0], records=made[cut].records)
    tokens = [token for row in rows_of(made, 0) for token in row["tokens"]]
    assert tokens[: len(text) + 2] == [256, *text, 257]
    places = [place for row in rows_of(made, 0) for place in row["positions"]]
    assert places[: len(text) + 2] == list(range(len(text) + 2))
    targets = [t for row in rows_of(made, 0) for t in row["targets"]]
    assert targets[: len(text) + 2] == [*text, 257, 0]
    assert rows_of(again, 0) == rows_of(made[cut + 1 :], 0)
    for part in (made, again):
        counts = Record.from_ints((part or made)[-1].records[0]).counts
        assert counts.documents == 1
        assert counts.one_byte == (len(text) == 1)
        assert counts.longer_than_row == (len(text) + 2 > length)
        assert counts.invalid_utf8 == (text.decode(errors="replace").encode() != text)


def test_blocks_end_after_a_line_or_a_character(monkeypatch):
    monkeypatch.setattr(stream, "SPAN_BYTES", 6)
    assert stream.span_end(b"ab\ncd\nefgh", 0) == 6
    assert stream.span_end(b"ab\ncdefgh", 0) == 3
    assert stream.span_end(b"abcdefgh", 0) == 6
    assert stream.span_end("abcd漢x".encode(), 0) == 4
    assert stream.span_end("ab漢xyzz".encode(), 0) == 6
    assert stream.span_end(b"x" + b"\x80" * 9, 0) == 6  # no character to respect: still goes on


def test_empty_and_broken_documents_are_counted():
    shared = corpus([0, 5, -1, 1, 30, 0], rows=1, sequence_length=8)
    counts = Record.from_ints(make(shared, rows=[0], records=start(1))[-1].records[0]).counts
    assert (counts.documents, counts.empty, counts.broken) == (3, 2, 1)
    assert counts.longer_than_row == 1  # of 32 tokens; that of 7 fits


def test_documents_without_any_text_end_the_run():
    shared = corpus([0, -1, 0], rows=2, sequence_length=8, epochs=0)
    config = DataConfig()
    endless = Batches(
        Mixture((shared,)), config, rows=[0, 1], records=start(2), windows=1, workers=0
    ).__iter__()
    with pytest.raises(ValueError, match=r"config\.data\.path: no text in any document of memory"):
        next(endless)


def test_assignments_are_balanced_and_reshuffled():
    """Streams end an epoch within a few small documents of each other, and groups change."""
    generator = np.random.default_rng(0)
    sizes = np.exp(generator.normal(8, 1.5, size=600)).astype(np.int64)
    assigner = DocumentAssigner(sizes, streams=4, seed=3, epochs=0, shuffle=True)
    company = []
    for epoch in range(3):
        shares = [assigner.documents(row, epoch) for row in range(4)]
        assert sorted(np.concatenate(shares)) == list(range(600))
        loads = [sizes[share].sum() for share in shares]
        # Document j to stream j mod 4 leaves 5% to 20% here.
        assert (max(loads) - min(loads)) / np.mean(loads) < 1e-3
        company.append({frozenset(share.tolist()) for share in shares})
    assert not company[0] & company[1]
    order = assigner.order(0)
    for share in (assigner.documents(row, 0) for row in range(4)):
        places = [int(np.flatnonzero(order == document)[0]) for document in share]
        assert places == sorted(places)


def test_epochs_do_not_change_the_order():
    sizes = np.arange(1, 50)
    assignments = [
        DocumentAssigner(sizes, streams=3, seed=1, epochs=n, shuffle=True) for n in (0, 1, 4)
    ]
    for row in range(3):
        first = [assigner.documents(row, 0).tolist() for assigner in assignments]
        assert first[0] == first[1] == first[2]
    assert assignments[1].documents(0, 1) is None
    assert assignments[2].documents(0, 3) is not None
    other = DocumentAssigner(sizes, streams=3, seed=2, epochs=0, shuffle=True)
    assert other.order(0).tolist() != assignments[0].order(0).tolist()


def test_large_corpora_are_assigned_block_by_block(monkeypatch):
    monkeypatch.setattr(assignment, "BLOCK", 10)
    assigner = DocumentAssigner(np.full(35, 100), streams=2, seed=0, epochs=2, shuffle=True)
    for epoch in range(2):
        blocks = [
            [assigner.documents(row, 4 * epoch + part) for row in (0, 1)] for part in range(4)
        ]
        assert sorted(np.concatenate([d for block in blocks for d in block])) == list(range(35))
        assert [sum(map(len, block)) for block in blocks] == [10, 10, 10, 5]
    assert assigner.documents(0, 8) is None


def test_streams_may_be_many_epochs_apart():
    """With fewer documents than streams, one stream may be far behind another."""
    assigner = DocumentAssigner(np.asarray([5, 7]), streams=3, seed=0, epochs=0, shuffle=True)
    first = [[assigner.documents(row, block).tolist() for row in range(3)] for block in range(30)]
    for block in (29, 0, 15, 3):
        assert [assigner.documents(row, block).tolist() for row in range(3)] == first[block]


def test_evaluation_keeps_the_documents_order():
    assigner = DocumentAssigner(np.arange(1, 20), streams=1, seed=0, epochs=1, shuffle=False)
    assert assigner.documents(0, 0).tolist() == list(range(19))


@pytest.mark.parametrize(("rows", "workers", "used"), [(4, 3, 2), (3, 8, 3), (5, 4, 1), (4, 0, 0)])
def test_workers_share_rows_evenly(rows, workers, used):
    assert shared_out(rows, workers) == used


class Failing(BytesSource):
    """Documents of which only every n-th has text, from some number of reads on."""

    def __init__(self, count: int, reads: int, keep: int, first: int = 1):
        super().__init__([b"text"] * count)
        self._reads, self._keep, self._first = reads, keep, first
        self._read = 0

    def __getitem__(self, index: int) -> Document:
        self._read += 1
        every = self._first if self._read <= self._reads else self._keep
        return Document(b"text") if self._read % every == 0 else Document(b"", broken=True)


def read(source: Failing, shuffle: bool, documents: int) -> Counts:
    assigner = DocumentAssigner(source.sizes, streams=1, seed=0, epochs=0, shuffle=shuffle)
    reader = StreamReader(
        Corpus(source, ByteTokenizer(), assigner, 8), 0, stream.Position(), Counts()
    )
    while reader.counts.looked_at < documents:
        reader.take(8)
    return reader.counts


def test_a_run_whose_documents_lose_their_text_stops():
    """If all or nearly all are lost at once; not if a part is lost, such as one of many files."""
    for keep in (10**9, 200):
        with pytest.raises(DataError, match=r"of the last 500 documents .*had text"):
            read(Failing(10_000, reads=3_000, keep=keep), True, 9_000)
    assert read(Failing(10_000, reads=3_000, keep=2), True, 9_000).broken == 3_000
    # Sparse from the beginning: that is the corpus. In the documents' own order: that is a part.
    assert read(Failing(10_000, reads=0, keep=200), True, 9_000).documents == 45
    assert read(Failing(10_000, reads=3_000, keep=300), False, 9_000).broken > 5_000
