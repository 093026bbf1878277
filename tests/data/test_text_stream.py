"""Streamed text equals the text, and never shows a partial character."""

import pytest

from data.text_stream import TextStream

TEXT = "añ\u20ac\U0001f600z"


class Bytes:
    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


class Words:
    """Every token except the first is preceded by a space, as with SentencePiece."""

    def decode(self, ids):
        return " ".join(f"w{i}" for i in ids)


def test_pieces_are_whole_characters_and_add_up():
    stream = TextStream(Bytes())
    pieces = [stream.push(byte) for byte in TEXT.encode()]
    assert [piece for piece in pieces if piece] == list(TEXT)
    assert stream.flush() == ""


def test_a_prompt_that_ends_inside_a_character_is_continued():
    euro = "\u20ac".encode()
    stream = TextStream(Bytes(), list(b"ab"))
    assert [stream.push(byte) for byte in euro] == ["", "", "\u20ac"]


@pytest.mark.parametrize("wrong", [b"\xff\xfe\xfd\xfcabc", b"\xe2\x82", b"\x80"])
def test_bytes_that_are_no_text_are_shown_as_such(wrong):
    stream = TextStream(Bytes())
    text = "".join(stream.push(byte) for byte in wrong) + stream.flush()
    assert text == wrong.decode("utf-8", errors="replace")


def test_blanks_between_tokens_are_kept():
    stream = TextStream(Words(), [7])
    assert [stream.push(1), stream.push(2), stream.flush()] == [" w1", " w2", ""]
