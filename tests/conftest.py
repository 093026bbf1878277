"""Tests run on eight simulated CPU devices; these settings must come before JAX starts."""

import gc
import os

import pytest

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
