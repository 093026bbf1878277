"""Generated documents: the interface of a task, and a reader that generates them on access.

To write a task, add a module with a function like `ledger.write` and add it to registry.py. A
document consists of bytes and of the positions of its answers; the loss counts only answers.
"""

import ast
import hashlib
import inspect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from data.readers.reader import Document, hashes_of_numbers


class Written(NamedTuple):
    """A generated document.

    answers: [n] int64, ascending: the bytes of `text` that the loss counts.
    """

    text: bytes
    answers: np.ndarray


# Writes a document of exactly this many bytes, with random numbers from the generator.
type Write = Callable[[np.random.Generator, int], Written]


class TaskReader:
    """Documents of a task, each generated from (seed, number), so that nothing is stored.

    length: tokens per document, including begin and end ids. count: documents per epoch.
    """

    def __init__(self, write: Write, *, length: int, count: int, seed: int):
        self._write, self._length, self._seed = write, length, seed
        self.sizes = np.full(count, length - 2, np.int64)

    def __len__(self) -> int:
        return len(self.sizes)

    def fingerprint(self) -> str:
        """The identity of the documents; it changes with the code that writes them."""
        module = inspect.getmodule(self._write)
        assert module is not None
        code = hashlib.sha256(without_prose(inspect.getsource(module)).encode()).hexdigest()[:16]
        return f"of {self._length} tokens, seed {self._seed}, by {code}"

    def hashes(self) -> np.ndarray:
        return hashes_of_numbers(len(self))

    def __getitem__(self, index: int) -> Document:
        generator = np.random.default_rng([self._seed, index])
        text, answers = self._write(generator, self._length - 2)
        return Document(text, counted=np.stack([answers, answers + 1], axis=1))


def without_prose(source: str) -> str:
    """Python source without comments and docstrings, whose wording changes no document."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
