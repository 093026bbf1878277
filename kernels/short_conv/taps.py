"""The short convolution's sum over taps in jax.numpy, for CPU and GPU. tpu.py has the same
functions as TPU kernels.

`reach` [B, T] int32: how many tokens back a token's own segment reaches, -1 at padding. A tap is
used if reach is at least its distance.
"""

import jax
import jax.numpy as jnp

from kernels.vma import vary, varying_axes

MOST_TAPS = None  # no limit


def forward(activation: str | None, heads: None, x, halo, weight, reach) -> jax.Array:
    """y [B, T, D] of x [B, T, D], halo [B, W - 1, D], weight [W, D] and reach [B, T]."""
    assert heads is None
    total = _sum_of_taps(_whole(x, halo, reach), weight, reach)
    return (jax.nn.silu(total) if activation == "silu" else total).astype(x.dtype)


def backward(activation: str | None, heads: None, x, halo, weight, reach, d_y):
    """Gradients of x and halo, in x's dtype, and of weight, in float32.

    The sum is recomputed: W multiply-adds cost less than keeping it in float32.
    """
    assert heads is None
    length, width = reach.shape[1], weight.shape[0]
    whole = _whole(x, halo, reach)
    d_total = d_y.astype(jnp.float32)
    if activation == "silu":
        total = _sum_of_taps(whole, weight, reach)
        gate = jax.nn.sigmoid(total)
        d_total = d_total * gate * (1 + total * (1 - gate))
    # Without the barrier, XLA computes the sum once per tap.
    d_total = jax.lax.optimization_barrier(d_total)
    d_whole = jnp.zeros((), jnp.float32)
    for tap, factor in enumerate(_factors(weight, reach)):
        around = ((0, 0), (tap, width - 1 - tap), (0, 0))
        d_whole = d_whole + jnp.pad(d_total * factor, around)
    d_whole = d_whole.astype(x.dtype)
    ones = _factors(jnp.ones_like(weight[:, :1]), reach)
    d_weight = _weight_gradient(whole, d_total, jnp.concatenate(ones, axis=-1), length)
    d_x = jnp.where(reach[..., None] >= 0, d_whole[:, width - 1 :], 0)
    return d_x, d_whole[:, : width - 1], d_weight


def _whole(x, halo, reach):
    """[B, W - 1 + T, D], 0 at padding."""
    return jnp.concatenate([halo, jnp.where(reach[..., None] >= 0, x, 0)], axis=1)


def _sum_of_taps(whole, weight, reach):
    total = jnp.zeros((), jnp.float32)
    for tap, factor in enumerate(_factors(weight, reach)):
        shifted = jax.lax.slice_in_dim(whole, tap, tap + reach.shape[1], axis=1)
        total = total + shifted.astype(jnp.float32) * factor
    return total


def _factors(weight, reach) -> list[jax.Array]:
    """Each tap's weight, 0 if its position is of another segment: W arrays [B, T, D], when fused.
    weight[tap] applies to position t - (W - 1 - tap)."""
    width = weight.shape[0]
    return [
        jnp.where((reach >= width - 1 - tap)[..., None], weight[tap].astype(jnp.float32), 0)
        for tap in range(width)
    ]


def _weight_gradient(whole, d_total, masks, length: int):
    """Sums whole * d_total over rows and tokens, tap by tap: [W, D]. masks [B, T, W].

    Loops over blocks of tokens with elementwise sums: on CPU, XLA's sum over leading axes takes
    more than ten times as long.
    """
    rows, width, channels = whole.shape[0], masks.shape[-1], whole.shape[2]
    block = max(1, 64 // rows)
    blocks = -(-length // block)
    d_total, whole, masks = (
        jnp.pad(x, ((0, 0), (0, blocks * block - length), (0, 0))) for x in (d_total, whole, masks)
    )

    def step(i, total):
        taken = jax.lax.dynamic_slice_in_dim(whole, i * block, block + width - 1, axis=1)
        d = jax.lax.dynamic_slice_in_dim(d_total, i * block, block, axis=1)
        mask = jax.lax.dynamic_slice_in_dim(masks, i * block, block, axis=1)
        products = [
            taken[:, tap : tap + block].astype(jnp.float32) * mask[..., tap, None] * d
            for tap in range(width)
        ]
        return total + jnp.stack(products)

    total = vary(jnp.zeros((width, rows, block, channels)), varying_axes(d_total))
    return jnp.sum(jax.lax.fori_loop(0, blocks, step, total), (1, 2))
