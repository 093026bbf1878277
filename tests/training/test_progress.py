"""Lines about a long compilation."""

import io
import sys
import threading
import time

import pytest

from training import progress
from training.progress import elapsed


def test_lines_come_until_the_block_ends(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line_that_is_redrawn_and_erased(monkeypatch):
    terminal, lines = Terminal(), []
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "REDRAWN", 0.01)
    with elapsed("compiling", lines.append, every=0.0):
        while terminal.getvalue().count("compiling") < 3:
            time.sleep(0.01)
    shown = terminal.getvalue()
    assert lines == [] and "\n" not in shown
    # Each state begins with the line erased and ends at its beginning.
    states = shown.split("\r\x1b[K")
    assert states[0] == states[-1] == ""
    assert all(state == "compiling ... 0 s\r" for state in states[1:-1])
