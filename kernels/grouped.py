"""Products of groups of rows, each group with its own matrix: `jax.lax.ragged_dot` on TPU.

XLA for TPU skips tiles that no group touches. For other devices it multiplies every row by every
matrix: with 64 matrices, 64 times the operations and 64 copies of the rows. On those devices this
module multiplies block by block, each block by the one matrix that it needs.

Axes: M row, G group, I input, O output, C row of a block.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels import select
from kernels.vma import vary, varying_axes

_MOST_ROWS = 128  # C at most; small enough that a group's last block wastes little
_LEAST_ROWS = 8


def grouped_matmul(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """x [M, I] in groups, one after another, times weights [G, I, O] -> [M, O] in x's dtype.

    sizes: [G] int32, rows of each group. Results and gradients of rows after all groups are
    undefined. Sums are float32; float32 products have float32 precision on every device.
    """
    axes = varying_axes((x, weights, sizes))
    x, weights, sizes = vary((x, weights, sizes), axes)
    if select.platform(x) == "tpu":
        return jax.lax.ragged_dot(
            x, weights, sizes, precision=_precision(x), preferred_element_type=x.dtype
        )
    return _by_blocks(x, weights, sizes)


@jax.custom_vjp
def _by_blocks(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return _multiply(x, weights, sizes, "ci,io->co")


def _forward(x, weights, sizes):
    return _by_blocks(x, weights, sizes), (x, weights, sizes)


def _backward(saved, d_out):
    x, weights, sizes = saved
    d_x = _multiply(d_out, weights, sizes, "co,io->ci")
    return d_x, _sums(x, d_out, sizes).astype(weights.dtype), None


_by_blocks.defvjp(_forward, _backward)


class _Blocks(NamedTuple):
    """Blocks of at most C rows, each within one group.

    total: the number of blocks, known at run time. first_block, first_row, last_row: of each group;
    last_row is exclusive. group(n): the group of block n. begin(n, group): its first row.
    """

    total: jax.Array
    first_block: jax.Array  # [G]
    first_row: jax.Array  # [G]
    last_row: jax.Array  # [G]
    rows: int  # C

    def group(self, n: jax.Array) -> jax.Array:
        return jnp.searchsorted(self.first_block, n, side="right") - 1

    def begin(self, n: jax.Array, group: jax.Array) -> jax.Array:
        return self.first_row[group] + (n - self.first_block[group]) * self.rows


def _blocks(length: int, sizes: jax.Array) -> _Blocks:
    even = 1 << max(length // sizes.shape[0], 1).bit_length()
    rows = min(max(even, _LEAST_ROWS), _MOST_ROWS)
    counts = -(-sizes // rows)
    ends, last_block = jnp.cumsum(sizes), jnp.cumsum(counts)
    return _Blocks(last_block[-1], last_block - counts, ends - sizes, ends, rows)


def _multiply(x: jax.Array, weights: jax.Array, sizes: jax.Array, product: str) -> jax.Array:
    """Each block's rows times its matrix. A block is written in full, even beyond the group's end:
    the next group's rows are written later."""
    blocks = _blocks(x.shape[0], sizes)
    multiply = _product(product, x)
    width = weights.shape[1] if product.endswith("i") else weights.shape[2]

    def add(n, out):
        group = blocks.group(n)
        begin = blocks.begin(n, group)
        rows = jax.lax.dynamic_slice_in_dim(padded, begin, blocks.rows)
        found = multiply(rows, weights[group]).astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, found, begin, 0)

    padded = jnp.pad(x, ((0, blocks.rows), (0, 0)))
    out = vary(jnp.zeros((padded.shape[0], width), x.dtype), varying_axes((x, weights, sizes)))
    return jax.lax.fori_loop(0, blocks.total, add, out)[: x.shape[0]]


def _sums(x: jax.Array, d_out: jax.Array, sizes: jax.Array) -> jax.Array:
    """[G, I, O] float32: each group's sum over rows of x times d_out."""
    blocks = _blocks(x.shape[0], sizes)
    multiply = _product("ci,co->io", x)
    wide = ((0, blocks.rows), (0, 0))
    x, d_out = jnp.pad(x, wide), jnp.pad(d_out, wide)

    def add(n, total):
        group = blocks.group(n)
        begin = blocks.begin(n, group)
        here = begin + jnp.arange(blocks.rows) < blocks.last_row[group]
        cut = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=begin, slice_size=here.size
        )
        found = multiply(jnp.where(here[:, None], cut(x), 0), cut(d_out))
        return total.at[group].add(found)

    total = jnp.zeros((sizes.shape[0], x.shape[1], d_out.shape[1]), jnp.float32)
    total = vary(total, varying_axes((x, d_out, sizes)))
    return jax.lax.fori_loop(0, blocks.total, add, total)


def _product(spec: str, like: jax.Array):
    return functools.partial(
        jnp.einsum, spec, precision=_precision(like), preferred_element_type=jnp.float32
    )


def _precision(x: jax.Array) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
