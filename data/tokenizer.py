"""Tokenizers: text to token ids, with the number of UTF-8 bytes that each token represents.

Byte counts make losses comparable between tokenizers: bits per byte = nats / ln 2 / bytes.
`nbytes` therefore sums to the length of the text, whatever a tokenizer normalises, merges or
splits.
"""

import hashlib
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from data.encoding import Encoded, check_tokenizer, encode_text, library_errors
from errors import UserError

BYTES = "bytes"


class Tokenizer(Protocol):
    """An encoding of text as ids. The caller adds the begin and end ids around a document.

    name          its name in the config
    fingerprint   changes when the same text could encode to other ids
    vocab_size    ids are 0 .. vocab_size - 1, including the begin and end ids
    """

    name: str
    fingerprint: str
    vocab_size: int
    bos_id: int
    eos_id: int

    def encode(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ids [n] int32, nbytes [n] int32); sum(nbytes) == len(text) unless n == 0.

        Bytes that are not UTF-8 are kept ("bytes") or each read as U+FFFD (other tokenizers).
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the ids' text, without begin and end ids; U+FFFD for a partial character."""
        ...


def make_tokenizer(name: str, bos_token: str = "", eos_token: str = "") -> Tokenizer:
    """Opens the tokenizer that `config.data.tokenizer` names.

    Raises:
        UserError: there is no such tokenizer, its file cannot be read, it cannot encode arbitrary
            text, its ids vary between calls, or text encodes to its begin or end id.
    """
    if name != BYTES and not name.endswith((".json", ".model")):
        raise UserError(
            f"config.data.tokenizer={name!r}: needs 'bytes', the path of a tokenizer.json (ends in "
            ".json) or of a SentencePiece model (ends in .model)"
        )
    if not name.endswith(".json") and (bos_token or eos_token):
        option = "bos_token" if bos_token else "eos_token"
        raise UserError(
            f"config.data.{option}={bos_token or eos_token!r}: only a tokenizer.json takes it; "
            f"leave it empty with config.data.tokenizer={name!r}"
        )
    if name == BYTES:
        return ByteTokenizer()
    if not os.path.isfile(name):
        raise UserError(
            f"config.data.tokenizer={name!r}: no such file (in a model's folder it is usually "
            "called tokenizer.json or tokenizer.model)"
        )
    if name.endswith(".json"):
        with library_errors(name, "a tokenizer.json that the tokenizers library reads"):
            given = [("config.data.bos_token", bos_token), ("config.data.eos_token", eos_token)]
            texts = [(option, token) for option, token in given if token]
            tokenizer: Tokenizer = HuggingFaceTokenizer(name, bos_token, eos_token)
            check_tokenizer(tokenizer, texts)
            return tokenizer
    with library_errors(name, "a SentencePiece model"):
        tokenizer = model = SentencePieceTokenizer(name)
        check_tokenizer(
            tokenizer, [("config.data.tokenizer", text) for text in model.special_texts]
        )
        return tokenizer


class ByteTokenizer:
    """Ids 0 to 255 are the bytes; 256 begins a document and 257 ends it."""

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
    """A tokenizer.json, read by the `tokenizers` library, without its automatic special tokens."""

    def __init__(self, path: str, bos_token: str = "", eos_token: str = ""):
        import tokenizers  # slow to import and needed by few

        self._tokenizer = tokenizers.Tokenizer.from_file(path)
        if not self._tokenizer.get_vocab(with_added_tokens=True):
            raise UserError(
                f"config.data.tokenizer={path!r}: its vocabulary is empty; try one that was trained"
            )
        self._set_up()
        self.name = path
        self.fingerprint = f"{_digest(path)} {bos_token} {eos_token}"
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.bos_id = self._special("bos_token", bos_token)
        self.eos_id = self._special("eos_token", eos_token)

    def _set_up(self) -> None:
        # Override settings of the file that truncate or pad documents, or make ids random.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None
        # "<s>" in a text is three characters, not the beginning of a document.
        self._tokenizer.encode_special_tokens = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickles, in a worker process. The library pickles only some of its settings."""
        self.__dict__.update(state)
        self._set_up()

    def _special(self, option: str, token: str) -> int:
        if not token:
            self.vocab_size += 1
            return self.vocab_size - 1
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise UserError(
                f"config.data.{option}={token!r}: {self.name} has no such token; leave it empty to "
                "add an id after the vocabulary"
            )
        return found

    def encode(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        readable, ends = readable_text(text)
        ids, stops = encode_text(self._encode, readable, self)
        return ids, bytes_of_tokens(stops, ends)

    def _encode(self, text: str) -> Encoded:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        offsets = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
        return Encoded(np.asarray(encoding.ids, np.int64), offsets[:, 0], offsets[:, 1])

    def decode(self, ids: Sequence[int]) -> str:
        special = (self.bos_id, self.eos_id)
        text = [int(i) for i in ids if i not in special]
        return self._tokenizer.decode(text, skip_special_tokens=False)


class SentencePieceTokenizer:
    """A SentencePiece model. Its own begin and end ids are used if it has them."""

    def __init__(self, path: str):
        import sentencepiece

        self._path = path
        self._model = sentencepiece.SentencePieceProcessor(model_file=path)
        self.name = path
        self.fingerprint = _digest(path)
        self.vocab_size = self._model.vocab_size()
        self.bos_id = self._special(self._model.bos_id())
        self.eos_id = self._special(self._model.eos_id())

    @property
    def special_texts(self) -> list[str]:
        """The text of the begin and end tokens that the model has."""
        own = (self._model.bos_id(), self._model.eos_id())
        return [self._model.id_to_piece(number) for number in own if number >= 0]

    def _special(self, own: int) -> int:
        if own >= 0:
            return own
        self.vocab_size += 1
        return self.vocab_size - 1

    def encode(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        readable, ends = readable_text(text)
        ids, stops = encode_text(self._encode, readable, self)
        return ids, bytes_of_tokens(stops, ends)

    def _encode(self, text: str) -> Encoded:
        mapped = self._model.encode(text, return_type="offset_mapping")
        offsets = np.asarray(mapped["offsets"], np.int64).reshape(-1, 2)
        return Encoded(np.asarray(mapped["ids"], np.int64), offsets[:, 0], offsets[:, 1])

    def decode(self, ids: Sequence[int]) -> str:
        special = (self.bos_id, self.eos_id)
        return self._model.decode([int(i) for i in ids if i not in special])


def readable_text(text: bytes) -> tuple[str, np.ndarray]:
    """Returns the text, with U+FFFD for each byte that is not UTF-8, and its characters' ends.

    Element c of the ends, [characters + 1] int64, is the number of bytes of `text` that the first c
    characters took; a replaced byte counts as one byte.
    """
    try:
        readable = text.decode("utf-8")
        is_start = (np.frombuffer(text, np.uint8) & 0xC0) != 0x80
        return readable, np.append(np.flatnonzero(is_start), len(text)).astype(np.int64)
    except UnicodeDecodeError:
        pass
    # surrogateescape decodes each bad byte to exactly one lone surrogate (U+DC80 to U+DCFF).
    escaped = text.decode("utf-8", errors="surrogateescape")
    codes = np.frombuffer(escaped.encode("utf-32-le", errors="surrogatepass"), np.uint32).copy()
    bad = (codes >= 0xDC80) & (codes <= 0xDCFF)
    sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    sizes[bad] = 1
    codes[bad] = 0xFFFD
    readable = codes.tobytes().decode("utf-32-le")
    return readable, np.concatenate([[0], np.cumsum(sizes)])


def bytes_of_tokens(stops: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Distributes the text's bytes among its tokens, by the end of each token.

    stops [n]: characters up to each token's end. ends: as returned by `readable_text`. Returns
    [n] int32, which sums to all bytes. Text that no token covers (dropped by normalisation) counts
    for the next token, or at the end for the last one. Of tokens that share a character, the first
    gets its bytes.
    """
    if len(stops) == 0:
        return np.zeros(0, np.int32)
    reached = np.maximum.accumulate(ends[np.clip(stops, 0, len(ends) - 1)])
    reached[-1] = ends[-1]
    return np.diff(reached, prepend=0).astype(np.int32)


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
