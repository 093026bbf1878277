"""How tests compile and interpret what they compare: values, not speed."""

import contextlib
import functools

import jax

# Private: where the interpreter notes that a race was found has no public name.
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

# Machine code as it comes: optimising it takes most of a compilation and gains nothing this small.
NOT_OPTIMIZED = {"xla_backend_optimization_level": 0}
fast_jit = functools.partial(jax.jit, compiler_options=NOT_OPTIMIZED)


@contextlib.contextmanager
def interpreted():
    """TPU kernels called inside are interpreted; unwritten memory is NaN, a race is an error."""
    params = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    with pltpu.force_tpu_interpret_mode(params):
        yield
    assert not interpret_pallas_call.races.races_found
