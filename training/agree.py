"""Checks that all processes of a run use the same options, code and libraries.

They compare before JAX looks for devices, so before anything is compiled or read. Otherwise a
process with another learning rate would train silently, and one that evaluates at other steps would
wait forever. The data are compared when they are opened (data/loader.py).
"""

import hashlib
import importlib.metadata
import json
import os
import pathlib
import time
from typing import Protocol

from ml_collections import ConfigDict

from errors import UserError

# Options that may differ: resources and paths of a host, and what only process 0 does. (Data and
# tokenizer are compared by content.) --workdir, --coordinator and --process_id are not compared
# either; opening the checkpoint folder checks that all processes see the same one.
MAY_DIFFER = frozenset(
    {
        "train.compilation_cache",
        "data.path",
        "data.eval_path",
        "data.tokenizer",
        "data.workers",
        "data.prefetch",
        "log.every",
        "profile.start",
        "profile.steps",
    }
)
# Other settings that determine which program is compiled, or what it computes.
LIBRARIES = ("jax", "jaxlib", "libtpu", "numpy", "optax", "orbax-checkpoint", "tokenizers")
ENVIRONMENT = (
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_DEFAULT_PRNG_IMPL",
    "JAX_ENABLE_X64",
    "JAX_PLATFORMS",
    "JAX_THREEFRY_PARTITIONABLE",
    "LIBTPU_INIT_ARGS",
)
CODE = ("checkpoints", "data", "kernels", "model", "training", "errors.py", "options.py")
_ROOT = pathlib.Path(__file__).parents[1]
_POLL_SECONDS = 0.1

Values = dict[str, str]


class Store(Protocol):
    """A key-value store that all processes see: the client of JAX's coordination service."""

    def key_value_set(self, key: str, value: str) -> None: ...

    def key_value_try_get(self, key: str) -> str:
        """Raises if there is no such key yet."""


def values_of(config: ConfigDict, init_from: str) -> Values:
    """Everything that must be equal, by the names used in the error."""
    values = {
        f"config.{group}.{name}": repr(value)
        for group, options in config.items()
        for name, value in options.items()
        if f"{group}.{name}" not in MAY_DIFFER
    }
    values["--init_from"] = repr(init_from)
    values |= {name: os.environ.get(name, "(not set)") for name in ENVIRONMENT}
    values |= {f"the version of {name}": _version(name) for name in LIBRARIES}
    return values | {"the code of the trainer": code_digest(_ROOT)}


def code_digest(root: pathlib.Path) -> str:
    """A digest of the product's Python files by their relative paths."""
    digest = hashlib.sha256()
    for entry in CODE:
        files = sorted((root / entry).rglob("*.py")) if (root / entry).is_dir() else [root / entry]
        for file in files:
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def check(store: Store, values: Values, process: int, processes: int) -> None:
    """Compares all processes' values with those of process 0.

    Raises:
        UserError: the same line in every process.
    """
    store.key_value_set(f"agree/values/{process}", json.dumps(values))
    if process == 0:
        found = [json.loads(_wait(store, f"agree/values/{i}")) for i in range(processes)]
        verdict = first_difference(found)
        store.key_value_set("agree/verdict", verdict or "equal")
    else:
        verdict = _wait(store, "agree/verdict").removeprefix("equal")
    if verdict:
        raise UserError(verdict)


def first_difference(found: list[Values]) -> str:
    """A line about the first value that differs from that of process 0, "" if there is none."""
    first = found[0]
    for process, values in enumerate(found):
        for name in sorted({*first, *values}):
            here, there = first.get(name, "(none)"), values.get(name, "(none)")
            if here != there:
                return (
                    f"{name}: needs to be equal in all processes; it is {there} in process "
                    f"{process} and {here} in process 0; try the same command, code and "
                    "environment for all"
                )
    return ""


def _wait(store: Store, key: str) -> str:
    """The value of a key, once it is set. A peer that dies ends this process (its heartbeat)."""
    import jax

    while True:
        try:
            return store.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
        time.sleep(_POLL_SECONDS)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
