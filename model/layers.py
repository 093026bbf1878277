"""Small pure layers. B row, T token, D residual width, F FFN column.

Products run in the compute dtype; norms, gates and their sums run in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels.vma import zeros_like_varying
from model.axes import CONTEXT, ROWS, TENSOR, TOKEN_SPEC, TOKENS
from model.gathered import Gathered


def matmul(
    x: jax.Array, weight: jax.Array | Gathered, out_dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """x [B, T, I] (or [n, I]) times weight [I, O] -> [B, T, O] in out_dtype (x's own by default).

    With a `Gathered` weight each rank multiplies its tokens with its copy, and the weight's
    gradient is each rank's share, float32; x is then [B, T, I].

    Products of float32 are float32 on every device: the default of a TPU would round their inputs
    to bf16.

    The gradient is written out. The weight's own one, as automatic differentiation states it, sums
    output by input and transposes the result; on CPU that copies all of x and of the cotangent
    into another order first (a SwiGLU forward and backward: 800 ms in bf16, this way 220).
    """
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if isinstance(weight, Gathered):
        return _matmul_on_ranks(x, weight, out_dtype)
    return _matmul(x, weight, out_dtype)


def _matmul_on_ranks(x: jax.Array, weight: Gathered, out_dtype: jnp.dtype) -> jax.Array:
    """`matmul` of each token rank, columns or rows of the weight divided over tensor."""
    inputs, outputs = weight.spec

    def on_rank(x, copies, shares):
        x = vary(x, (TENSOR,)) if outputs else x
        y = _matmul_sharing(x, copies[0], shares[0], out_dtype)
        return jax.lax.psum(y, TENSOR) if inputs else y

    ranks = PartitionSpec(TOKENS, *weight.spec)
    island = jax.shard_map(
        on_rank,
        mesh=weight.mesh,
        in_specs=(PartitionSpec(ROWS, CONTEXT, inputs), ranks, ranks),
        out_specs=PartitionSpec(ROWS, CONTEXT, outputs),
    )
    return island(x, weight.copies, weight.shares)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x, weight, out_dtype):
    return _product("...i,io->...o", x, weight, out_dtype)


def _matmul_forward(x, weight, out_dtype):
    return _matmul(x, weight, out_dtype), (x, weight)


def _matmul_backward(out_dtype, inputs, d_out):
    x, weight = inputs
    d_out = d_out.astype(x.dtype)
    tokens = "bt"[: x.ndim - 1]
    d_weight = _product(f"{tokens}i,{tokens}o->io", x, d_out, weight.dtype)
    return _product("...o,io->...i", d_out, weight, x.dtype), d_weight


_matmul.defvjp(_matmul_forward, _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _matmul_sharing(x, copy, share, out_dtype):
    """`_matmul` with a copy, whose gradient goes to `share`."""
    return _product("...i,io->...o", x, copy, out_dtype)


def _matmul_sharing_forward(x, copy, share, out_dtype):
    return _matmul_sharing(x, copy, share, out_dtype), (x, copy)


def _matmul_sharing_backward(out_dtype, inputs, d_out):
    x, copy = inputs
    d_out = d_out.astype(x.dtype)
    d_share = _product("bti,bto->io", x, d_out, jnp.float32)
    none = zeros_like_varying(copy, copy.shape, copy.dtype)
    return _product("...o,io->...i", d_out, copy, x.dtype), none, d_share


_matmul_sharing.defvjp(_matmul_sharing_forward, _matmul_sharing_backward)


def _product(spec: str, a: jax.Array, b: jax.Array, out_dtype) -> jax.Array:
    precision = product_precision(a.dtype)
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=out_dtype)


def product_precision(dtype) -> jax.lax.Precision | None:
    """The precision of a product whose inputs have this dtype."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """x / RMS(x) * gain over the last axis, in float32; the result has x's dtype."""
    return _normalised(x, gain, eps).astype(x.dtype)


def rms_norm_by_copies(x: jax.Array, gains: jax.Array, eps: float, mesh: Mesh) -> jax.Array:
    """`rms_norm` of x [B, T, D] with each token rank's own copy of the gain, [ranks, D]."""
    norm = jax.shard_map(
        lambda x, gains: rms_norm(x, gains[0], eps),
        mesh=mesh,
        in_specs=(TOKEN_SPEC, PartitionSpec(TOKENS)),
        out_specs=TOKEN_SPEC,
    )
    return norm(x, gains)


def gated_rms_norm(x: jax.Array, gate: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """RMS norm over the last axis times sigmoid(gate), in float32; the result has x's dtype."""
    scaled = _normalised(x, gain, eps) * jax.nn.sigmoid(gate.astype(jnp.float32))
    return scaled.astype(x.dtype)


def constrain(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Applies a sharding constraint to x."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Inside `jax.shard_map`: x typed as varying over the axes.

    Its gradient is then summed over those axes once, here, rather than wherever x is used.
    """
    missing = tuple(axis for axis in axes if axis not in jax.typeof(x).mat.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _normalised(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * gain
