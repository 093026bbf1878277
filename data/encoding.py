"""Calls a tokenizer library: turns its failures into one line, and keeps special ids out of text.

Text must not encode to the begin or end id of a document. Libraries nevertheless return these ids,
for instance for a word of the vocabulary or for an added token that is not marked special. Such a
text is cut inside the token, and its parts are encoded separately, until no part encodes to one of
these ids.
"""

import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from errors import DataError, TrainerError, UserError


class Encoded(NamedTuple):
    """Ids of a text, and the start and stop of each token in it, in characters; all [n]."""

    ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class Tokenizer(Protocol):
    """The part of a tokenizer that is checked here; see data/tokenizer.py."""

    name: str
    vocab_size: int
    bos_id: int
    eos_id: int

    def encode(self, text: bytes) -> tuple[np.ndarray, np.ndarray]: ...


class SpelledError(DataError):
    """A text that encodes to a special id and cannot be cut any further."""


def encode_text(
    encode: Callable[[str], Encoded], text: str, owner: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids, stops) of a text, free of the ids that begin and end documents.

    Raises:
        DataError: the library fails.
        SpelledError: a single character encodes to one of these ids.
    """
    ids, stops = [], []
    parts = [(0, text)]  # what is left to encode, last part first
    while parts:
        start, part = parts.pop()
        encoded = _call(encode, part, owner)
        special = (encoded.ids == owner.bos_id) | (encoded.ids == owner.eos_id)
        if not special.any():
            ids.append(encoded.ids)
            stops.append(encoded.stops + start)
            continue
        cuts = _cuts(encoded, special, part, owner)
        bounds = [0, *cuts, len(part)]
        pieces = [(start + a, part[a:b]) for a, b in itertools.pairwise(bounds)]
        parts += reversed(pieces)
    return np.concatenate(ids).astype(np.int32), np.concatenate(stops)


def _cuts(encoded: Encoded, special: np.ndarray, text: str, owner: Tokenizer) -> list[int]:
    """Returns a position inside each special token."""
    starts, stops = encoded.starts[special], encoded.stops[special]
    if (short := stops - starts < 2).any():
        spelled = text[int(starts[short][0]) : int(stops[short][0])]
        raise SpelledError(
            f"config.data.tokenizer={owner.name!r}: the text {spelled!r} encodes to the id that "
            "begins or ends a document, and no other encoding is possible"
        )
    return sorted({int(middle) for middle in (starts + stops) // 2})


def _call(encode: Callable[[str], Encoded], text: str, owner: Tokenizer) -> Encoded:
    try:
        encoded = encode(text)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of a Rust library is not an Exception
        raise DataError(
            f"config.data.tokenizer={owner.name!r}: cannot encode {text[:40]!r} "
            f"({one_line(error)}); try a tokenizer with an unknown token, or repair its file"
        ) from None
    ids = encoded.ids
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < owner.vocab_size:
        raise DataError(
            f"config.data.tokenizer={owner.name!r}: returned the id {int(ids.max())}; its "
            f"vocabulary has {owner.vocab_size}"
        )
    return encoded


# English, nonsense words, other scripts, an emoji, control characters, a space, the empty text.
_PROBES = (
    "The quick brown fox\n\tjumps over  13 lazy dogs.",
    "Zqxjkv wvzzq-0x7f_ß éñ",
    "\u0416\u0443\u043a \u6f22\u5b57 \u0905\u0915 \U0001f389",
    "\x01\x7f\u00a0\u2028\ufffd\ue000",
    " ",
    "",
)


def check_tokenizer(tokenizer: Tokenizer, specials: list[tuple[str, str]]) -> None:
    """Refuses a tokenizer that cannot encode arbitrary text, or whose ids vary between calls.

    Args:
        specials: (option, text) of tokens that begin or end a document.

    Raises:
        UserError: one line that names the option.
    """
    try:
        for option, token in specials:
            try:
                for text in spellings(token):
                    _check_repeatable(tokenizer, text)
            except SpelledError as error:
                raise UserError(
                    f"{option}={token!r}: text encodes to it ({one_line(error)}); try another "
                    "token, or leave it empty to add an id after the vocabulary"
                ) from None
        for probe in _PROBES:
            _check_repeatable(tokenizer, probe)
    except DataError as error:
        raise UserError(str(error)) from None


def spellings(token: str) -> list[str]:
    """Returns texts that contain a token's own text: alone, inside words, at edges, repeated."""
    texts = [token, token.lower(), token.upper(), token * 3]
    around = (("a", "b"), ("a ", " b"), ("", " a"), ("a ", ""), ("\n", "\n"), ("a", ""))
    texts += [before + token + after for before, after in around]
    # A document is cut into parts for encoding, so a part may begin or end inside the token.
    return [*texts, token[: len(token) // 2], token[len(token) // 2 :]]


def _check_repeatable(tokenizer: Tokenizer, text: str) -> None:
    first, *others = (tokenizer.encode(text.encode())[0].tolist() for _ in range(4))
    if any(other != first for other in others):
        raise UserError(
            f"config.data.tokenizer={tokenizer.name!r}: encodes {text!r} differently each time, so "
            "a resumed run would not be exact; try it without dropout or sampling"
        )


@contextlib.contextmanager
def library_errors(name: str, kind: str) -> Iterator[None]:
    """Turns any failure of a library into a one-line error and drops what the library printed."""
    try:
        with _stderr_held_back():
            yield
    except (TrainerError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of a Rust library is not an Exception
        raise UserError(
            f"config.data.tokenizer={name!r}: not {kind} ({one_line(error)}); try another file"
        ) from None


@contextlib.contextmanager
def _stderr_held_back() -> Iterator[None]:
    """Buffers what libraries write to the stderr descriptor; prints it if nothing is raised."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        before = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.truncate(0)
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)
            held.seek(0)
            if text := held.read():
                os.write(2, text)


def one_line(error: BaseException) -> str:
    """The text of an error in one line of bounded length."""
    return " ".join(str(error).split())[:200] or type(error).__name__
