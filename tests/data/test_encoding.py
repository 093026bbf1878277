"""Faults of tokenizer libraries: ids that vary between calls, ids of special tokens, panics."""

import base64
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers

from data.tokenizer import make_tokenizer

ROOT = Path(__file__).parents[2]
LINES = ["some words to learn from", "other words, some of them longer", "</s> in a text"] * 20
EOS = "</s>"


def save(tokenizer: tokenizers.Tokenizer, folder: Path) -> str:
    path = str(folder / "tokenizer.json")
    tokenizer.save(path)
    return path


def byte_level(**options) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def words(*more: str, unk: str | None = "[UNK]") -> tokenizers.Tokenizer:
    names = ["[UNK]", "some", "words", *more] if unk else ["some", "words", *more]
    vocabulary = {name: number for number, name in enumerate(names)}
    model = models.WordLevel(vocabulary, unk_token=unk) if unk else models.WordLevel(vocabulary)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def unigram(unk: bool = True) -> tokenizers.Tokenizer:
    pieces = [("<unk>", 0.0), ("s", -2.0), ("<", -5.0), ("/", -5.0), (">", -5.0), (EOS, -0.1)]
    return tokenizers.Tokenizer(models.Unigram(pieces, 0 if unk else None, False))


def word_piece() -> tokenizers.Tokenizer:
    pieces = {"[UNK]": 0, "<": 1, "##/": 2, "##s": 3, "##>": 4, EOS: 5, "a": 6, "##" + EOS: 7}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def added() -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(EOS, special=False)])
    return tokenizer


def merged() -> tokenizers.Tokenizer:
    """Merges that produce the token, as in a model trained on texts that contain it."""
    names = ["[UNK]", *"</s>omea ", "</", "s>", EOS]
    merges = [("<", "/"), ("s", ">"), ("</", "s>")]
    vocabulary = {name: number for number, name in enumerate(names)}
    return tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="[UNK]"))


def lower_case() -> tokenizers.Tokenizer:
    tokenizer = words(EOS)
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


SPELLING = [added, merged, unigram, word_piece, lower_case, lambda: words(EOS)]


@pytest.mark.parametrize("make", SPELLING)
def test_text_never_gives_the_end_of_a_document(make, tmp_path):
    """Wherever a text spells the token, byte counts stay correct and the rest is unchanged."""
    tokenizer = make_tokenizer(save(make(), tmp_path), eos_token=EOS)
    library = tokenizers.Tokenizer.from_file(tokenizer.name)
    assert tokenizer.eos_id in library.encode(EOS).ids, "else there is nothing to prevent"

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.sampled_from([EOS, "</S>", "some", " ", "<", "/s>", "s", "a\n"])))
    def check(parts):
        text = "".join(parts).encode()
        ids, nbytes = tokenizer.encode(text)
        assert tokenizer.eos_id not in ids
        assert len(ids) == 0 or nbytes.sum() == len(text)
        if EOS not in "".join(parts).lower():
            assert ids.tolist() == library.encode("".join(parts)).ids

    check()


def test_an_end_that_text_can_spell_by_one_character_is_refused(tmp_path):
    path = save(words("#"), tmp_path)
    with pytest.raises(ValueError, match=r"^config\.data\.eos_token='#': text encodes to it"):
        make_tokenizer(path, eos_token="#")
    make_tokenizer(path, eos_token="words").encode(b"# words")  # by more: written otherwise


@pytest.mark.parametrize("option", ["eos_token", "bos_token"])
def test_an_end_that_is_the_unknown_token_is_refused(tmp_path, option):
    with pytest.raises(
        ValueError, match=rf"^config\.data\.{option}=.*begins or ends a document"
    ) as caught:
        make_tokenizer(save(words(), tmp_path), **{option: "[UNK]"})
    assert "\n" not in str(caught.value)


def test_a_sentencepiece_end_that_text_spells(tmp_path):
    """The model's own end is a control piece; a user-defined one is a piece of text."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(tmp_path / "m"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
        user_defined_symbols=["<end>"],
    )
    tokenizer = make_tokenizer(str(tmp_path / "m.model"))
    for text in (b"</s>", b"a</s>b <s>", b"<end> </s>"):
        ids, nbytes = tokenizer.encode(text)
        assert not np.isin([tokenizer.bos_id, tokenizer.eos_id], ids).any()
        assert nbytes.sum() == len(text)


def test_dropout_is_off_also_in_a_worker(tmp_path):
    library = byte_level()
    text = "some words to learn from"
    once = library.encode(text).ids
    library.model.dropout = 0.5
    assert len({tuple(library.encode(text).ids) for _ in range(20)}) > 1
    tokenizer = make_tokenizer(save(library, tmp_path))
    sent = pickle.loads(pickle.dumps(tokenizer))
    for each in (tokenizer, sent):
        assert all(each.encode(text.encode())[0].tolist() == once for _ in range(20))


def test_a_tokenizer_that_changes_its_mind_is_refused(tmp_path, monkeypatch):
    """For whatever reason; here a dropout that stays on."""
    library = byte_level()
    library.model.dropout = 0.5
    path = save(library, tmp_path)
    monkeypatch.setattr("data.tokenizer.HuggingFaceTokenizer._set_up", lambda self: None)
    with pytest.raises(ValueError, match=r"config\.data\.tokenizer=.* differently each time"):
        make_tokenizer(path)


@pytest.mark.parametrize("make", [lambda: words(unk=None), lambda: unigram(unk=False)])
def test_no_token_for_unknown_words_is_refused(tmp_path, make):
    with pytest.raises(ValueError, match=r"^config\.data\.tokenizer=.*unknown token") as caught:
        make_tokenizer(save(make(), tmp_path))
    assert "\n" not in str(caught.value)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path, monkeypatch):
    path = save(byte_level(), tmp_path)
    monkeypatch.setattr("tokenizers.Tokenizer.get_vocab", lambda *_, **__: {"a": 3})
    with pytest.raises(ValueError, match=r"its vocabulary has 6"):
        make_tokenizer(path)


@pytest.mark.parametrize("charsmap", [bytes(6), b"\xff\xff\xff\xff\0\0\0\0"])
def test_a_panic_of_a_library_is_one_line(tmp_path, charsmap):
    described = json.loads(byte_level().to_str())
    map_ = base64.b64encode(charsmap).decode()
    described["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": map_}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(described))
    code = f"""
import sys
from data.tokenizer import make_tokenizer
try:
    make_tokenizer({str(path)!r})
except ValueError as error:
    print(error, file=sys.stderr)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stderr.startswith(f"config.data.tokenizer='{path}': ")
    assert ran.stderr.count("\n") == 1


def test_what_a_library_prints_is_passed_on_where_nothing_fails(capfd):
    from data.encoding import library_errors

    with library_errors("x", "y"):
        subprocess.run(["sh", "-c", "echo a warning >&2"], check=True)
    assert capfd.readouterr().err == "a warning\n"
