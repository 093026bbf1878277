"""Full causal attention inside segments, without positions, blockwise.

The baseline beside KDA, and the fourth layer of Kimi Linear's 3 : 1 pattern. Kimi Linear's own is
multi-head latent attention; this is plain multi-head attention with grouped keys and values, which
computes the same kind of mixing without the latent compression.

Under context parallelism each rank gathers the row's keys and values (2 * T * kv heads * d numbers)
and works on its own queries: one collective a layer, and the backward of a gather is the
reduce-scatter that keys and values need. A ring would hold 1/P of that, with P messages in place of
one; at the row lengths this trainer is for, the gathered keys are smaller than a layer's FFN
activations. No array is quadratic in the row length: scores exist one block at a time, and blocks
that causality or segments rule out are skipped when the program runs.

Axes: B row, T token (q: the rank's own, s: the whole row's), G key-value head, M query heads a
key-value head, d head channel.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from kernels.segments import Segments
from model.config import ModelConfig
from model.layers import matmul, product_precision, vary
from model.sharding import CONTEXT, ROWS, TOKEN_SPEC

_CHANNEL_SPEC = PartitionSpec(ROWS, CONTEXT, "tensor")  # [B, T, channels of all heads]
_MASKED = -1e30  # finite, so that a row with every score masked stays finite


def attention_mixer(
    params: dict[str, Any], cfg: ModelConfig, x: jax.Array, segments: Segments, mesh: Mesh
) -> jax.Array:
    """Mixes x [B, T, D] along the tokens of each segment of this row -> [B, T, D].

    Attention keeps to the row: where a document goes on from the last row, its tokens there are not
    seen (a KDA layer's state is carried instead).
    """
    q, k, v = (matmul(x, params[name]) for name in ("q", "k", "v"))

    def attend(q, k, v, index):
        q, k, v = (_split_heads(stream, cfg.attention_head_dim) for stream in (q, k, v))
        groups = q.reshape(q.shape[0], k.shape[1], -1, *q.shape[2:])
        out = context_attention(groups, k, v, index, cfg.attention_block, mesh.shape[CONTEXT])
        out = out.reshape(q.shape)
        return jnp.moveaxis(out, 1, 2).reshape(*index.shape, -1)

    specs = (_CHANNEL_SPEC, _CHANNEL_SPEC, _CHANNEL_SPEC, TOKEN_SPEC)
    island = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=_CHANNEL_SPEC)
    return matmul(island(q, k, v, segments.index), params["output"])


def context_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, index: jax.Array, block: int, ranks: int
) -> jax.Array:
    """One rank's queries against the whole row, inside `jax.shard_map`.

    Args:
        q: [B, G, M, q, d]; k, v: [B, G, q, d]; index: [B, q] int32, the token's segment number in
            the row, -1 at padding. All are the rank's own part.
        block: tokens a block, cut to the rank's length.

    Returns:
        [B, G, M, q, d] in q's dtype; 0 at padding.
    """
    length = q.shape[3]
    block = min(block, length)
    q_start = jnp.int32(0)
    if ranks > 1:
        # Blocks never straddle ranks: each rank's part is padded by itself, before gathering.
        q_start = jax.lax.axis_index(CONTEXT) * (-(-length // block) * block)
    q, k, v = (_pad_tokens(x, block, x.ndim - 2, 0) for x in (q, k, v))
    q_index = _pad_tokens(index, block, 1, -1)
    k_index = q_index
    if ranks > 1:
        k, v = (jax.lax.all_gather(x, CONTEXT, axis=2, tiled=True) for x in (k, v))
        k_index = jax.lax.all_gather(q_index, CONTEXT, axis=1, tiled=True)
    places = _Places(q_index, k_index, vary(q_start, tuple(jax.typeof(q).mat.varying)))
    return _blockwise(block, q, k, v, places)[..., :length, :]


class _Places(NamedTuple):
    """Segment numbers [B, q] and [B, s] (-1 at padding) and the position of the first query."""

    q_index: jax.Array
    k_index: jax.Array
    q_start: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(block: int, q, k, v, places: _Places) -> jax.Array:
    return _forward(block, q, k, v, places)[0]


def _forward(block: int, q, k, v, places: _Places):
    """(out [B, G, M, q, d], residuals); the softmax's sums run over blocks of keys in float32."""
    scale = 1 / math.sqrt(q.shape[-1])
    keys, values = _blocks(k, 2, block), _blocks(v, 2, block)

    def queries(arguments):
        i, q_i = arguments

        def add(sums, j):
            top, total, acc = sums
            score, seen = _scores(q_i, keys[j], places, i, j, block, scale)
            new_top = jnp.maximum(top, score.max(-1))
            p = jnp.where(seen, jnp.exp(score - new_top[..., None]), 0.0)
            shrink = jnp.exp(top - new_top)
            acc = acc * shrink[..., None] + _product("bgmqs,bgsd->bgmqd", p, values[j], q.dtype)
            return new_top, total * shrink + p.sum(-1), acc

        def step(sums, j):
            return jax.lax.cond(_meets(places, i, j, block), add, lambda sums, j: sums, sums, j), ()

        zero = _zeros_like(q_i, q_i.shape)
        start = (zero[..., 0] + _MASKED, zero[..., 0], zero)
        (top, total, acc), _ = jax.lax.scan(step, start, jnp.arange(len(keys)))
        some = jnp.where(total > 0, total, 1.0)
        return (acc / some[..., None]).astype(q.dtype), top + jnp.log(some)

    q_blocks = _blocks(q, 3, block)
    out, lse = jax.lax.map(queries, (jnp.arange(len(q_blocks)), q_blocks))
    out, lse = _unblock(out, 3), _unblock(lse, 3)
    return out, (q, k, v, places, out, lse)


def _backward(block: int, residuals, d_out):
    """Gradients by keys: each block of keys is visited once, by every block of queries it meets."""
    q, k, v, places, out, lse = residuals
    scale = 1 / math.sqrt(q.shape[-1])
    inner = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    queries = [_blocks(x, 3, block) for x in (q, d_out, lse, inner)]

    def keys(dq, arguments):
        j, k_j, v_j = arguments

        def add(sums, i):
            dq, dk, dv = sums
            q_i, do_i, lse_i, inner_i = (x[i] for x in queries)
            score, seen = _scores(q_i, k_j, places, i, j, block, scale)
            p = jnp.where(seen, jnp.exp(score - lse_i[..., None]), 0.0)
            dp = _product("bgmqd,bgsd->bgmqs", do_i, v_j, q.dtype)
            ds = p * (dp - inner_i[..., None]) * scale
            dv += _product("bgmqs,bgmqd->bgsd", p, do_i, q.dtype)
            dk += _product("bgmqs,bgmqd->bgsd", ds, q_i, q.dtype)
            return dq.at[i].add(_product("bgmqs,bgsd->bgmqd", ds, k_j, q.dtype)), dk, dv

        def step(sums, i):
            return jax.lax.cond(_meets(places, i, j, block), add, lambda sums, i: sums, sums, i), ()

        start = (dq, _zeros_like(k_j, k_j.shape), _zeros_like(v_j, v_j.shape))
        (dq, dk, dv), _ = jax.lax.scan(step, start, jnp.arange(dq.shape[0]))
        return dq, (dk, dv)

    k_blocks, v_blocks = _blocks(k, 2, block), _blocks(v, 2, block)
    start = _zeros_like(q, queries[0].shape)
    dq, (dk, dv) = jax.lax.scan(keys, start, (jnp.arange(len(k_blocks)), k_blocks, v_blocks))
    no_gradient = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), places)
    grads = [_unblock(dq, 3), _unblock(dk, 2), _unblock(dv, 2)]
    return *(g.astype(x.dtype) for g, x in zip(grads, (q, k, v))), no_gradient


_blockwise.defvjp(_forward, _backward)


def _scores(q_i, k_j, places: _Places, i, j, block: int, scale: float):
    """Scores [B, G, M, q, s] in float32 of query block i and key block j, and which count."""
    q_index = _part(places.q_index, i, block)[:, :, None]
    k_index = _part(places.k_index, j, block)[:, None, :]
    token = jnp.arange(block)
    causal = places.q_start + i * block + token[:, None] >= j * block + token
    seen = ((q_index == k_index) & (q_index >= 0) & causal)[:, None, None]
    score = _product("bgmqd,bgsd->bgmqs", q_i, k_j, q_i.dtype) * scale
    return jnp.where(seen, score, _MASKED), seen


def _meets(places: _Places, i, j, block: int) -> jax.Array:
    """Whether some query of block i may see some key of block j. Segment numbers only grow along a
    row, so the lowest of the queries' and the highest of the keys' decide."""
    q_index = _part(places.q_index, i, block)
    k_index = _part(places.k_index, j, block)
    lowest = jnp.where(q_index < 0, jnp.iinfo(jnp.int32).max, q_index).min(1)
    shared = jnp.any(lowest <= k_index.max(1))
    return shared & (j * block < places.q_start + (i + 1) * block)


def _product(spec: str, a: jax.Array, b: jax.Array, dtype) -> jax.Array:
    """einsum of a and b rounded to dtype, summed in float32."""
    a, b = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(
        spec, a, b, precision=product_precision(dtype), preferred_element_type=jnp.float32
    )


def _part(index: jax.Array, i, block: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(index, i * block, block, axis=1)


def _blocks(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Cuts an axis into blocks and puts them in front: [n, ...]."""
    shape = (*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _unblock(x: jax.Array, axis: int) -> jax.Array:
    """The inverse of `_blocks`."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _zeros_like(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """float32 zeros that vary over the same mesh axes as x, as a scan's carry must."""
    return vary(jnp.zeros(shape, jnp.float32), tuple(jax.typeof(x).mat.varying))


def _pad_tokens(x: jax.Array, block: int, axis: int, value: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, widths, constant_values=value)


def _split_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """[b, t, h * d] -> [b, h, t, d]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1, head_dim), 2, 1)
