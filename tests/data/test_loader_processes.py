"""Two processes of two devices each load what one process would, and end together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from data.loader import make_loader
from data.options import DataConfig
from tests.trainer import take_port

ROOT = Path(__file__).parents[2]

# Mesh over (data, context), and the order of the four devices in it: rows split by process; every
# row on both processes; each process with half of every row.
CASES = [((2, 2), [0, 1, 2, 3]), ((1, 4), [0, 1, 2, 3]), ((2, 2), [0, 2, 1, 3])]

CHILD = """
import json, sys
sys.path.insert(0, {root!r})
import jax
jax.config.update("jax_num_cpu_devices", 2)
given = json.loads(sys.argv[1])
jax.distributed.initialize(given["address"], 2, given["process"])
from tests.data.test_loader_processes import make_mesh, run
results = [run(case, given["options"]) for case in given["cases"]]
options = dict(given["options"], eval_fraction=(0.3, 0.6)[given["process"]])
try:
    run(given["cases"][0], options)
except ValueError as error:
    results.append(str(error))
json.dump(results, open(given["to"], "w"))
"""


def make_mesh(shape: list[int], order: list[int]) -> Mesh:
    devices = np.asarray(jax.devices())[order].reshape(shape[0], 1, 1, shape[1], 1)
    return Mesh(devices, ("data", "fsdp", "expert", "context", "tensor"))


def run(case: tuple[list[int], list[int]], options: dict) -> dict:
    """Returns a process's part of an epoch and of evaluation: its shards by position."""
    mesh = make_mesh(*case)
    seen: dict = {"shards": [], "batches": {}, "totals": {}}
    for split in ("train", "eval"):
        loader = make_loader(
            DataConfig(**options), split=split, mesh=mesh, seed=7, windows=2, positions=True
        )
        count = 0
        for count, batch in enumerate(loader, 1):
            for name, field in batch._asdict().items():
                for shard in field.addressable_shards:
                    place = [s.indices(n)[:2] for s, n in zip(shard.index, field.shape)]
                    seen["shards"].append(
                        [split, count, name, place, np.asarray(shard.data).tolist()]
                    )
            if (split, count) == ("train", 4):
                seen["state"] = loader.state()
        seen["batches"][split] = count
        seen["totals"][split] = loader.summary()
        seen["rows"] = loader._rows
        loader.close()
    return seen


@pytest.mark.parametrize("mixed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_load_what_one_does(tmp_path, mixed):
    generator = np.random.default_rng(1)
    for number, size in enumerate(generator.integers(1, 300, 30)):
        (tmp_path / f"{number:02}.txt").write_bytes(generator.bytes(int(size)))
    options = {
        "source": "text",
        "path": str(tmp_path),
        "eval_fraction": 0.3,
        "sequence_length": 32,
        "global_batch_size": 4,
        "epochs": 1,
    }
    if mixed:
        mixture = f"2 text {options.pop('path')}; 1 ledger"
        options |= {"source": "stdlib", "mixture": mixture}
        options |= {"task_length": 256, "task_documents": 40}
    address = f"localhost:{take_port()}"
    outputs = [tmp_path.parent / f"{tmp_path.name}.{process}.json" for process in range(2)]
    children = []
    for process, output in enumerate(outputs):
        given = {"address": address, "process": process, "options": options, "cases": CASES}
        command = [sys.executable, "-c", CHILD.format(root=str(ROOT))]
        children.append(
            subprocess.Popen(
                [*command, json.dumps({**given, "to": str(output)})],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
        )
    try:
        assert [child.wait(timeout=120) for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill()
    for case, *results in zip(CASES, *(json.loads(output.read_text()) for output in outputs)):
        alone = run(case, options)
        whole = {json.dumps(shard) for shard in alone["shards"]}
        shares = [{json.dumps(shard) for shard in result["shards"]} for result in results]
        assert shares[0] | shares[1] == whole
        assert all(len(share) < len(whole) for share in shares)
        for result in results:
            assert result["batches"] == alone["batches"]
            assert result["state"] == alone["state"]
            assert result["totals"] == alone["totals"]  # the run's, not the process's share
        split_rows = case[1] == [0, 1, 2, 3] and case[0][0] == 2
        assert [result["rows"] for result in results] == (
            [[0, 1], [2, 3]] if split_rows else [[0, 1, 2, 3]] * 2
        )
    for output in outputs:
        refusal = json.loads(output.read_text())[-1]
        option = "mixture" if mixed else "eval_fraction"
        assert refusal.startswith(
            f"config.data.{option}: process 1 reads other data than process 0"
        )
    # The rows are uneven: one process's own streams end before the other's.
    assert alone["batches"]["train"] > 10
