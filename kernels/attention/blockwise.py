"""Attention in jax.numpy: scores exist one block at a time, for values and gradients.

The gradient is written by hand, and an `optimization_barrier` hides the loops over blocks from
JAX's partial evaluation. Masks depend only on positions and segments. In a rematerialised layer JAX
therefore treats them as known values: it computes them for all pairs of blocks at once and saves
them, together with placeholders for the scores, which is quadratic in the row length. After the
barrier they depend on q as well.

Axes: B row, G key-value head, M query head per key-value head, q query, s key, d head channel.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention.places import Blocks, Places, meeting
from kernels.vma import vary, varying_axes

_MASKED = -1e30  # finite, so that a row with every score masked stays finite


def attend(blocks: Blocks, q: jax.Array, k: jax.Array, v: jax.Array, places: Places) -> jax.Array:
    """Attention of the queries to the keys that they may see.

    Args:
        q: [B, H, n, d]. k, v: [B, G, s, d]. n and s are multiples of the block lengths.

    Returns:
        [B, H, n, d] in q's dtype; 0 at padding.
    """
    groups = q.reshape(q.shape[0], k.shape[1], -1, *q.shape[2:])
    q_axes = varying_axes((q, k, v, places))
    groups, k, v, places = vary((groups, k, v, places), q_axes)
    return _blockwise(blocks, groups, k, v, places).reshape(q.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(blocks: Blocks, q, k, v, places: Places) -> jax.Array:
    return _forward(blocks, q, k, v, places)[0]


def _forward(blocks: Blocks, q, k, v, places: Places):
    """(out [B, G, M, n, d], residuals); the softmax's sums run over blocks of keys in float32."""
    scale = q.shape[-1] ** -0.5
    q, k, v, places, q_number, k_number = _hide(blocks, q, k, v, places)
    keys, values = _blocks(k, 2, blocks.k), _blocks(v, 2, blocks.k)
    meets = _meets(places, blocks)

    def queries(block):
        i, q_i = block

        def add(sums, j):
            top, total, acc = sums
            score, seen = _scores(q_i, keys[j], places, i, j, blocks, scale)
            new_top = jnp.maximum(top, score.max(-1))
            p = jnp.where(seen, jnp.exp(score - new_top[..., None]), 0.0)
            shrink = jnp.exp(top - new_top)
            acc = acc * shrink[..., None] + _product("bgmqs,bgsd->bgmqd", p, values[j], q.dtype)
            return new_top, total * shrink + p.sum(-1), acc

        def step(sums, j):
            return jax.lax.cond(meets[i, j], add, lambda sums, j: sums, sums, j), None

        zero = _zeros_like(q_i)
        start = (zero[..., 0] + _MASKED, zero[..., 0], zero)
        (top, total, acc), _ = jax.lax.scan(step, start, k_number)
        some = jnp.where(total > 0, total, 1.0)
        return (acc / some[..., None]).astype(q.dtype), top + jnp.log(some)

    out, lse = jax.lax.map(queries, (q_number, _blocks(q, 3, blocks.q)))
    out, lse = _unblock(out, 3), _unblock(lse, 3)
    return out, (q, k, v, places, out, lse)


def _backward(blocks: Blocks, residuals, d_out):
    """Gradients, one block of keys at a time; inner loop over the blocks of queries it meets."""
    q, k, v, places, out, lse = residuals
    scale = q.shape[-1] ** -0.5
    q, k, v, places, q_number, k_number = _hide(blocks, q, k, v, places)
    inner = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    queries = [_blocks(x, 3, blocks.q) for x in (q, d_out, lse, inner)]
    meets = _meets(places, blocks)

    def keys(dq, block):
        j, k_j, v_j = block

        def add(sums, i):
            dq, dk, dv = sums
            q_i, do_i, lse_i, inner_i = (x[i] for x in queries)
            score, seen = _scores(q_i, k_j, places, i, j, blocks, scale)
            p = jnp.where(seen, jnp.exp(score - lse_i[..., None]), 0.0)
            dp = _product("bgmqd,bgsd->bgmqs", do_i, v_j, q.dtype)
            ds = p * (dp - inner_i[..., None]) * scale
            dv += _product("bgmqs,bgmqd->bgsd", p, do_i, q.dtype)
            dk += _product("bgmqs,bgmqd->bgsd", ds, q_i, q.dtype)
            return dq.at[i].add(_product("bgmqs,bgsd->bgmqd", ds, k_j, q.dtype)), dk, dv

        def step(sums, i):
            return jax.lax.cond(meets[i, j], add, lambda sums, i: sums, sums, i), None

        start = (dq, _zeros_like(k_j), _zeros_like(v_j))
        (dq, dk, dv), _ = jax.lax.scan(step, start, q_number)
        return dq, (dk, dv)

    k_blocks, v_blocks = _blocks(k, 2, blocks.k), _blocks(v, 2, blocks.k)
    start = _zeros_like(queries[0])
    dq, (dk, dv) = jax.lax.scan(keys, start, (k_number, k_blocks, v_blocks))
    no_gradient = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), places)
    grads = [_unblock(dq, 3), _unblock(dk, 2), _unblock(dv, 2)]
    return *(g.astype(x.dtype) for g, x in zip(grads, (q, k, v))), no_gradient


_blockwise.defvjp(_forward, _backward)


def _hide(blocks: Blocks, q, k, v, places: Places):
    """The same values and the block numbers, all dependent on q (see the module docstring)."""
    q_number = jnp.arange(q.shape[3] // blocks.q)
    k_number = jnp.arange(k.shape[2] // blocks.k)
    numbers = vary((q_number, k_number), varying_axes(q))
    return jax.lax.optimization_barrier((q, k, v, places, *numbers))


def _meets(places: Places, blocks: Blocks) -> jax.Array:
    """[n / blocks.q, s / blocks.k] bool: whether the blocks meet in any row."""
    return jnp.any(meeting(places, blocks), axis=0)


def _scores(q_i, k_j, places: Places, i, j, blocks: Blocks, scale: float):
    """Scores [B, G, M, q, s] in float32 of query block i and key block j, and their mask."""
    q_index = _part(places.q_index, i, blocks.q, 1)[:, :, None]
    k_index = _part(places.k_index, j, blocks.k, 1)[:, None, :]
    q_position = _part(places.q_position, i, blocks.q, 0)
    causal = q_position[:, None] >= j * blocks.k + jnp.arange(blocks.k)
    seen = ((q_index == k_index) & (q_index >= 0) & causal)[:, None, None]
    score = _product("bgmqd,bgsd->bgmqs", q_i, k_j, q_i.dtype) * scale
    return jnp.where(seen, score, _MASKED), seen


def _product(spec: str, a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """einsum of a and b rounded to dtype, summed in float32."""
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    a, b = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def _part(x: jax.Array, i: jax.Array, block: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, i * block, block, axis=axis)


def _blocks(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Cuts an axis into n blocks and moves the block axis to the front: [n, ...]."""
    shape = (*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _unblock(x: jax.Array, axis: int) -> jax.Array:
    """The inverse of `_blocks`."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _zeros_like(x: jax.Array) -> jax.Array:
    """float32 zeros of x's shape that vary over the same mesh axes, as a scan's carry must."""
    return vary(jnp.zeros(x.shape, jnp.float32), varying_axes(x))
