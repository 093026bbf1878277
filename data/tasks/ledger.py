"""The ledger: keys get values, and queries ask for the newest value of a key, rows later too.

    k=v;    a write        ?k:v;    a query, whose v the loss counts        ....    filler

A document has 16 of 32 keys. All are written in its first row of 256 tokens, among queries and
filler; from then on an event in ten gives a key another value. Guessing is right once in 32.
"""

import numpy as np

from data.tasks.task import Written

ROW = 256  # tokens, including the begin id
KEYS = b"abcdefghijklmnopqrstuvwxyz012345"
VALUES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ!#$%&*"
KEYS_USED = 16
REWRITES = 0.1  # share of events after the first row
QUERIES = 0.6  # share of the other events
FILLER_BYTES = 8  # at most, of one event
_WRITE, _QUERY, _FILLER = range(3)
_BYTES = (4, 5, FILLER_BYTES)  # of an event, at most


def write(generator: np.random.Generator, length: int) -> Written:
    """Returns a ledger of exactly this many bytes."""
    book = _Book(generator)
    for event in _first_row(generator, min(length, ROW - 1)):
        book.add(event)
    while len(book.text) < length:
        rewrites = generator.random() < REWRITES
        book.add(_WRITE if rewrites else _other(generator))
    answers = np.asarray(book.answers, np.int64)
    return Written(bytes(book.text[:length]), answers[answers < length])


def _other(generator: np.random.Generator) -> int:
    return _QUERY if generator.random() < QUERIES else _FILLER


def _first_row(generator: np.random.Generator, length: int) -> list[int]:
    """The events of the first row: each key's write, and others that fit, in random order."""
    left = length - KEYS_USED * _BYTES[_WRITE]
    others: list[int] = []
    while left >= max(_BYTES):
        others.append(_other(generator))
        left -= _BYTES[others[-1]]
    events = generator.permutation([_WRITE] * (KEYS_USED - 1) + others).tolist()
    return [_WRITE, *events]


class _Book:
    """A ledger under construction."""

    def __init__(self, generator: np.random.Generator):
        self._generator = generator
        self._keys = generator.permutation(list(KEYS))[:KEYS_USED].tolist()
        self._values: dict[int, int] = {}  # of the keys written so far, the newest
        self.text = bytearray()
        self.answers: list[int] = []

    def add(self, event: int) -> None:
        draw = self._generator.integers
        if event == _WRITE:
            # Every key once, in their order, before any is written again.
            known = len(self._values)
            key = self._keys[known if known < KEYS_USED else draw(KEYS_USED)]
            value = self._values[key] = VALUES[draw(len(VALUES))]
            self.text += bytes([key, ord("="), value, ord(";")])
        elif event == _QUERY:
            key = self._keys[draw(len(self._values))]
            self.text += bytes([ord("?"), key, ord(":"), self._values[key], ord(";")])
            self.answers.append(len(self.text) - 2)
        else:
            self.text += b"." * int(draw(1, FILLER_BYTES + 1))
