"""Compiles and interprets programs for tests, which compare values, not speed."""

import contextlib
import functools

import jax

# Private: there is no public API for the interpreter's record of races.
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

# Unoptimised machine code: optimising takes most of a compilation and gains nothing at these sizes.
NOT_OPTIMIZED = {"xla_backend_optimization_level": 0}
fast_jit = functools.partial(jax.jit, compiler_options=NOT_OPTIMIZED)


@contextlib.contextmanager
def interpreted():
    """TPU kernels called inside are interpreted; unwritten memory is NaN, a race is an error."""
    params = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    with pltpu.force_tpu_interpret_mode(params):
        yield
    assert not interpret_pallas_call.races.races_found
