"""Tests run on eight simulated CPU devices; both settings must come before JAX starts."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)
