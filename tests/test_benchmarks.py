"""What benchmarks compute by themselves."""

import numpy as np

from benchmarks import ledger, ledger_plot
from data.tasks import ledger as task


def tokens_of(text: bytes) -> np.ndarray:
    return np.asarray([256, *text, 257])


def test_answers_and_their_distances_are_those_of_the_text():
    """Token by token: the newest write of the key before, unless its value is in the row."""
    for seed in range(3):
        written = task.write(np.random.default_rng(seed), 4094)
        document = tokens_of(written.text)
        found = dict(ledger.answers(document))
        # The byte at position p is predicted by token p: the begin id comes first.
        cut = [p for p in written.answers.tolist() if p < 4094]
        assert list(found) == cut
        for place, distance in found.items():
            key = document[place - 1]
            signs = [(p, document[p + 1]) for p in range(place - 2) if document[p] == key]
            writes = [p for p, sign in signs if sign == ord("=")]
            # Of an answer, its question mark counts, one token before the key.
            places = [p if sign == ord("=") else p - 1 for p, sign in signs if chr(sign) in "=:"]
            here = places[-1] // 256 == place // 256
            assert distance == (0 if here else place // 256 - writes[-1] // 256)
    assert max(found.values()) > 3


def test_accuracy_by_distance_counts_the_right_answers():
    """Right are exactly those of which the value is in the row."""
    documents = [tokens_of(task.write(np.random.default_rng(seed), 8190).text) for seed in range(8)]
    hits = np.zeros((8, 8192), bool)
    for document, row in zip(documents, hits):
        for place, distance in ledger.answers(document):
            row[place] = distance == 0
    found = ledger.by_distance(np.stack(documents), hits)
    near, *far = (found[name] for name in ledger.DISTANCES)
    assert near[0] == near[1] > 100
    assert all(correct == 0 and total > 50 for correct, total in far)


def test_results_are_tabled_and_drawn():
    record = {"carried": True, "rows": 8, "row_bytes": 2_500_000, "step_seconds": 0.25}
    answers = {name: [number, 10] for number, name in enumerate(ledger.DISTANCES)}
    records = [
        record | {"arm": arm, "seed": seed, "answers": answers | {"same row": [8 + seed, 10]}}
        for arm in ledger.ARMS[:2]
        for seed in range(2)
    ]
    table = ledger.table(records).splitlines()
    assert len(table) == 4
    assert (
        "| 0.850 (0.800-0.900) | 0.100 (0.100-0.100) |" in table[2]
        and "| 2.5 | 0.250 |" in table[2]
    )
    assert ledger_plot.picture(records).count("<polyline") == 2 * 3
