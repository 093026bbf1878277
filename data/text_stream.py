"""Turns token ids into text as they arrive, without ever showing a partial character."""

from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes, so it consists of at most four tokens.
MOST_PENDING = 4


class Decoder(Protocol):
    """The part of a tokenizer that is needed here; see data/tokenizer.py."""

    def decode(self, ids: list[int]) -> str: ...


class TextStream:
    """The text of a growing list of token ids, piece by piece.

    A token may be only part of a character, and its text may depend on the token before it (a
    leading space). A token is therefore decoded together with the tokens shown last, and held back
    while its text ends inside a character.
    """

    def __init__(self, tokenizer: Decoder, context: list[int] | None = None):
        """context: ids whose text has been shown, such as the end of a prompt."""
        self._tokenizer = tokenizer
        self._shown, self._pending = list(context or [])[-MOST_PENDING:], list[int]()

    def push(self, token: int) -> str:
        """Returns the text that this id completes; "" inside a character."""
        self._pending.append(token)
        if self._text().endswith(REPLACEMENT) and len(self._pending) < MOST_PENDING:
            return ""
        return self.flush()

    def flush(self) -> str:
        """Returns the text held back, with U+FFFD for a partial character."""
        text = self._text()
        if self._pending:
            self._shown, self._pending = self._pending, []
        return text

    def _text(self) -> str:
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode(self._shown + self._pending)[len(before) :]
