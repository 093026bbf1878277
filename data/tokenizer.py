"""Text to token ids, with the number of UTF-8 bytes that each token stands for.

Bytes are what makes losses comparable between tokenizers: bits per byte = nats / ln 2 / bytes. So
`nbytes` adds up to the length of the text, whatever a tokenizer normalises away, merges or splits.
"""

import hashlib
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

BYTES = "bytes"


class Tokenizer(Protocol):
    """One way to write text as ids. Begin and end ids are for the caller to put around a document.

    name          how the config named it
    fingerprint   changes when the same text could give other ids
    vocab_size    ids are 0 .. vocab_size - 1, begin and end included
    """

    name: str
    fingerprint: str
    vocab_size: int
    bos_id: int
    eos_id: int

    def encode(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ids [n] int32, nbytes [n] int32); sum(nbytes) == len(text) unless n == 0.

        Bytes that are no UTF-8 are taken as they are ("bytes") or read as U+FFFD, one a byte.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids; begin and end ids have none. Part of a character is U+FFFD."""
        ...


def make_tokenizer(name: str, bos_token: str = "", eos_token: str = "") -> Tokenizer:
    """Opens the tokenizer that `config.data.tokenizer` names.

    Raises ValueError, in one line, where there is none or the file cannot be read as one.
    """
    if name != BYTES and not name.endswith((".json", ".model")):
        raise ValueError(
            f"config.data.tokenizer={name!r}: needs 'bytes', the path of a tokenizer.json (ends in "
            ".json) or of a SentencePiece model (ends in .model)"
        )
    if not name.endswith(".json") and (bos_token or eos_token):
        option = "bos_token" if bos_token else "eos_token"
        raise ValueError(
            f"config.data.{option}={bos_token or eos_token!r}: only a tokenizer.json takes it; "
            f"leave it empty with config.data.tokenizer={name!r}"
        )
    if name == BYTES:
        return ByteTokenizer()
    if not os.path.isfile(name):
        raise ValueError(
            f"config.data.tokenizer={name!r}: no such file (a folder's is usually called "
            "tokenizer.json or tokenizer.model)"
        )
    if name.endswith(".json"):
        return HuggingFaceTokenizer(name, bos_token, eos_token)
    return SentencePieceTokenizer(name)


class ByteTokenizer:
    """Ids 0-255 are the bytes, 256 begins a document and 257 ends it."""

    name = BYTES
    fingerprint = BYTES
    vocab_size = 258
    bos_id = 256
    eos_id = 257

    def encode(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        ids = np.frombuffer(text, np.uint8).astype(np.int32)
        return ids, np.ones(len(ids), np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json, read by the `tokenizers` library. No special token is added by it."""

    def __init__(self, path: str, bos_token: str = "", eos_token: str = ""):
        import tokenizers  # slow to import and needed by few

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(
                f"config.data.tokenizer={path!r}: not a tokenizer.json that the tokenizers library "
                f"reads ({_one_line(error)})"
            ) from None
        if not self._tokenizer.get_vocab(with_added_tokens=True):
            raise ValueError(
                f"config.data.tokenizer={path!r}: its vocabulary is empty; try one that was trained"
            )
        self._set_up()
        self.name = path
        self.fingerprint = f"{_digest(path)} {bos_token} {eos_token}"
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.bos_id = self._special("bos_token", bos_token)
        self.eos_id = self._special("eos_token", eos_token)

    def _set_up(self) -> None:
        # Settings of the file that would cut or fill documents behind our back.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # "<s>" in a text is three characters, not the begin of a document.
        self._tokenizer.encode_special_tokens = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a worker process. The library pickles its vocabulary but not all of its settings."""
        self.__dict__.update(state)
        self._set_up()

    def _special(self, option: str, token: str) -> int:
        if not token:
            self.vocab_size += 1
            return self.vocab_size - 1
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(
                f"config.data.{option}={token!r}: {self.name} has no such token; leave it empty to "
                "add an id after the vocabulary"
            )
        return found

    def encode(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        readable, ends = readable_text(text)
        encoding = self._tokenizer.encode(readable, add_special_tokens=False)
        ids = np.asarray(encoding.ids, np.int32)
        stops = np.asarray([stop for _, stop in encoding.offsets], np.int64)
        return ids, bytes_of_tokens(stops, ends)

    def decode(self, ids: Sequence[int]) -> str:
        special = (self.bos_id, self.eos_id)
        text = [int(i) for i in ids if i not in special]
        return self._tokenizer.decode(text, skip_special_tokens=False)


class SentencePieceTokenizer:
    """A SentencePiece model. Its own begin and end ids are used where it has them."""

    def __init__(self, path: str):
        import sentencepiece

        self._path = path
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=path)
        except Exception as error:  # the library raises RuntimeError or OSError
            raise ValueError(
                f"config.data.tokenizer={path!r}: not a SentencePiece model ({_one_line(error)})"
            ) from None
        self.name = path
        self.fingerprint = _digest(path)
        self.vocab_size = self._model.vocab_size()
        self.bos_id = self._special(self._model.bos_id())
        self.eos_id = self._special(self._model.eos_id())

    def _special(self, own: int) -> int:
        if own >= 0:
            return own
        self.vocab_size += 1
        return self.vocab_size - 1

    def encode(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        readable, ends = readable_text(text)
        mapped = self._model.encode(readable, return_type="offset_mapping")
        ids = np.asarray(mapped["ids"], np.int32)
        stops = np.asarray([stop for _, stop in mapped["offsets"]], np.int64)
        return ids, bytes_of_tokens(stops, ends)

    def decode(self, ids: Sequence[int]) -> str:
        special = (self.bos_id, self.eos_id)
        return self._model.decode([int(i) for i in ids if i not in special])


def readable_text(text: bytes) -> tuple[str, np.ndarray]:
    """Returns the text with U+FFFD for each byte that is no UTF-8, and where characters end.

    The second, [characters + 1] int64, holds at c the number of bytes of `text` that the first c
    characters were; a replaced byte counts as the one byte it was.
    """
    try:
        readable = text.decode("utf-8")
        is_start = (np.frombuffer(text, np.uint8) & 0xC0) != 0x80
        return readable, np.append(np.flatnonzero(is_start), len(text)).astype(np.int64)
    except UnicodeDecodeError:
        pass
    # surrogateescape gives exactly one lone surrogate (U+DC80 - U+DCFF) a bad byte.
    escaped = text.decode("utf-8", errors="surrogateescape")
    codes = np.frombuffer(escaped.encode("utf-32-le", errors="surrogatepass"), np.uint32).copy()
    bad = (codes >= 0xDC80) & (codes <= 0xDCFF)
    sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    sizes[bad] = 1
    codes[bad] = 0xFFFD
    readable = codes.tobytes().decode("utf-32-le")
    return readable, np.concatenate([[0], np.cumsum(sizes)])


def bytes_of_tokens(stops: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Shares the text's bytes out among its tokens by where each stops.

    stops [n]: characters up to each token's end. ends: as `readable_text` returns it. Returns
    [n] int32, which adds up to all bytes. Text that no token covers (dropped by normalisation)
    goes to the token after it, at the end to the last one; of tokens that share one character, the
    first gets its bytes.
    """
    if len(stops) == 0:
        return np.zeros(0, np.int32)
    reached = np.maximum.accumulate(ends[np.clip(stops, 0, len(ends) - 1)])
    reached[-1] = ends[-1]
    return np.diff(reached, prepend=0).astype(np.int32)


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
