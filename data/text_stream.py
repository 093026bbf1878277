"""Token ids to text as they arrive, without ever showing half a character."""

from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character is at most four bytes, so at most four tokens that are no character alone.
MOST_PENDING = 4


class Decoder(Protocol):
    """What a tokenizer offers for this: see data/tokenizer.py."""

    def decode(self, ids: list[int]) -> str: ...


class TextStream:
    """The text of a growing list of token ids, piece by piece.

    Some tokens are part of a character, and the text of a token may depend on the one before
    it (a leading blank). So a token is decoded with the tokens that were shown last, and kept back
    while its text ends inside a character.
    """

    def __init__(self, tokenizer: Decoder, context: list[int] | None = None):
        """context: ids whose text has been shown, such as the end of a prompt."""
        self._tokenizer = tokenizer
        self._shown, self._pending = list(context or [])[-MOST_PENDING:], list[int]()

    def push(self, token: int) -> str:
        """The text that this id completes; "" inside a character."""
        self._pending.append(token)
        if self._text().endswith(REPLACEMENT) and len(self._pending) < MOST_PENDING:
            return ""
        return self.flush()

    def flush(self) -> str:
        """The text of what was kept back, with U+FFFD for half a character."""
        text = self._text()
        if self._pending:
            self._shown, self._pending = self._pending, []
        return text

    def _text(self) -> str:
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode(self._shown + self._pending)[len(before) :]
