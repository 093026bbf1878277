"""Worker processes: items in turn, and one line within seconds when one of them dies."""

import functools
import itertools
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from data.workers import Workers
from errors import DataError, UserError


def count(first: int, step: int, size: int = 1) -> Iterator[Any]:
    for number in itertools.count(first, step):
        yield number, os.getpid(), b"x" * size


def fail(error: Exception) -> Iterator[Any]:
    yield "fine"
    raise error


def slow() -> Iterator[Any]:
    yield os.getpid()
    time.sleep(600)


def test_items_come_in_turn_from_processes_of_their_own():
    workers = Workers([functools.partial(count, n, 3) for n in range(3)], ahead=2)
    items = [next(workers) for _ in range(12)]
    assert [number for number, _, _ in items] == list(range(12))
    assert len({process for _, process, _ in items}) == 3
    assert os.getpid() not in {process for _, process, _ in items}
    workers.close()
    for _, process, _ in items:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("moment", ["at once", "made ahead", "in an item", "in a large item"])
def test_a_worker_that_dies_is_noticed_within_seconds(moment, number):
    """Before it has read its work, while its items wait, and while it writes one."""
    size = 50_000_000 if moment == "in a large item" else 1
    works = [functools.partial(count, 0, 1, size), slow if moment == "in an item" else count_small]
    workers = Workers(works, ahead=5)
    victim = 1
    if moment != "at once":
        victim = 1 if moment == "in an item" else 0
        first = [next(workers), next(workers)]
        assert len(first) == 2
        time.sleep(0.3)
    began = time.monotonic()
    os.kill(workers._processes[victim].pid, number)
    with pytest.raises(DataError, match=rf"worker {victim} of 2 has ended \(by {number.name}"):
        for _ in range(100):
            next(workers)
    assert time.monotonic() - began < 10
    workers.close()


def test_a_worker_that_dies_in_the_turn_of_another_is_noticed():
    workers = Workers([slow, count_small], ahead=5)
    assert len([next(workers), next(workers)]) == 2
    timer = threading.Timer(0.5, os.kill, (workers._processes[1].pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(DataError, match=r"worker 1 of 2 has ended \(by SIGKILL"):
        next(workers)
    workers.close()


def count_small() -> Iterator[Any]:
    return count(0, 1)


def test_errors_of_workers_reach_the_parent():
    for error, kind in ((UserError("config.x: y"), UserError), (KeyError("bug"), RuntimeError)):
        workers = Workers([functools.partial(fail, error)], ahead=3)
        assert next(workers) == "fine"
        for _ in range(2):
            with pytest.raises(kind, match="config.x: y" if kind is UserError else "KeyError"):
                next(workers)
        workers.close()


def test_too_few_descriptors_are_named():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 8, limits[1]))
        with pytest.raises(DataError, match=r"config\.data\.workers=40: .*ulimit -n") as caught:
            Workers([count_small] * 40, ahead=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "\n" not in str(caught.value)
