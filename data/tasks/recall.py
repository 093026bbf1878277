"""Multi-query recall: keys with values first, then questions for them in random order.

    ab=v;    a key of two letters and its value, all keys different
    ab:v;    a question, whose v the loss counts

A quarter of the document is keys and values. Guessing is right once in 32.
"""

import numpy as np

from data.tasks.task import Written

LETTERS = b"abcdefghijklmnopqrstuvwxyz012345"
VALUES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ!#$%&*"
EVENT_BYTES = 5


def write(generator: np.random.Generator, length: int) -> Written:
    """Returns a document of this many bytes; the rest after the last question is blank."""
    events = length // EVENT_BYTES
    pairs = min(max(events // 4, 1), len(LETTERS) ** 2)
    keys = generator.permutation(len(LETTERS) ** 2)[:pairs]
    values = generator.integers(len(VALUES), size=pairs)
    # Every pair has its question before any has a second one.
    rounds = -(-(events - pairs) // pairs)
    asked = np.concatenate([generator.permutation(pairs) for _ in range(rounds)])[: events - pairs]
    told = [_event(keys[i], b"=", values[i]) for i in range(pairs)]
    questions = [_event(keys[i], b":", values[i]) for i in asked.tolist()]
    answers = EVENT_BYTES * np.arange(pairs, events) + EVENT_BYTES - 2
    return Written(b"".join(told + questions).ljust(length), answers)


def _event(key: int, sign: bytes, value: int) -> bytes:
    first, second = divmod(int(key), len(LETTERS))
    return bytes([LETTERS[first], LETTERS[second], *sign, VALUES[value], ord(";")])
