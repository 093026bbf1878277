"""Lines about a long compilation."""

import threading

import pytest

from training.progress import elapsed


def test_lines_come_until_the_block_ends():
    lines, second = [], threading.Event()

    def log(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            second.set()

    with elapsed("compiling", log, every=0.01):
        assert second.wait(60)
    count = len(lines)
    assert lines[0] == "compiling ... 0 s"
    assert not [t for t in threading.enumerate() if t.name == "progress of compiling"]
    assert len(lines) == count


def test_a_short_block_logs_nothing_and_errors_pass():
    lines: list[str] = []
    with pytest.raises(KeyError), elapsed("compiling", lines.append, every=60):
        raise KeyError
    assert lines == []
