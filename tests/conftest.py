"""Tests run on eight simulated CPU devices; these settings must come before JAX starts."""

import gc
import os

import pytest

from tests.fake_gcs import FakeGcs
from training import devices

os.environ["JAX_PLATFORMS"] = "cpu"
devices.wait_for_each_other()

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Each compiled program keeps memory maps, of which Linux gives a process 65,530."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def gcs():
    """One server a session: its clients read once where it is."""
    with FakeGcs() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def bucket(gcs):
    """The name of a bucket of the test's own."""
    name = f"bucket-{len(gcs.buckets)}"
    gcs.buckets[name] = {}
    yield name
    gcs.fault = lambda request: None
    assert not gcs.unknown


@pytest.fixture
def impatient_orbax(monkeypatch):
    """Threads of a save that failed wait for each other, ten minutes, and pytest's end for them."""
    monkeypatch.setattr("orbax.checkpoint._src.multihost.multihost._DEFAULT_BARRIER_TIMEOUT", 30)
