"""Calls of a tokenizer's library: its failures in one line, and ids that text must never give.

Text cannot spell the begin or the end of a document. Libraries give these ids all the same, for
instance for a word of the vocabulary or an added token that is not marked special. Such a text is
cut inside the token and its parts are encoded by themselves, until none gives one of the ids.
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
    """Ids of a text, and where each token starts and stops in it, in characters; all [n]."""

    ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class Tokenizer(Protocol):
    """What is checked of one; see data/tokenizer.py."""

    name: str
    vocab_size: int
    bos_id: int
    eos_id: int

    def encode(self, text: bytes) -> tuple[np.ndarray, np.ndarray]: ...


class SpelledError(DataError):
    """Text that gives the id of a special token, whatever is done about it."""


def encode_text(
    encode: Callable[[str], Encoded], text: str, owner: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids, stops) of a text, without the ids that begin and end documents.

    Raises:
        DataError: the library fails.
        SpelledError: a single character gives one of these ids.
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
    """Returns places inside every special token."""
    starts, stops = encoded.starts[special], encoded.stops[special]
    if (short := stops - starts < 2).any():
        spelled = text[int(starts[short][0]) : int(stops[short][0])]
        raise SpelledError(
            f"config.data.tokenizer={owner.name!r}: the text {spelled!r} gives the id that begins "
            "or ends a document and cannot be encoded otherwise"
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
            f"config.data.tokenizer={owner.name!r}: gives the id {int(ids.max())} for a text; its "
            f"vocabulary has {owner.vocab_size}"
        )
    return encoded


# Words of no language, other scripts, signs, control characters, spaces, and nothing.
_PROBES = (
    "The quick brown fox\n\tjumps over  13 lazy dogs.",
    "Zqxjkv wvzzq-0x7f_ß éñ",
    "\u0416\u0443\u043a \u6f22\u5b57 \u0905\u0915 \U0001f389",
    "\x01\x7f\u00a0\u2028\ufffd\ue000",
    " ",
    "",
)


def check_tokenizer(tokenizer: Tokenizer, specials: list[tuple[str, str]]) -> None:
    """Refuses a tokenizer that cannot encode any text, or gives other ids every time.

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
                    f"{option}={token!r}: text can spell it ({one_line(error)}); try another "
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
    # As a document is cut into parts for encoding, parts of the token meet the edges.
    return [*texts, token[: len(token) // 2], token[len(token) // 2 :]]


def _check_repeatable(tokenizer: Tokenizer, text: str) -> None:
    first, *others = (tokenizer.encode(text.encode())[0].tolist() for _ in range(4))
    if any(other != first for other in others):
        raise UserError(
            f"config.data.tokenizer={tokenizer.name!r}: encodes {text!r} in another way each time; "
            "a resumed run could not be exact; try it without dropout or sampling"
        )


@contextlib.contextmanager
def library_errors(name: str, kind: str) -> Iterator[None]:
    """Turns any failure of a library into one line; what it printed itself is dropped then."""
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
    """Libraries write to the descriptor itself; it is passed on where nothing is raised."""
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
