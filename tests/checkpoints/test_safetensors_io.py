"""Folders of safetensors: what is written can be read, and damage is a one-line error."""

import json

import ml_dtypes
import numpy as np
import pytest

from checkpoints.safetensors_io import INDEX, SINGLE, Reader, Spec, WeightsError, Writer

RANDOM = np.random.default_rng(0)
FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
TENSORS = {
    "a.weight": RANDOM.normal(size=(3, 5)).astype(np.float32),
    "b": RANDOM.normal(size=(7,)).astype(np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.float32(2.5).reshape(()),
    "large": RANDOM.normal(size=(40, 2)).astype(np.float32),
}


def write(folder, dtype=FLOAT32, **options):
    specs = [Spec(name, x.shape, dtype) for name, x in TENSORS.items()]
    with Writer(str(folder), specs, **options) as writer:
        for name, x in TENSORS.items():
            writer.add(name, x)


@pytest.mark.parametrize(("shard_bytes", "files"), [(10**9, 1), (100, 2), (1, 4)])
def test_what_is_written_is_read(tmp_path, shard_bytes, files):
    write(tmp_path, shard_bytes=shard_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    assert (tmp_path / INDEX).exists() == (files > 1)
    assert not list(tmp_path.glob("*.part"))
    reader = Reader(str(tmp_path))
    assert set(reader.entries) == set(TENSORS)
    for name, x in TENSORS.items():
        np.testing.assert_array_equal(reader.read(name), x)
        assert reader.read(name).dtype == np.float32


def test_bytes_are_those_of_the_format(tmp_path):
    """By hand, from the format's description."""
    with Writer(str(tmp_path), [Spec("x", (2,), FLOAT32)]) as writer:
        writer.add("x", np.array([1.0, -2.0], np.float32))
    data = (tmp_path / SINGLE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["x"] == {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert data[8 + length :] == bytes.fromhex("0000803f000000c0") and length % 8 == 0


def test_bfloat16_is_rounded_to_nearest_even(tmp_path):
    write(tmp_path, dtype=BFLOAT16)
    reader = Reader(str(tmp_path))
    for name, x in TENSORS.items():
        found = reader.read(name)
        assert found.dtype == BFLOAT16
        np.testing.assert_array_equal(found, x.astype(ml_dtypes.bfloat16))


def damage(folder, kind: str) -> None:
    first = sorted(folder.glob("*.safetensors"))[0]
    data = first.read_bytes()
    match kind:
        case "short":
            first.write_bytes(data[:-1])
        case "header":
            first.write_bytes(data[:8] + b"}" + data[9:])
        case "length":
            first.write_bytes(b"\xff" * 8 + data[8:])
        case "empty file":
            first.write_bytes(b"")
        case "missing":
            first.unlink()
        case "index":
            (folder / INDEX).write_text("[]")
        case "type":
            first.write_bytes(data.replace(b'"F32"', b'"I64"'))
        case "offsets":
            first.write_bytes(data.replace(b'"data_offsets":[0,', b'"data_offsets":[4,'))
        case "twice":
            (folder / INDEX).unlink()
            (folder / "again.safetensors").write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("short", "truncated, "),
        ("header", "its header is damaged"),
        ("length", "truncated or not a safetensors file"),
        ("empty file", "truncated or not a safetensors file"),
        ("missing", r"of its index is missing \(1 of 2 files\)"),
        ("index", "not an index of safetensors files"),
        ("type", "has type I64; valid types: F64, F32, F16, BF16"),
        ("offsets", "its header is damaged"),
        ("twice", "as well"),
    ],
)
def test_damage_is_one_line(tmp_path, kind, text):
    write(tmp_path, shard_bytes=100)
    damage(tmp_path, kind)
    with pytest.raises(WeightsError, match=text) as caught:
        Reader(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_file_cut_after_it_was_opened_is_noticed(tmp_path):
    write(tmp_path)
    reader = Reader(str(tmp_path))
    file = tmp_path / SINGLE
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(WeightsError, match="truncated inside large"):
        reader.read("large")


def test_no_folder_and_no_files_are_one_line(tmp_path):
    with pytest.raises(WeightsError, match="no such folder"):
        Reader(str(tmp_path / "none"))
    with pytest.raises(WeightsError, match=r"no \.safetensors files"):
        Reader(str(tmp_path))


def test_an_interrupted_export_is_not_a_whole_one(tmp_path):
    specs = [Spec(name, x.shape, FLOAT32) for name, x in TENSORS.items()]
    with pytest.raises(KeyboardInterrupt), Writer(str(tmp_path), specs, shard_bytes=100) as writer:
        writer.add("a.weight", TENSORS["a.weight"])
        raise KeyboardInterrupt
    assert not (tmp_path / INDEX).exists()
    with pytest.raises(WeightsError):
        Reader(str(tmp_path))


def test_tensors_are_added_in_order_and_all_of_them(tmp_path):
    specs = [Spec("x", (2,), FLOAT32), Spec("y", (2,), FLOAT32)]
    writer = Writer(str(tmp_path), specs)
    with pytest.raises(ValueError, match="comes next"):
        writer.add("y", np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="comes next"):
        writer.add("x", np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="x was never added"), writer:
        pass
