"""Palindromes: random letters, a bar, and the letters reversed, which the loss counts.

Guessing is right once in 32.
"""

import numpy as np

from data.tasks.task import Written

LETTERS = b"abcdefghijklmnopqrstuvwxyz012345"


def write(generator: np.random.Generator, length: int) -> Written:
    """Returns a palindrome of this many bytes; if the number is even, the last byte is a blank."""
    half = (length - 1) // 2
    letters = bytes(LETTERS[i] for i in generator.integers(len(LETTERS), size=half))
    text = letters + b"|" + letters[::-1]
    return Written(text.ljust(length), np.arange(half + 1, 2 * half + 1))
