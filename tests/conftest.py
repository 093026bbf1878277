"""Tests run on eight simulated CPU devices; all settings must come before JAX starts."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the time goes into compiling small programs once; optimising their machine code takes a
# third of that and changes no result that a test looks at. Runs of train.py inherit it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax

jax.config.update("jax_num_cpu_devices", 8)
