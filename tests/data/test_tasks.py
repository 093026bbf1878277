"""Generated documents: rules of each task, checked by a separate parser; determinism; positions."""

import re
from collections import defaultdict

import numpy as np
import pytest

from data.documents import open_source
from data.options import TASKS as NAMES
from data.options import DataConfig
from data.tasks import ledger, palindrome, recall, stack
from data.tasks.registry import TASKS
from data.tasks.task import without_prose
from errors import UserError
from tests.data.loader_cases import change, loader, take

CONFIG = DataConfig(
    source="ledger",
    task_length=512,
    task_documents=200,
    sequence_length=128,
    global_batch_size=4,
)


def written(task, length: int, seed: int = 0):
    made = task.write(np.random.default_rng(seed), length)
    assert len(made.text) == length and made.answers.dtype == np.int64
    return made.text.decode(), made.answers.tolist()


@pytest.mark.parametrize("length", [254, 2046, 20_000])
def test_a_ledgers_answers_are_the_newest_values(length):
    text, answers = written(ledger, length)
    newest, writes, expected = {}, [], []
    for event in re.finditer(r"(\?)?(.)[=:](.);|\.", text):
        if event[0] == ".":
            continue
        if event[1]:
            assert event[3] == newest[event[2]]
            expected.append(event.start(3))
        else:
            newest[event[2]] = event[3]
            writes.append((event.start(), event[2]))
    # An answer of an event that the end cuts off counts, if it is there.
    assert answers[: len(expected)] == expected and len(answers) - len(expected) <= 1
    first = [key for start, key in writes if start < ledger.ROW]
    assert len(set(first[: ledger.KEYS_USED])) == ledger.KEYS_USED == len(newest)
    if length == 20_000:
        rewrites = len(writes) - ledger.KEYS_USED
        events = len(re.findall(r"[=:]", text[ledger.ROW :])) / (
            ledger.REWRITES + (1 - ledger.REWRITES) * ledger.QUERIES
        )
        # About 3,400 events: four standard deviations are 0.02.
        assert abs(rewrites / events - ledger.REWRITES) < 0.02


def test_questions_ask_for_what_was_told():
    text, answers = written(recall, 1003)
    told, asked = {}, []
    for event in re.finditer(r"(..)([=:])(.);", text):
        if event[2] == "=":
            assert event[1] not in told and not asked
            told[event[1]] = event[3]
        else:
            assert told[event[1]] == event[3]
            asked.append(event.start(3))
    assert asked == answers and len(told) == 50 and len(asked) == 150
    # Every pair has its question before any has a second one.
    assert len({text[place - 3 : place - 1] for place in answers[:50]}) == 50


def test_palindromes_read_alike_backwards():
    text, answers = written(palindrome, 1000)
    assert text[:999] == text[:999][::-1] and text[999] == " "
    assert answers == list(range(500, 999))


def test_stacks_give_the_last_first():
    text, answers = written(stack, 1000)
    held, popped = defaultdict(list), []
    for event in re.finditer(r"([+-])(.)(.)", text.rstrip()):
        if event[1] == "+":
            held[event[2]].append(event[3])
        else:
            assert held[event[2]].pop() == event[3]
            popped.append(event.start(3))
    assert popped == answers and len(popped) > 100


def test_registry_and_options_name_the_same_tasks():
    assert tuple(TASKS) == NAMES


@pytest.mark.parametrize("task", NAMES)
def test_documents_follow_from_seed_and_number(task):
    config = change(CONFIG, source=task)
    source, again = (open_source(config, "train") for _ in range(2))
    other = open_source(change(config, task_seed=1), "train")
    assert source.fingerprint == again.fingerprint != other.fingerprint
    texts = [source[number].text for number in range(20)]
    assert texts == [again[number].text for number in range(20)]
    assert len(set(texts) | {other[number].text for number in range(20)}) == 40
    assert all(len(text) == 510 for text in texts)


def test_answers_alone_count_and_a_position_is_exact():
    """The weights of the batches, beside those of the documents; and resumed in the middle."""
    with loader(CONFIG) as source:
        batches = take(source, 3)
        position = source.state()
        batches += take(source, 5)
    for row in range(4):
        tokens, targets, weights = (
            np.concatenate([np.asarray(batch[name])[0, row] for batch in batches]).reshape(2, 512)
            for name in ("tokens", "targets", "loss_weights")
        )
        for document in range(2):
            assert tokens[document, 0] == 256 and tokens[document, -1] == 257
            text = bytes(tokens[document, 1:-1].astype(np.uint8)).decode()
            places = [m.start(1) for m in re.finditer(r"\?.:(.)", text)]
            assert np.flatnonzero(weights[document]).tolist() == places
            assert targets[document, places].tolist() == [ord(text[place]) for place in places]
    with loader(CONFIG) as source:
        source.restore(position)
        assert take(source, 5) == batches[3:]


def test_another_task_is_other_data():
    with loader(CONFIG) as source:
        position = source.state()
    for options in ({"task_seed": 1}, {"source": "stack"}, {"task_length": 256}):
        with (
            loader(change(CONFIG, **options)) as source,
            pytest.raises(UserError, match="the saved data position is for"),
        ):
            source.restore(position)


@pytest.mark.parametrize("options", [{"path": "x"}, {"eval_path": "x"}, {"tokenizer": "x.json"}])
def test_tasks_take_neither_files_nor_a_tokenizer(options):
    with pytest.raises(UserError, match=f"config.data.{next(iter(options))}"):
        loader(change(CONFIG, **options))


def test_prose_is_not_part_of_a_tasks_identity():
    source = '"""Doc."""\nX = 1  # why\ndef f():\n    """Says."""\n    return "kept"\n'
    reworded = '"""Other."""\nX = 1\ndef f():\n    """More."""\n    # how\n    return "kept"\n'
    assert without_prose(source) == without_prose(reworded)
    assert without_prose(source) != without_prose(source.replace('"kept"', '"changed"'))
