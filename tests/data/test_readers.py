"""What readers make of files: how one text file is cut, and which Parquet columns hold text."""

import pyarrow
import pyarrow.parquet
import pytest

from data.documents import open_source
from data.options import DataConfig
from tests.data.test_documents import texts


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_single_text_file_is_cut_for_training(tmp_path, newline):
    """At line starts, into documents of a fixed size; all of it once, the end held out whole."""
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
    """Up to 64 KiB it is one document; the characters stand across every multiple of 64 KiB."""
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
    """Each stands once in a dictionary, with less than a byte a row to tell which."""
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


@pytest.mark.parametrize("value", ["", None])
def test_parquet_without_text_is_refused_at_once(tmp_path, value):
    """Though its pages take some bytes."""
    file = tmp_path / "a.parquet"
    table = pyarrow.table({"text": pyarrow.array([value] * 2000, pyarrow.string())})
    pyarrow.parquet.write_table(table, file)
    with pytest.raises(ValueError, match=r"config\.data\.path=.*it holds no text"):
        open_source(DataConfig(source="parquet", path=str(file)), "train")
