"""Contents of data files, tokenizers and checkpoints are never executed; pickles are refused."""

import ast
import contextlib
import dataclasses
import pathlib
import pickle

import jax
import numpy as np
import pytest

from checkpoints.manager import CheckpointError, Manager
from checkpoints.retention import Retention
from data.loader import make_loader
from data.options import DataConfig
from tests.model_cases import make_mesh
from tests.test_imports import ROOT, imported_names

ROOMS = ("train.py", "configs", "data", "kernels", "model", "training", "checkpoints")
RUNS_WHAT_IT_READS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
EXECUTES = {"eval", "exec", "compile", "__import__"}


@dataclasses.dataclass
class Bomb:
    """Unpickling it creates a file."""

    mark: str

    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(self.mark),)


@pytest.fixture
def bomb(tmp_path):
    """(the bytes of a pickle, the file that exists if it was executed)."""
    mark = tmp_path / "executed"
    content = pickle.dumps(Bomb(str(mark)))
    pickle.loads(content)
    assert mark.exists(), "else the tests below could not fail"
    mark.unlink()
    return content * 20, mark


@pytest.mark.parametrize("room", ROOMS)
def test_no_file_of_a_room_can_execute_what_it_reads(room):
    for path in [ROOT / room] if room.endswith(".py") else sorted((ROOT / room).rglob("*.py")):
        found = {name.split(".")[0] for name in imported_names(path)} & RUNS_WHAT_IT_READS
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found |= {node.func.id} & EXECUTES
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                found.add("allow_pickle")
        assert not found, f"{path.relative_to(ROOT)}: {found}"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("text", "a.txt"),
        ("jsonl", "a.jsonl"),
        ("parquet", "a.parquet"),
        ("array_record", "a.array_record"),
        ("tokenizer", "tokenizer.json"),
        ("tokenizer", "spm.model"),
    ],
)
def test_a_pickle_among_the_data_is_read_as_bytes_or_refused(tmp_path, bomb, source, name):
    content, mark = bomb
    (tmp_path / "data").mkdir()
    for number in range(3):
        (tmp_path / "data" / f"{number}{name}").write_bytes(content)
    path = str(tmp_path / "data")
    options = DataConfig(source=source, path=path, global_batch_size=1, sequence_length=64)
    if source == "tokenizer":
        tokenizer = str(tmp_path / "data" / f"0{name}")
        options = dataclasses.replace(options, source="text", tokenizer=tokenizer)
    mesh = make_mesh()
    if source == "text":  # which is what its bytes are
        loader = make_loader(options, split="train", mesh=mesh, seed=0)
        assert np.asarray(next(iter(loader)).tokens).any()
        loader.close()
    else:
        with pytest.raises(ValueError, match=r"^config\.data\."):
            make_loader(options, split="train", mesh=mesh, seed=0)
    assert not mark.exists()


@pytest.mark.parametrize("part", ["record", "state"])
def test_a_pickle_in_a_checkpoint_is_refused(tmp_path, bomb, part):
    content, mark = bomb
    folder = str(tmp_path / "ck")
    arrays = {"params/w": jax.numpy.arange(6.0)}
    manager = Manager(folder, Retention(), print)
    manager.save(1, arrays, {})
    manager.close()
    files = [path for path in (tmp_path / "ck" / "1" / part).rglob("*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(content)
    manager = Manager(folder, Retention(), print)
    with pytest.raises(CheckpointError):
        manager.restore_latest(lambda facts: jax.eval_shape(lambda: arrays), "stop")
    with contextlib.suppress(CheckpointError):
        manager.close()
    assert not mark.exists()
