"""Fine-tuning data: which of a record's texts are read, and what the loss counts."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from data.options import DataConfig
from data.stream import counted_parts
from errors import UserError
from tests.data.loader_cases import loader

PAIRS = [{"prompt": f"question {n}? ", "completion": f"answer {n}"} for n in range(12)]
PAIRS += [{"prompt": "", "completion": "alone"}, {"prompt": "nothing to say", "completion": ""}]
CHATS = [
    {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": f"1 + {n}?"},
            {"role": "assistant", "content": f"{n + 1}"},
            {"role": "user", "content": "sure?"},
            {"role": "assistant", "content": "yes, ü"},
        ]
    }
    for n in range(12)
] + [{"messages": [{"role": "assistant", "content": "hm"}, {"role": "user", "content": "?"}]}]


def config_of(tmp_path, records, loss_on, **options) -> DataConfig:
    lines = [json.dumps(record) if isinstance(record, dict) else record for record in records]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    given = {"source": "jsonl", "path": str(tmp_path), "eval_path": str(tmp_path), "epochs": 1}
    sizes = {"sequence_length": 16, "global_batch_size": 2}
    return DataConfig(**{**given, "loss_on": loss_on, **sizes, **options})


def read(config: DataConfig, decode) -> set[tuple[str, str, bool]]:
    """(text, the part of it that counts, whether the end id does) of each document."""
    with loader(config) as batches:
        eos, found = batches.tokenizer.eos_id, set()
        fields = [(b.tokens, b.targets, b.loss_weights) for b in batches]
    for row in range(config.global_batch_size):
        tokens, targets, weights = (
            np.concatenate([np.asarray(x)[0, row] for x in field]) for field in zip(*fields)
        )
        begin = 0
        for end in np.flatnonzero(tokens == eos):
            assert weights[end] == 0
            ids, counted = targets[begin:end], weights[begin:end] > 0
            kept = ids[counted & (ids != eos)]
            found.add((decode(ids[:-1].tolist()), decode(kept.tolist()), bool(counted[-1])))
            begin = end + 1
    return found


def of_bytes(ids: list[int]) -> str:
    return bytes(ids).decode()


def test_the_completion_counts_and_its_end(tmp_path):
    """Rows of 16 cut prompts and completions."""
    config = config_of(tmp_path, [*PAIRS, {"prompt": "x"}, "broken"], "completion")
    expected = {(pair["prompt"] + pair["completion"], pair["completion"], True) for pair in PAIRS}
    assert read(config, of_bytes) == expected


def test_the_assistants_part_counts(tmp_path):
    found = read(config_of(tmp_path, CHATS, "assistant"), of_bytes)
    expected = {
        (
            f"system: be brief\nuser: 1 + {n}?\nassistant: {n + 1}\nuser: sure?\n"
            "assistant: yes, ü\n",
            f"{n + 1}\nyes, ü\n",
            True,
        )
        for n in range(12)
    }
    # The end id is the assistant's where the last message is.
    assert found == expected | {("assistant: hm\nuser: ?\n", "hm\n", False)}


def test_no_token_has_bytes_of_prompt_and_completion(tmp_path):
    """A tokenizer that would merge "ab" across the border."""
    vocabulary = {"a": 0, "b": 1, "ab": 2, "[UNK]": 3}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    path = str(tmp_path / "tokenizer.json")
    tokenizer.save(path)
    records = [{"prompt": "aba", "completion": "bab"}] * 4
    config = config_of(tmp_path, records, "completion", tokenizer=path, sequence_length=8)
    with loader(config) as batches:
        batch = next(batches)
    # begin, ab, a | b, ab, end
    assert np.asarray(batch.targets)[0, 0, :6].tolist() == [2, 0, 1, 2, batches.tokenizer.eos_id, 0]
    assert np.asarray(batch.loss_weights)[0, 0, :6].tolist() == [0, 0, 1, 1, 1, 0]
    assert np.asarray(batch.target_bytes)[0, 0, :6].tolist() == [0, 0, 1, 2, 0, 0]


@pytest.mark.parametrize(
    ("record", "loss_on", "said"),
    [
        ({"prompt": "x", "text": "y"}, "completion", "'completion'.*'prompt', 'text'"),
        ({"messages": [{"role": "user"}]}, "assistant", "'role' and 'content'.*'messages'"),
        ({"messages": "text"}, "assistant", "config.data.loss_on='assistant'"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, record, loss_on, said):
    with pytest.raises(UserError, match=said):
        loader(config_of(tmp_path, [record] * 4, loss_on))


def test_only_jsonl_has_forms(tmp_path):
    with pytest.raises(UserError, match=r"config.data.loss_on.*source=jsonl"):
        loader(DataConfig(loss_on="completion"))


def test_parts_begin_and_end_where_ranges_do():
    ranges = np.asarray([[2, 4], [4, 5], [8, 11]], np.int64)
    parts = counted_parts(ranges, 3, 10)
    assert parts == [(3, 4, True), (4, 5, True), (5, 8, False), (8, 10, True)]
    assert counted_parts(None, 3, 10) == [(3, 10, True)]
    assert counted_parts(np.zeros((0, 2), np.int64), 3, 10) == [(3, 10, False)]
