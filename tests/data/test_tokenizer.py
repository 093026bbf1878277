"""Tokenizers: ids decode back, and byte counts are right. Models are trained in the tests."""

import json
import pickle

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from data.text_stream import TextStream
from data.tokenizer import bytes_of_tokens, make_tokenizer, readable_text

LINES = [
    "def reader(text): return text  # an old line",
    "Straße, naïve café, 漢字 and 🎉 are in one line",
    "    indented\tlines, with  two  spaces and a new\nline",
] * 20
# Arbitrary text: any characters, and bytes that are not characters.
TEXTS = st.one_of(
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")),
    st.text(alphabet="aé漢🎉 \n\t<>s/", max_size=40).map(str.encode),
    st.lists(
        st.sampled_from([b"a", b"\xff", "é".encode(), b"\xe6\xbc", b" ", b"\xed\xa0\x80"])
    ).map(b"".join),
    st.binary(max_size=60),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """Returns tokenizer files by kind."""
    folder = tmp_path_factory.mktemp("tokenizers")
    byte_level = tokenizers.Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.train_from_iterator(
        LINES,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # Settings that must not leak into training: they would cut and fill documents.
    byte_level.enable_truncation(5)
    byte_level.enable_padding(length=9)
    byte_level.save(str(folder / "byte_level.json"))

    # Drops and changes text: lower case, accents off, white space gone, unknown words.
    lossy = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    lossy.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["[UNK]"], show_progress=False
    )
    lossy.train_from_iterator(LINES, trainer)
    lossy.save(str(folder / "lossy.json"))

    for name, options in {
        "unigram": {"model_type": "unigram", "byte_fallback": True, "vocab_size": 360},
        "bpe": {"model_type": "bpe", "bos_id": -1, "eos_id": -1, "vocab_size": 90},
    }.items():
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES),
            model_prefix=str(folder / name),
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
    return {path.stem: str(path) for path in folder.iterdir() if path.suffix != ".vocab"}


KINDS = ("bytes", "byte_level", "lossy", "unigram", "bpe")


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_add_up_and_ids_are_in_range(files, kind):
    tokenizer = make_tokenizer(files.get(kind, kind))

    @settings(max_examples=100, deadline=None)
    @given(text=TEXTS)
    def check(text):
        ids, nbytes = tokenizer.encode(text)
        assert ids.dtype == nbytes.dtype == np.int32
        assert len(ids) == len(nbytes)
        assert (nbytes >= 0).all()
        if len(ids):
            assert nbytes.sum() == len(text)
            assert 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
        assert not np.isin([tokenizer.bos_id, tokenizer.eos_id], ids).any()

    check()


def test_ids_spell_the_text(files):
    text = "def café(漢): return 🎉"
    ids, nbytes = make_tokenizer("bytes").encode(text.encode())
    assert bytes(ids.tolist()) == text.encode()
    assert (nbytes == 1).all()
    model = tokenizers.Tokenizer.from_file(files["byte_level"])
    model.no_truncation()
    ids, _ = make_tokenizer(files["byte_level"]).encode(text.encode())
    assert model.decode(ids.tolist()) == text
    ids, _ = make_tokenizer(files["unigram"]).encode(text.encode())
    assert (
        sentencepiece.SentencePieceProcessor(model_file=files["unigram"]).decode(ids.tolist())
        == text
    )


def test_bytes_stand_where_the_text_does(files):
    """Each token's bytes are those of its own text, not only correct in sum."""
    text = b"return text, two  lines\n    new"
    model = tokenizers.Tokenizer.from_file(files["byte_level"])
    ids, nbytes = make_tokenizer(files["byte_level"]).encode(text)
    assert 1 < len(ids) < len(text)
    # Byte-level tokens are spelled with one character a byte.
    assert nbytes.tolist() == [len(model.id_to_token(int(i))) for i in ids]
    model = sentencepiece.SentencePieceProcessor(model_file=files["unigram"])
    ids, nbytes = make_tokenizer(files["unigram"]).encode(b"return text")
    pieces = [model.id_to_piece(int(i)) for i in ids]
    # The mark that the first piece begins with is no byte of the text.
    assert nbytes.tolist() == [len(piece) - (i == 0) for i, piece in enumerate(pieces)]


def test_text_cannot_spell_special_tokens(files):
    tokenizer = make_tokenizer(files["byte_level"], bos_token="<s>", eos_token="</s>")
    ids, _ = tokenizer.encode(b"print('<s>', '</s>')")
    assert not np.isin([tokenizer.bos_id, tokenizer.eos_id], ids).any()


def test_dropped_text_goes_to_a_neighbour():
    # "  ab  c " with tokens "ab" [2, 4) and "c" [6, 7): 4 bytes up to b, then 3 and the rest.
    assert bytes_of_tokens(np.asarray([4, 7]), np.arange(9)).tolist() == [4, 4]
    # Two tokens share the character at 1, which has three bytes.
    assert bytes_of_tokens(np.asarray([1, 2, 2, 3]), np.asarray([0, 1, 4, 5])).tolist() == [
        1,
        3,
        0,
        1,
    ]
    assert bytes_of_tokens(np.zeros(0, np.int64), np.arange(3)).tolist() == []


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_unreadable_bytes_become_one_mark_each(text):
    readable, ends = readable_text(text)
    naive, naive_ends = [], [0]
    rest = text
    while rest:
        size = next((n for n in range(1, 5) if _decodes(rest[:n])), 0)
        naive.append(rest[:size].decode() if size else "\ufffd")
        naive_ends.append(naive_ends[-1] + (size or 1))
        rest = rest[size or 1 :]
    assert readable == "".join(naive)
    assert ends.tolist() == naive_ends


def _decodes(part: bytes) -> bool:
    try:
        return len(part.decode()) == 1
    except UnicodeDecodeError:
        return False


def test_special_ids(files):
    plain = make_tokenizer(files["byte_level"])
    named = make_tokenizer(files["byte_level"], bos_token="<s>", eos_token="</s>")
    size = tokenizers.Tokenizer.from_file(files["byte_level"]).get_vocab_size()
    assert (plain.bos_id, plain.eos_id, plain.vocab_size) == (size, size + 1, size + 2)
    assert (named.bos_id, named.eos_id, named.vocab_size) == (0, 1, size)
    assert plain.fingerprint != named.fingerprint
    own = make_tokenizer(files["unigram"])
    assert (own.bos_id, own.eos_id) == (1, 2)
    none = make_tokenizer(files["bpe"])
    assert none.vocab_size == none.eos_id + 1 == none.bos_id + 2
    text = make_tokenizer("bytes")
    assert (text.bos_id, text.eos_id, text.vocab_size) == (256, 257, 258)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_can_be_sent_one(files, kind):
    tokenizer = make_tokenizer(files.get(kind, kind))
    sent = pickle.loads(pickle.dumps(tokenizer))
    text = "Straße, 漢字 and <s> and more </s> than five tokens".encode()
    for given_, got in zip(tokenizer.encode(text), sent.encode(text)):
        np.testing.assert_array_equal(given_, got)
    assert sent.fingerprint == tokenizer.fingerprint


def test_errors_name_the_option(files, tmp_path):
    (tmp_path / "list.json").write_text(json.dumps([1, 2]))
    (tmp_path / "text.model").write_text("not a model")
    cases = [
        (("word",), "config.data.tokenizer='word': needs 'bytes'"),
        ((str(tmp_path / "none.json"),), "no such file"),
        ((str(tmp_path / "list.json"),), "not a tokenizer.json"),
        ((str(tmp_path / "text.model"),), "not a SentencePiece model"),
        (("bytes", "<s>"), "config.data.bos_token='<s>'"),
        ((files["byte_level"], "", "<end>"), "config.data.eos_token='<end>'"),
    ]
    for arguments, said in cases:
        with pytest.raises(ValueError) as caught:
            make_tokenizer(*arguments)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_an_empty_vocabulary_is_refused(tmp_path):
    path = str(tmp_path / "tokenizer.json")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({}, unk_token="[UNK]")).save(path)
    with pytest.raises(ValueError, match=r"config\.data\.tokenizer=.*vocabulary is empty"):
        make_tokenizer(path)


@pytest.mark.parametrize("kind", ["bytes", "byte_level", "unigram"])
def test_decoding_gives_the_text_back_without_its_begin_and_end(files, kind):
    tokenizer = make_tokenizer(files.get(kind, kind))
    text = "def café(漢): return 🎉"
    ids, _ = tokenizer.encode(text.encode())
    assert tokenizer.decode([tokenizer.bos_id, *ids.tolist(), tokenizer.eos_id]) == text


def test_streamed_text_of_a_tokenizer_is_its_text(files):
    tokenizer = make_tokenizer(files["byte_level"])
    text = "naïve 漢字 and 🎉 in one line"
    ids, _ = tokenizer.encode(text.encode())
    stream = TextStream(tokenizer)
    assert "".join(stream.push(int(i)) for i in ids) + stream.flush() == text
