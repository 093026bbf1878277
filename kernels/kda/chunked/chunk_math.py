"""Stages of one chunk of C tokens (`problem.CHUNK`) as pure functions on [..., C, channels].

Letters follow the chunked form of Kimi Delta Attention (arXiv 2510.26692). With E the decay factor
of each token and D(j, i) the product of E over the tokens j+1 .. i (C is a power of two),

    L_ij   = beta_i sum_d k_id k_jd D(j, i)_d    (j < i)
    Aqk_ij = sum_d q_id k_jd D(j, i)_d           (j <= i)

Decay factors are only multiplied, never divided, and log decays are never subtracted. So whatever
the decay (-1000 per token, or the zero factor that starts a segment), nothing overflows and nothing
forgotten reappears. For half-sizes n = 1, 2, .. C/2, the second half of each block of 2n tokens is
combined with its first half; D is split at the boundary into two factors of at most 1 (`halves`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.kda.products import dot


def blocks(x: jax.Array, n: int) -> jax.Array:
    """[..., C, D] -> [..., C / 2n, 2, n, D]: blocks of 2n tokens, each as two halves."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // (2 * n), 2, n, x.shape[-1])


class Level(NamedTuple):
    """Decay factors of half-size n: the products of E on both sides of each block's middle."""

    n: int
    prefix: jax.Array  # [..., C / 2n, n, K], second halves: middle to token, inclusive
    suffix: jax.Array  # [..., C / 2n, n, K], first halves: after token to middle


def halves(factor: jax.Array) -> tuple[list[Level], jax.Array, jax.Array]:
    """Computes from decay factors [..., C, K] the levels n = 1, 2, .. C/2 and, for the whole chunk,
    the inclusive products from its start (prefix) and the products after each token to its end
    (suffix).
    """
    shape = factor.shape
    prefix, suffix, n, levels = factor, jnp.ones_like(factor), 1, []
    while n < shape[-2]:
        prefix, suffix = blocks(prefix, n), blocks(suffix, n)
        levels.append(Level(n, prefix[..., 1, :, :], suffix[..., 0, :, :]))
        left, right = prefix[..., 0, -1:, :], prefix[..., 1, -1:, :]
        prefix = jnp.stack([prefix[..., 0, :, :], prefix[..., 1, :, :] * left], axis=-3)
        suffix = jnp.stack([suffix[..., 0, :, :] * right, suffix[..., 1, :, :]], axis=-3)
        prefix, suffix = prefix.reshape(shape), suffix.reshape(shape)
        n *= 2
    return levels, prefix, suffix


def intra(levels, q, k, beta):
    """L below the diagonal, by level (a list of [..., C / 2n, n, n]), and Aqk [..., C, C]."""
    below = []
    scores = jnp.sum(q * k, -1)[..., None, None]  # blocks of one token: the diagonal
    for level in levels:
        rows, columns = level_operands(level, q, beta * k, k)
        both = dot(rows, columns, "bb")
        lower, cross = both[..., : level.n, :], both[..., level.n :, :]
        below.append(lower)
        scores = _join(scores, cross)
    return below, scores[..., 0, :, :]


def level_operands(level: Level, q, beta_k, k):
    """Rows [..., C / 2n, 2n, K] (beta k over q, decayed from the middle) and columns
    [..., C / 2n, n, K] (k, decayed to the middle) of a level's product."""
    n = level.n
    rows = [blocks(x, n)[..., 1, :, :] * level.prefix for x in (beta_k, q)]
    return jnp.concatenate(rows, axis=-2), blocks(k, n)[..., 0, :, :] * level.suffix


def solve(below) -> jax.Array:
    """(I + L)^-1 [..., C, C] from L's blocks by level.

    Doubles the size of inverted diagonal blocks: each off-diagonal block is -X22 L X11. This is
    exact for identical keys without decay, where a Neumann series of C terms cancels
    catastrophically.
    """
    inverse = jnp.ones_like(below[0][..., :1, :1])
    inverse = jnp.concatenate([inverse, inverse], axis=-3)
    for lower in below:
        pairs = inverse.reshape(*inverse.shape[:-3], -1, 2, *inverse.shape[-2:])
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        inverse = _join(inverse, -dot(dot(second, lower, "ab"), first, "ab"))
    return inverse[..., 0, :, :]


def _join(diagonal: jax.Array, cross: jax.Array) -> jax.Array:
    """Blocks [..., 2m, n, n] and the block below each pair [..., m, n, n] -> [..., m, 2n, 2n]."""
    pairs = diagonal.reshape(*diagonal.shape[:-3], -1, 2, *diagonal.shape[-2:])
    top = jnp.concatenate([pairs[..., 0, :, :], jnp.zeros_like(cross)], axis=-1)
    bottom = jnp.concatenate([cross, pairs[..., 1, :, :]], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)


def _unjoin(x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """The inverse of `_join`: from [..., C, C] the blocks [..., C / 2n, n, n] between second and
    first halves, by level, and the diagonal [..., C, 1]."""
    below, x = [], x[..., None, :, :]
    while x.shape[-1] > 1:
        n = x.shape[-1] // 2
        below.append(x[..., n:, :n])
        pairs = jnp.stack([x[..., :n, :n], x[..., n:, n:]], axis=-3)
        x = pairs.reshape(*x.shape[:-3], -1, n, n)
    return below[::-1], x[..., 0]


def intra_backward(levels, q, k, beta, d_lower, d_scores):
    """Gradients through `intra`, from those of L and Aqk [..., C, C] (only entries j < i of d_lower
    and j <= i of d_scores are used).

    Returns the gradients of q, of `beta k` as rows of L, of k as columns of both, and of the log
    decay, each [..., C, K].
    """
    (d_lowers, _), (d_crosses, own) = _unjoin(d_lower), _unjoin(d_scores)
    d_q, d_rows, d_columns, d_a = own * k, jnp.zeros_like(k), own * q, jnp.zeros_like(k)
    for level, lower, cross in zip(levels, d_lowers, d_crosses):
        n = level.n
        rows, columns = level_operands(level, q, beta * k, k)
        d_both = jnp.concatenate([lower, cross], axis=-2)
        to_rows, to_columns = dot(d_both, columns, "ab"), dot(d_both, rows, "aa")
        shares = jnp.concatenate(
            [
                columns * to_columns,
                rows[..., :n, :] * to_rows[..., :n, :] + rows[..., n:, :] * to_rows[..., n:, :],
            ],
            axis=-2,
        )
        d_a += _sum_straddling(shares, n).reshape(q.shape)
        d_rows += _second(to_rows[..., :n, :] * level.prefix, q.shape)
        d_q += _second(to_rows[..., n:, :] * level.prefix, q.shape)
        d_columns += _first(to_columns * level.suffix, q.shape)
    return d_q, d_rows, d_columns, d_a


def _sum_straddling(shares, n: int):
    """The gradient of each token's log decay from the pairs (j, i) of a block of 2n tokens that
    straddle it: j < token <= i.

    shares [..., 2n, K] are sums over pairs: of each j in the first half, of each i in the second.
    A second-half token is straddled by the pairs whose i is not before it, a first-half token by
    the pairs whose j is before it. Only straddling pairs are added, and none is subtracted: under
    strong decay the result is far smaller than the terms that a running sum of all pairs cancels.
    """
    t = jnp.arange(2 * n)
    token, pair = t[:, None], t[None]
    second = (token >= n) & (pair >= token)
    first = (pair < n) & (pair < token) & (token < n)
    return _apply(first | second, shares)


def later(x: jax.Array) -> jax.Array:
    """Sum over this token and all later ones, [..., C, K]."""
    t = jnp.arange(x.shape[-2])
    return _apply(t[None] >= t[:, None], x)


def earlier(x: jax.Array) -> jax.Array:
    """Sum over the tokens before each one, [..., C, K]."""
    t = jnp.arange(x.shape[-2])
    return _apply(t[None] < t[:, None], x)


def _apply(matrix: jax.Array, x: jax.Array) -> jax.Array:
    matrix = jnp.broadcast_to(matrix.astype(x.dtype), (*x.shape[:-2], *matrix.shape))
    return dot(matrix, x, "ab")


def _second(x: jax.Array, shape) -> jax.Array:
    return jnp.stack([jnp.zeros_like(x), x], axis=-3).reshape(shape)


def _first(x: jax.Array, shape) -> jax.Array:
    return jnp.stack([x, jnp.zeros_like(x)], axis=-3).reshape(shape)
