"""Stacks: values are pushed onto one of 16 stacks and popped from it, last in, first out.

    +sv    pushes v onto stack s        -sv    pops it; the loss counts v

Guessing is right once in 32.
"""

import numpy as np

from data.tasks.task import Written

STACKS = b"abcdefghijklmnop"
VALUES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ!#$%&*"
EVENT_BYTES = 3


def write(generator: np.random.Generator, length: int) -> Written:
    """Returns events of this many bytes in total; the rest after the last event is blank."""
    held: dict[int, list[int]] = {stack: [] for stack in STACKS}
    text, answers = bytearray(), list[int]()
    pops = generator.random(length // EVENT_BYTES) < 0.5
    stacks = generator.choice(list(STACKS), len(pops)).tolist()
    values = generator.choice(list(VALUES), len(pops)).tolist()
    for stack, value, pop in zip(stacks, values, pops.tolist()):
        if pop and held[stack]:
            answers.append(len(text) + 2)
            text += bytes([ord("-"), stack, held[stack].pop()])
        else:
            held[stack].append(value)
            text += bytes([ord("+"), stack, value])
    return Written(bytes(text).ljust(length), np.asarray(answers, np.int64))
