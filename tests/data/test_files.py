"""Files that change: identified by content on resume, detected by reads during a run."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from data import files
from data.documents import open_source
from data.files import Files, sampled_spans, wide_encoding
from data.options import DataConfig
from data.readers import reader
from errors import DataError
from tests.data.loader_cases import change, loader, take
from tests.data.test_documents import FORMATS, TEXTS, write

TERABYTE = 10**12


def rewrite(path: Path, at: float = 0.5) -> None:
    """Changes one letter without changing the size."""
    content = bytearray(path.read_bytes())
    place = int(len(content) * at)
    content[place] ^= 1
    path.write_bytes(content)


def config_of(kind: str, folder: Path) -> DataConfig:
    return DataConfig(
        source=kind,
        path=write(kind, folder, TEXTS),
        sequence_length=64,
        global_batch_size=4,
        on_data_change="refuse",
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_the_same_content_elsewhere_resumes_and_a_rewritten_one_does_not(kind, tmp_path):
    (tmp_path / "a").mkdir()
    config = config_of(kind, tmp_path / "a")
    with loader(config) as source:
        take(source, 3)
        state = source.state()
        expected = take(source, 2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    names = sorted(path for path in (tmp_path / "b").rglob("*") if path.is_file())
    if kind in ("jsonl", "parquet"):  # other names in the same order
        for path in names:
            path.rename(path.with_name("x" + path.name))
    there = config.path.replace(str(tmp_path / "a"), str(tmp_path / "b"))
    if kind == "array_record":
        there = str(Path(there).rename(tmp_path / "b" / "other.array_record"))
    with loader(change(config, path=there)) as source:
        assert source.restore(state) == ""
        assert take(source, 2) == expected
    # An ArrayRecord's own tables, later in the file, have checksums that fail at opening.
    place = 0.02 if kind == "array_record" else 0.5
    rewrite(max(Path(config.path).rglob("*.*"), default=Path(config.path)), place)
    with loader(config) as source:  # noqa: SIM117
        with pytest.raises(ValueError, match=r"^config\.data\.path: the saved data position"):
            source.restore(state)


def test_a_single_text_file_under_another_name_resumes(tmp_path):
    (tmp_path / "book.txt").write_bytes(b"a line of text\n" * 30_000)
    config = DataConfig(source="text", path=str(tmp_path / "book.txt"), sequence_length=64)
    with loader(config) as source:
        take(source, 2)
        state = source.state()
    os.rename(tmp_path / "book.txt", tmp_path / "novel.txt")
    with loader(change(config, path=str(tmp_path / "novel.txt"))) as source:
        assert source.restore(state) == ""


def test_evaluation_given_apart_is_named(tmp_path):
    config = config_of("jsonl", tmp_path)
    with loader(config) as source:
        state = source.state()
    with loader(change(config, eval_path=config.path)) as source:  # noqa: SIM117
        with pytest.raises(ValueError, match=r"^config\.data\.eval_path: .* this run has"):
            source.restore(state)


@pytest.mark.parametrize("at", [0.0, 0.2, 0.5, 0.99])
def test_every_byte_of_a_small_corpus_counts(tmp_path, at):
    paths = []
    for number in range(3):
        (tmp_path / f"{number}").write_bytes(bytes(range(1, 200)) * 1000)
        paths.append(str(tmp_path / f"{number}"))
    before = Files(paths).fingerprint()
    assert Files(paths).fingerprint() == before
    assert Files(paths[::-1]).fingerprint() == before  # equal in content
    rewrite(tmp_path / "1", at)
    assert Files(paths).fingerprint() != before


@pytest.mark.parametrize(
    "sizes",
    [
        [0, 5, 0, 200_000, 1],
        [TERABYTE],
        [TERABYTE // 1000] * 1000,
        [1000] * 5000,
        [0] * 3000 + [70_000] * 3000,
        [],
        [0, 0],
    ],
)
def test_what_is_read_for_a_fingerprint_is_bounded(sizes):
    spans = sampled_spans(np.asarray(sizes, np.int64))
    assert len(spans) <= files.SAMPLES
    for number, start, stop in spans:
        assert 0 <= start <= stop <= sizes[number]
        assert stop - start <= files.SAMPLE_BYTES
    read = sum(stop - start for _, start, stop in spans)
    if sum(sizes) < files.SAMPLES * files.SAMPLE_BYTES and len(sizes) < files.SAMPLES:
        assert read == sum(sizes)
    # Some block is read in every part of one per cent of the corpus.
    ends = np.cumsum([0, *sizes])
    starts = np.sort([ends[number] + start for number, start, _ in spans])
    if sum(sizes) > TERABYTE // 2:
        assert np.diff(starts).max() < sum(sizes) / 100
        assert starts[0] == 0 and starts[-1] > 0.99 * sum(sizes)


def cut(path: Path) -> None:
    """With the old modification time, as after a copy that preserves times."""
    status = path.stat()
    os.truncate(path, status.st_size // 2)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def grow(path: Path) -> None:
    status = path.stat()
    with path.open("ab") as file:
        file.write(b"more")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("how", [cut, rewrite, grow])
@pytest.mark.parametrize("kind", [*FORMATS, "long text"])
def test_a_file_that_changes_during_a_run_is_noticed(kind, how, tmp_path, monkeypatch):
    """With one line that names it. A memory-mapped file would end this process by SIGBUS."""
    if kind == "long text":
        monkeypatch.setattr(reader, "LONG_BYTES", 10)
    kind = kind.split()[-1]
    source = open_source(config_of(kind, tmp_path), "train")
    held = [source[i].text for i in range(5)]
    for path in tmp_path.rglob("*.*"):
        how(path)
    with pytest.raises(DataError, match=r"has changed during the run") as caught:
        for i in range(len(source)):
            source[i].text[:]
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
    for text in held:
        if not isinstance(text, bytes):
            with pytest.raises(DataError, match="has changed during the run"):
                text[:]


MARKED = [
    ("utf-16", "UTF-16"),
    ("utf-16-le", "UTF-16"),
    ("utf-16-be", "UTF-16"),
    ("utf-32", "UTF-32"),
    ("utf-32-be", "UTF-32"),
]


@pytest.mark.parametrize(("codec", "name"), MARKED)
@pytest.mark.parametrize("kind", ["text", "jsonl", "folder"])
def test_other_encodings_are_named(tmp_path, kind, codec, name):
    text = '{"text": "hello there, this is a line"}\n' * 40
    suffix = "jsonl" if kind == "jsonl" else "txt"
    for number in range(2 if kind == "folder" else 1):
        (tmp_path / f"{number}.{suffix}").write_bytes(text.encode(codec))
    source = "jsonl" if kind == "jsonl" else "text"
    with pytest.raises(ValueError, match=rf"is {name}; needs UTF-8; try iconv"):
        open_source(DataConfig(source=source, path=str(tmp_path)), "train")


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe!", b"plain text", "\u6f22\u5b57".encode(), bytes(8), b"\0a" * 3]
)
def test_other_content_is_not_taken_for_a_wide_encoding(content):
    assert wide_encoding(content[:64], len(content)) == ""


def test_utf8_marks_are_skipped(tmp_path):
    mark = b"\xef\xbb\xbf"
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(mark + b'{"text": "first"}\n{"text": "second"}\n')
    path = str(tmp_path)
    source = open_source(DataConfig(source="jsonl", path=path, eval_path=path), "train")
    assert [source[i].text for i in range(4)] == [b"first", b"second"] * 2
    for number in range(2):
        folder = tmp_path / f"text{number}"
        folder.mkdir()
        for other in range(number + 1):
            (folder / f"{other}.txt").write_bytes(mark + b"words")
        config = DataConfig(source="text", path=str(folder), eval_path=str(folder))
        for split in ("train", "eval"):
            assert open_source(config, split)[0].text == b"words"
