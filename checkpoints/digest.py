"""A 32-bit digest of every array, equal on every mesh, which detects a flipped byte.

Neither the file format's checksums nor a decompressor covers every byte of an array's data. The
digest is computed on the devices when a step is saved and again when it is restored, so it covers
everything in between. Sums of integers modulo 2^32 do not depend on the order of the terms, and
therefore not on the sharding.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def digests(arrays: dict[str, jax.Array]) -> dict[str, int]:
    """Digest of each array by name: sum over i of bits(i) * (2 i + 1), modulo 2^32.

    An odd factor is invertible modulo 2^32, so a change of one element always changes the sum. All
    processes call this together and get the same digests.

    Raises:
        TypeError: an array has elements of a width other than 1, 2 or 4 bytes.
    """
    sums = _digest_all(arrays)
    return {name: int(np.asarray(value)) for name, value in sums.items()}


@jax.jit
def _digest_all(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _digest(array) for name, array in arrays.items()}


def _digest(array: jax.Array) -> jax.Array:
    width = array.dtype.itemsize
    if width not in _UNSIGNED:
        raise TypeError(f"no digest for {array.dtype}: needs elements of 1, 2 or 4 bytes")
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(array, _UNSIGNED[width]).astype(jnp.uint32)
    index = jnp.zeros(array.shape, jnp.uint32)
    for axis in range(array.ndim):
        # The index in row-major order, computed axis by axis: a reshape would move sharded data.
        stride = math.prod(array.shape[axis + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(stride)
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)
