"""Readers: how one text file is cut, and which Parquet columns are text."""

import pyarrow
import pyarrow.parquet
import pytest

from data.documents import open_source
from data.options import DataConfig
from data.readers.forms import TextForm
from data.readers.jsonl import texts_of
from tests.data.test_documents import texts


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_single_text_file_is_cut_for_training(tmp_path, newline):
    """At line starts, into documents of a fixed size; all of it once, with the end held out."""
    file = tmp_path / "book.txt"
    text = b"".join(f"line {i} 漢字".encode() + newline for i in range(50_000))
    file.write_bytes(text)
    config = DataConfig(source="text", path=str(file))
    train, (held_out,) = (texts(open_source(config, split)) for split in ("train", "eval"))
    assert b"".join(train) + held_out == text
    sizes = [len(document) for document in train]
    assert len(train) > 10 and sizes[-1] <= 1 << 16
    assert all(1 << 16 <= size < (1 << 16) + 100 for size in sizes[:-1])
    assert all(document.startswith(b"line ") for document in [*train, held_out])
    assert 0.04 < len(held_out) / len(text) <= 0.05
    assert open_source(config, "train").sizes.tolist() == sizes
    rows = DataConfig(source="text", path=str(file), global_batch_size=2)
    assert open_source(rows, "train").fingerprint == open_source(config, "train").fingerprint
    apart = DataConfig(source="text", path=str(file), eval_path=str(file))
    assert texts(open_source(apart, "eval")) == [text]
    whole = texts(open_source(apart, "train"))
    assert b"".join(whole) == text and whole[:10] == train[:10]


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 65_540, 131_072, 300_000])
def test_a_file_without_lines_is_cut_between_characters(tmp_path, size):
    """Up to 64 KiB it is one document; characters straddle every multiple of 64 KiB."""
    file = tmp_path / "line.txt"
    text = ("x" * (size % 3) + "漢" * (size // 3)).encode()
    file.write_bytes(text)
    config = DataConfig(source="text", path=str(file), eval_path=str(file))
    read = texts(open_source(config, "train"))
    assert "".join(document.decode() for document in read).encode() == text
    assert len(read) == max(1, -(-(size - 3) // (1 << 16)))
    assert all(1 << 16 <= len(document) < (1 << 16) + 3 for document in read[:-1])


@pytest.mark.parametrize("values", [["again"], ["", "again"], [None, "again"], ["x" * 5000]])
@pytest.mark.parametrize("statistics", [True, False])
def test_parquet_of_repeated_texts_has_text(tmp_path, values, statistics):
    """Each text is stored once in a dictionary, with less than a byte per row as the index."""
    file = tmp_path / "a.parquet"
    column = pyarrow.array(values * 8000, pyarrow.string())
    table = pyarrow.table({"text": column})
    pyarrow.parquet.write_table(table, file, write_statistics=statistics)
    described = pyarrow.parquet.ParquetFile(file).metadata.row_group(0).column(0)
    assert described.total_uncompressed_size < len(column)
    for config in (
        DataConfig(source="parquet", path=str(file)),
        DataConfig(source="parquet", path=str(file), eval_path=str(file)),
    ):
        train = open_source(config, "train")
        assert train.sizes.min() > 0
        assert set(texts(train)) == {(value or "").encode() for value in values}


def test_parquet_of_repeated_bytes_that_are_no_utf8_has_text(tmp_path):
    file = tmp_path / "a.parquet"
    binary = pyarrow.array([b"\xff\xfe"] * 2000)
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2000, binary.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), file)
    source = open_source(DataConfig(source="parquet", path=str(file)), "train")
    assert set(texts(source)) == {b"\xff\xfe"}


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.null()])
@pytest.mark.parametrize("value", ["", None])
def test_parquet_without_text_is_refused_at_once(tmp_path, value, kind):
    """Although its pages take some bytes."""
    file = tmp_path / "a.parquet"
    value = None if kind == pyarrow.null() else value
    table = pyarrow.table({"text": pyarrow.array([value] * 2000, kind)})
    pyarrow.parquet.write_table(table, file)
    with pytest.raises(ValueError, match=r"config\.data\.path=.*it holds no text"):
        open_source(DataConfig(source="parquet", path=str(file)), "train")


def columns() -> dict[str, pyarrow.Array]:
    """Columns that hold the texts below, in every type that Parquet files have for them."""
    values = ["one", "zwei é", None, "[1]"]
    strings = pyarrow.array(values)
    return {
        "string_view": pyarrow.array(values, pyarrow.string_view()),
        "binary_view": pyarrow.array([v and v.encode() for v in values], pyarrow.binary_view()),
        "large": pyarrow.array(values, pyarrow.large_string()),
        "json": pyarrow.ExtensionArray.from_storage(pyarrow.json_(pyarrow.string()), strings),
        "dictionary": strings.dictionary_encode(),
        "a": pyarrow.array([{"b": "inside", "c": [1, 2]}] * 4),
        "a.b": strings,
        "list": pyarrow.array([["x", "y"]] * 4),
        "last": strings,
    }


@pytest.mark.parametrize("name", [name for name in columns() if name not in ("a", "list")])
def test_parquet_types_of_text(tmp_path, name):
    file = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table(columns()), file)
    source = open_source(
        DataConfig(source="parquet", path=file, field=name, eval_path=file), "train"
    )
    read = [(source[i].text, source[i].broken) for i in range(4)]
    expected = [(b"one", False), ("zwei é".encode(), False), (b"", True), (b"[1]", False)]
    assert read == expected
    assert source.sizes.min() > 0


@pytest.mark.parametrize("name", ["a", "list", "b", "none"])
def test_columns_that_are_not_text_are_refused(tmp_path, name):
    file = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table(columns()), file)
    with pytest.raises(ValueError, match=r"^config\.data\.field=.*no such text column.*'large'"):
        open_source(DataConfig(source="parquet", path=file, field=name, eval_path=file), "train")


def test_two_columns_of_one_name_are_refused(tmp_path):
    file = str(tmp_path / "a.parquet")
    table = pyarrow.Table.from_arrays([pyarrow.array(["x"])] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(table, file)
    with pytest.raises(ValueError, match="has 2 columns of that name"):
        open_source(DataConfig(source="parquet", path=file, eval_path=file), "train")


@pytest.mark.parametrize("shard", [{"text": pyarrow.nulls(3)}, {"other": pyarrow.array([1, 2, 3])}])
def test_a_shard_without_text_is_counted_broken(tmp_path, shard):
    """All null, or without the column; first in order or last."""
    for name, table in (("a", shard), ("b", {"text": pyarrow.array(["x", "y"])}), ("c", shard)):
        pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / f"{name}.parquet")
    path = str(tmp_path)
    source = open_source(DataConfig(source="parquet", path=path, eval_path=path), "train")
    assert [source[i].broken for i in range(8)] == [True] * 3 + [False] * 2 + [True] * 3
    assert texts(source)[3:5] == [b"x", b"y"]


def test_json_lines_are_not_judged_by_the_first(tmp_path):
    """Nulls, then texts; a first file with other keys; texts only in the middle of many lines."""
    null, good = '{"text": null}\n', '{"text": "words"}\n'
    cases = [
        {"a.jsonl": null * 100 + good * 5},
        {"a.jsonl": '{"other": "key"}\n' * 200, "b.jsonl": good * 5},
        {"a.jsonl": null * 40_000 + good * 500 + null * 40_000},
    ]
    for number, contents in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in contents.items():
            (folder / name).write_text(content)
        config = DataConfig(source="jsonl", path=str(folder), eval_path=str(folder))
        source = open_source(config, "train")
        broken = sum(source[i].broken for i in range(len(source)))
        assert (broken, len(source) - broken) == [(100, 5), (200, 5), (80_000, 500)][number]


JSON = [
    (b'{"n": ' + b"9" * 5000 + b', "text": "kept"}', b"kept"),
    (b'{"n": -1' + b"0" * 5000 + b'.5e9, "text": "kept"}', b"kept"),
    (b'{"n": 1e999999, "m": NaN, "text": "kept"}', b"kept"),
    (b'{"text": "raw \xff and \\ud800"}', b"raw \xff and \xed\xa0\x80"),
    (b'{"text": "\\udc80\x80\\udcff"}', b"\xed\xb2\x80\x80\xed\xb3\xbf"),
    (b'{"text": "\\udc80"}', b"\xed\xb2\x80"),
    (
        b'{"text": "\xe6\xbc \\ud83c\\udf89 \\udbc0\\udc00"}',
        b"\xe6\xbc \xf0\x9f\x8e\x89 \xf4\x80\x80\x80",
    ),
    ('{"text": "\U000f0080 '.encode() + b'\x80"}', "\U000f0080 ".encode() + b"\x80"),
    (b'{"text": "x", "other": "\xff"}', b"x"),
    (b'{"text": "first", "text": "\xc3\xa9"}', "é".encode()),
]


@pytest.mark.parametrize(("line", "text"), JSON)
def test_json_details(line, text):
    assert texts_of(line, TextForm("text").texts) == [text]
