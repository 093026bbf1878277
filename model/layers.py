"""Small pure layers. B row, T token, D residual width, F FFN column.

Products run in the compute dtype; norms, gates and their sums run in float32.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def matmul(x: jax.Array, weight: jax.Array, out_dtype=None) -> jax.Array:
    """x [..., I] times weight [I, O] -> [..., O] in out_dtype (x's own by default).

    Products of float32 are float32 on every device: the default of a TPU would round their inputs
    to bf16.
    """
    return jnp.matmul(
        x,
        weight,
        precision=product_precision(x.dtype),
        preferred_element_type=out_dtype or x.dtype,
    )


def product_precision(dtype) -> jax.lax.Precision | None:
    """The precision of a product whose inputs have this dtype."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """x / RMS(x) * gain over the last axis, in float32; the result has x's dtype."""
    return _normalised(x, gain, eps).astype(x.dtype)


def gated_rms_norm(x: jax.Array, gate: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """RMS norm over the last axis times sigmoid(gate), in float32; the result has x's dtype."""
    scaled = _normalised(x, gain, eps) * jax.nn.sigmoid(gate.astype(jnp.float32))
    return scaled.astype(x.dtype)


def swiglu(x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    """(silu(x gate) * (x up)) down: [B, T, D] -> [B, T, D]; gate, up [D, F], down [F, D]."""
    gate = matmul(x, params["gate"])
    return matmul(jax.nn.silu(gate) * matmul(x, params["up"]), params["down"])


def constrain(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Says where x lies on the mesh."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Inside `jax.shard_map`: x as a value of its own on every rank of the axes.

    Its gradient is then summed over those axes once, here, rather than wherever x is used.
    """
    missing = tuple(axis for axis in axes if axis not in jax.typeof(x).mat.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _normalised(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * gain
