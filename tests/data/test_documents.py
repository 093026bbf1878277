"""Document sources: what is read, held out and refused, in every format."""

import gc
import json
import os
import pickle
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python import array_record_module

from data.documents import DocumentSource, open_source
from data.options import DataConfig, check
from data.readers import jsonl, parquet, reader
from errors import DataError

TEXTS = [f"document {i}\n".encode() * (1 + i % 5) for i in range(200)]


def texts(source: DocumentSource) -> list[bytes]:
    return [bytes(source[i].text[:]) for i in range(len(source))]


def both(config: DataConfig) -> list[bytes]:
    """Returns training and evaluation documents, which must not overlap in number."""
    return texts(open_source(config, "train")) + texts(open_source(config, "eval"))


def write(kind: str, folder: Path, documents: list[bytes]) -> str:
    """Writes documents in a format; returns the path to read."""
    if kind == "text":
        for number, text in enumerate(documents):
            file = folder / f"part{number % 3}" / f"{number}.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(text)
        return str(folder)
    if kind == "jsonl":
        lines = [json.dumps({"id": i, "text": t.decode()}) for i, t in enumerate(documents)]
        (folder / "a.jsonl").write_text("\n".join(lines[:70]) + "\n")
        (folder / "b.jsonl").write_text("\r\n".join(lines[70:]))
        return str(folder)
    if kind == "parquet":
        for name, part in (("a", documents[:90]), ("b", documents[90:])):
            strings = pyarrow.array([t.decode() for t in part], pyarrow.string())
            table = pyarrow.table({"id": pyarrow.array(range(len(part))), "text": strings})
            pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=16)
        return str(folder)
    writer = array_record_module.ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
    for text in documents:
        writer.write(text)
    writer.close()
    return str(folder / "a.array_record")


FORMATS = ("text", "jsonl", "parquet", "array_record")


@pytest.mark.parametrize("kind", FORMATS)
def test_each_document_is_read_once(kind, tmp_path):
    config = DataConfig(source=kind, path=write(kind, tmp_path, TEXTS))
    assert sorted(both(config)) == sorted(TEXTS)
    held_out = open_source(config, "eval")
    assert 2 <= len(held_out) <= 25  # about 5% of 200
    again = open_source(config, "eval")
    assert (texts(again), again.fingerprint) == (texts(held_out), held_out.fingerprint)
    train = open_source(config, "train")
    assert held_out.fingerprint == train.fingerprint
    assert held_out.split_fingerprint != train.split_fingerprint
    sent = pickle.loads(pickle.dumps(held_out))
    assert texts(sent) == texts(held_out)


@pytest.mark.parametrize("kind", FORMATS)
def test_documents_for_evaluation_may_stand_elsewhere(kind, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "eval").mkdir()
    config = DataConfig(
        source=kind,
        path=write(kind, tmp_path / "train", TEXTS),
        eval_path=write(kind, tmp_path / "eval", TEXTS[:100:-1]),
    )
    assert sorted(texts(open_source(config, "train"))) == sorted(TEXTS)
    assert sorted(texts(open_source(config, "eval"))) == sorted(TEXTS[:100:-1])


def test_the_standard_library_without_its_tests():
    """Compared with the folder as pathlib sees it."""
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    expected = {
        path: path.read_bytes()
        for path in root.rglob("*.py")
        if not excluded & set(path.relative_to(root).parts[:-1])
    }
    train, held_out = (open_source(DataConfig(), split) for split in ("train", "eval"))
    assert sorted(texts(train) + texts(held_out)) == sorted(expected.values())
    assert 0.02 < len(held_out) / len(expected) < 0.08
    names = "json/decoder.py", "typing.py", "argparse.py"
    found = set(texts(train) + texts(held_out))
    assert all((root / name).read_bytes() in found for name in names)
    assert list(train.sizes) == [len(text) for text in texts(train)]


def test_what_is_held_out_does_not_move_when_documents_are_added(tmp_path):
    config = DataConfig(source="text", path=write("text", tmp_path, TEXTS))
    before = set(texts(open_source(config, "eval")))
    (tmp_path / "a new one.txt").write_bytes(b"new")
    assert before - set(texts(open_source(config, "eval"))) == set()


def test_a_single_text_file_gives_up_its_last_lines(tmp_path):
    file = tmp_path / "book.txt"
    lines = [f"line {i}\n".encode() for i in range(1000)]
    file.write_bytes(b"".join(lines))
    for path in (file, tmp_path):
        config = DataConfig(source="text", path=str(path), eval_fraction=0.1)
        (train,), (held_out,) = (texts(open_source(config, split)) for split in ("train", "eval"))
        assert train + held_out == b"".join(lines)
        assert held_out.startswith(b"line ")
        assert train.endswith(b"\n")
        assert 0.08 < len(held_out) / file.stat().st_size <= 0.1
    whole = DataConfig(source="text", path=str(file), eval_path=str(file))
    assert both(whole) == [b"".join(lines)] * 2


def test_a_single_line_is_not_cut_inside_a_character(tmp_path):
    file = tmp_path / "line.txt"
    file.write_bytes("漢字".encode() * 50)
    for share in (0.05, 0.11, 0.32, 0.5):
        train, held_out = both(DataConfig(source="text", path=str(file), eval_fraction=share))
        assert (train + held_out).decode() == train.decode() + held_out.decode() == "漢字" * 50


@pytest.mark.parametrize("limit", [200, 10_000])
def test_long_documents_are_read_in_parts(tmp_path, monkeypatch, limit):
    """Indexed like bytes, at any position; also after pickling."""
    monkeypatch.setattr(reader, "LONG_BYTES", limit)
    content = b"".join(b"line %d\n" % i for i in range(100))
    (tmp_path / "long.txt").write_bytes(content)
    (tmp_path / "short.txt").write_bytes(b"y" * 100)
    config = DataConfig(source="text", path=str(tmp_path), eval_path=str(tmp_path))
    source = open_source(config, "train")
    text = pickle.loads(pickle.dumps(source))[0].text
    assert type(text) is (bytes if limit > len(content) else reader.FileText)
    assert type(source[1].text) is bytes
    for part in (slice(7, 99), slice(None), slice(-5, None), slice(90, 10), slice(800, 9000)):
        assert text[part] == content[part]
    assert [text[0], text[41], text[-1]] == [content[0], content[41], content[-1]]


def test_hidden_files_are_left_alone(tmp_path):
    write("text", tmp_path, TEXTS[:5])
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".DS_Store").write_text("hidden")
    assert sorted(both(DataConfig(source="text", path=str(tmp_path)))) == sorted(TEXTS[:5])


@pytest.mark.parametrize("relative", ["corpus", "./corpus", ".//corpus/", "corpus/.", "."])
def test_a_circle_is_found_in_its_first_round(tmp_path, monkeypatch, relative):
    """For every spelling of the path."""
    corpus = tmp_path / "corpus"
    (corpus / "folder").mkdir(parents=True)
    (corpus / "folder" / "circle").symlink_to(corpus)
    monkeypatch.chdir(corpus if relative == "." else tmp_path)
    with pytest.raises(ValueError, match=r"/folder/circle cannot be read \(a link to") as caught:
        open_source(DataConfig(source="text", path=relative), "train")
    assert str(caught.value).count("circle") == 1


def test_links_to_folders_are_followed_and_circles_refused(tmp_path):
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "corpus of another"
    corpus.mkdir()
    elsewhere.mkdir()
    write("text", elsewhere, TEXTS[:5])
    (corpus / "link").symlink_to(elsewhere)
    assert sorted(both(DataConfig(source="text", path=str(corpus)))) == sorted(TEXTS[:5])
    (elsewhere / "circle").symlink_to(corpus)
    with pytest.raises(
        ValueError, match=r"circle cannot be read \(a link to a folder that contains it"
    ):
        open_source(DataConfig(source="text", path=str(corpus)), "train")


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_what_cannot_be_read_is_told_before_anything_is(kind, tmp_path, monkeypatch):
    """Dangling links, pipes (on which a read would block), and files without permission."""
    suffix = ".jsonl" if kind == "jsonl" else ".txt"
    for name in "ab":
        (tmp_path / f"{name}{suffix}").write_bytes(b'{"text": "hello"}\n' * 3)
    config = DataConfig(source=kind, path=str(tmp_path))
    odd = tmp_path / f"odd{suffix}"
    for make in (lambda: odd.symlink_to("nowhere"), lambda: os.mkfifo(odd)):
        make()
        with pytest.raises(ValueError, match=rf"config\.data\.path=.*odd{suffix} cannot be read"):
            open_source(config, "train")
        odd.unlink()
    monkeypatch.setattr("os.access", lambda path, _: not path.endswith(f"b{suffix}"))
    with pytest.raises(ValueError, match=rf"b{suffix} cannot be read \(Permission denied\)"):
        open_source(config, "train")


def test_a_folder_that_cannot_be_listed_is_told(tmp_path, monkeypatch):
    def scandir(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.scandir", scandir)
    with pytest.raises(ValueError, match=r"cannot be read \(Permission denied\)"):
        open_source(DataConfig(source="text", path=str(tmp_path)), "train")


@pytest.mark.parametrize("end", [".gz", ".zst", ".xz", ".bz2"])
@pytest.mark.parametrize("kind", FORMATS)
def test_compressed_files_are_refused(kind, end, tmp_path):
    """Next to others, where they would be skipped or read as text, and alone."""
    path = Path(write(kind, tmp_path, TEXTS))
    folder = path if path.is_dir() else path.parent
    suffix = ".txt" if kind == "text" else f".{kind}"
    packed = folder / "more" / f"c{suffix}{end}"
    packed.parent.mkdir()
    packed.write_bytes(b"packed")
    said = f"{packed} is compressed; unpack it or remove it"
    for given in (folder, packed):
        with pytest.raises(ValueError) as caught:
            open_source(DataConfig(source=kind, path=str(given)), "train")
        assert str(caught.value) == f"config.data.path={str(given)!r}: {said}"
    evaluation = DataConfig(source=kind, path=str(folder), eval_path=str(packed))
    with pytest.raises(ValueError, match=r"^config\.data\.eval_path=.* is compressed; unpack it"):
        open_source(evaluation, "eval")
    packed.rename(packed.with_name(f".hidden{suffix}{end}"))
    assert sorted(both(DataConfig(source=kind, path=str(folder)))) == sorted(TEXTS)


def test_an_evaluation_without_text_is_refused(tmp_path):
    """Its loss would be 0, which would make that checkpoint the best."""
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n' * 9)
    (tmp_path / "eval.jsonl").write_text('{"text": ""}\n' * 9)
    train, evaluation = str(tmp_path / "train.jsonl"), str(tmp_path / "eval.jsonl")
    config = DataConfig(source="jsonl", path=train, eval_path=evaluation)
    assert len(open_source(config, "train")) == 9
    with pytest.raises(ValueError, match=r"data\.eval_path=.*no text left for split 'eval'"):
        open_source(config, "eval")


def test_broken_lines_of_json(tmp_path):
    """Broken records are marked, not fatal; blank lines are skipped; bad bytes are kept."""
    lines = [
        b'{"text": "whole"}',
        b'{"text": "half',
        b"",
        b"[1, 2]",
        b'{"text": 3}',
        b'{"other": "key"}',
        b"\r",
        b'{"text": ""}',
        b'{"text": "bad \xff byte"}',
        b'{"text": "lone \\ud800 surrogate"}',
        '{"text": "漢字\\n\\u6f22"}'.encode(),
        b"[" * 100_000,
        b'{"text": "last, without an end"}',
    ]
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join(lines))
    config = DataConfig(source="jsonl", path=str(file), eval_path=str(file))
    source = open_source(config, "train")
    read = [(bytes(source[i].text), source[i].broken) for i in range(len(source))]
    assert read == [
        (b"whole", False),
        (b"", True),
        (b"", True),
        (b"", True),
        (b"", True),
        (b"", False),
        (b"bad \xff byte", False),
        (b"lone \xed\xa0\x80 surrogate", False),
        ("漢字\n漢".encode(), False),
        (b"", True),
        (b"last, without an end", False),
    ]


def test_parquet_columns(tmp_path, monkeypatch):
    """Strings, binaries, nulls and a column among others, with little of it kept in memory."""
    monkeypatch.setattr(parquet, "CACHE_BYTES", 300)
    values = [None if i % 7 == 3 else f"text {i} é" for i in range(50)]
    nested = pyarrow.array([{"a": 1, "b": "x"}] * 50)
    for column in (
        pyarrow.array(values),
        pyarrow.array(values, pyarrow.large_string()),
        pyarrow.array([v and v.encode() + b"\xff" for v in values], pyarrow.binary()),
        pyarrow.array(values).dictionary_encode(),
    ):
        table = pyarrow.table({"nested": nested, "body": column, "other": pyarrow.array(values)})
        file = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(table, file, row_group_size=8)
        config = DataConfig(source="parquet", path=str(file), field="body", eval_path=str(file))
        source = open_source(config, "train")
        end = b"\xff" if pyarrow.types.is_binary(column.type) else b""
        for i in np.random.default_rng(0).permutation(50):
            expected = (b"", True) if values[i] is None else (values[i].encode() + end, False)
            assert (bytes(source[i].text), source[i].broken) == expected
        assert source.sizes.min() > 0


def test_little_is_still_split(tmp_path):
    """Both splits get a document, however few documents there are and whatever their hashes."""
    for count in range(2, 8):
        for share in (0.001, 0.999):
            folder = tmp_path / f"{count} {share}"
            folder.mkdir()
            config = DataConfig(
                source="jsonl", path=write("jsonl", folder, TEXTS[:count]), eval_fraction=share
            )
            sizes = [len(open_source(config, split)) for split in ("train", "eval")]
            assert min(sizes) >= 1
            assert sum(sizes) == count


@pytest.mark.parametrize("kind", FORMATS)
def test_nothing_to_read(kind, tmp_path):
    cases = {}
    cases[str(tmp_path / "none")] = "no such file or folder"
    (tmp_path / "empty").mkdir()
    cases[str(tmp_path / "empty")] = "config.data.path="
    if kind == "text":
        (tmp_path / "blank").mkdir()
        (tmp_path / "blank" / "a.txt").touch()
        (tmp_path / "blank" / "b.txt").touch()
        cases[str(tmp_path / "blank")] = "holds no text"
    else:
        (tmp_path / "one").mkdir()
        cases[write(kind, tmp_path / "one", TEXTS[:1])] = "config.data.eval_path"
    if kind in ("parquet", "array_record"):
        wrong = tmp_path / f"wrong.{kind}"
        wrong.write_bytes(b"not such a file")
        cases[str(wrong)] = "not a"
    for path, said in cases.items():
        with pytest.raises(ValueError) as caught:
            open_source(DataConfig(source=kind, path=path), "train")
        assert said in str(caught.value)
        assert str(caught.value).startswith("config.data.path=")
        assert "\n" not in str(caught.value)
    config = DataConfig(source=kind, path=".", eval_path=str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"config\.data\.eval_path=.*no such file"):
        open_source(config, "eval")


def test_lines_are_found_once_for_both_splits(tmp_path, monkeypatch):
    """They are read again if they have changed, or if no reader is in use any more."""
    find, found = jsonl.find_lines, []
    monkeypatch.setattr(jsonl, "find_lines", lambda *file: found.append(file) or find(*file))
    config = DataConfig(source="jsonl", path=write("jsonl", tmp_path, TEXTS))
    train, held_out = open_source(config, "train"), open_source(config, "eval")
    assert len(found) == 2  # files
    assert sorted(texts(train) + texts(held_out)) == sorted(TEXTS)
    changed = tmp_path / "b.jsonl"
    changed.write_bytes(changed.read_bytes().replace(b"document 199\\n", b"changed\\n"))
    assert [t for t in both(config) if t.startswith(b"changed")]
    assert len(found) == 6  # training's and evaluation's were not open together
    del train, held_out
    gc.collect()
    open_source(config, "eval")
    assert len(found) == 8


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_unknown_field_is_answered_with_the_known(kind, tmp_path):
    path = write(kind, tmp_path, TEXTS)
    with pytest.raises(ValueError, match=r"config\.data\.field='body': .*'text'"):
        open_source(DataConfig(source=kind, path=path, field="body"), "train")


def test_a_file_that_vanishes_is_an_error_of_data(tmp_path):
    source = open_source(DataConfig(source="text", path=write("text", tmp_path, TEXTS)), "train")
    for file in tmp_path.rglob("*.txt"):
        os.remove(file)
    with pytest.raises(DataError, match=r"config\.data\.path: document .* can no longer be read"):
        source[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"source": "csv"}, "config.data.source='csv': needs one of 'stdlib', 'text'"),
        ({"source": "text"}, "config.data.path='': needs the path of a file or folder with"),
        ({"path": "x"}, "config.data.path='x': needs to be empty with config.data.source='stdlib'"),
        ({"eval_path": "x"}, "config.data.eval_path='x'"),
        ({"source": "jsonl", "path": "x", "field": ""}, "config.data.field=''"),
        ({"sequence_length": 1}, "config.data.sequence_length=1: needs a number >= 2; try 2048"),
        ({"global_batch_size": 0}, "config.data.global_batch_size=0"),
        ({"global_batch_size": 2.5}, "config.data.global_batch_size=2.5"),
        ({"prefetch": 0}, "config.data.prefetch=0"),
        ({"workers": -1}, "config.data.workers=-1"),
        ({"epochs": True}, "config.data.epochs=True"),
        ({"packing": "tight"}, "config.data.packing='tight': needs one of 'stream', 'whole'"),
        ({"eval_fraction": 1.0}, "config.data.eval_fraction=1.0"),
        ({"on_data_change": "no"}, "config.data.on_data_change='no'"),
        ({"tokenizer": ""}, "config.data.tokenizer=''"),
    ],
)
def test_options_are_checked(options, said):
    with pytest.raises(ValueError) as caught:
        check(DataConfig(**options))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_defaults_pass():
    check(DataConfig())
