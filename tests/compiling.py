"""How tests compile what they compare: values, not speed."""

import functools

import jax

# Machine code as it comes: optimising it takes most of a compilation and gains nothing this small.
NOT_OPTIMIZED = {"xla_backend_optimization_level": 0}
fast_jit = functools.partial(jax.jit, compiler_options=NOT_OPTIMIZED)
