"""Tests run on eight simulated CPU devices; these settings must be made before JAX starts."""

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
    """Each compiled program holds memory maps, of which a Linux process may have 65,530."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def gcs():
    """One server per session, because its clients read its address only once."""
    with FakeGcs() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def bucket(gcs):
    """The name of a bucket for this test."""
    name = f"bucket-{len(gcs.buckets)}"
    gcs.buckets[name] = {}
    yield name
    gcs.fault = lambda request: None
    assert not gcs.unknown


@pytest.fixture
def impatient_orbax(monkeypatch):
    """Threads of a failed save wait ten minutes for each other; without this, pytest would wait for
    them at its end."""
    monkeypatch.setattr("orbax.checkpoint._src.multihost.multihost._DEFAULT_BARRIER_TIMEOUT", 30)
