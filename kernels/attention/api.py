"""`attention(...)`: checks, exchange between ranks, choice of implementation, carried keys."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.attention import blockwise, one_query
from kernels.attention.places import Blocks, Places
from kernels.attention.ranks import Line, balance, gather, line_of, pieces, restore
from kernels.segments import Segments
from kernels.select import platform

IMPLEMENTATIONS = ("mosaic_tpu", "blockwise", "one_query")
_LANE = 128  # the TPU kernels' blocks are multiples of it
_MOST_PAIRS = 2**18  # limit on pairs of blocks: each takes 3 bytes of 1 MB of scalar memory


class Memory(NamedTuple):
    """Keys and values before the row, in order: m tokens, or this rank's part of them.

    k, v: [B, G, m, d]. valid: [B, m] bool, whether the token belongs to the row's first segment.
    """

    k: jax.Array
    v: jax.Array
    valid: jax.Array


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    memory: Memory | None = None,
    axis_name: str | None = None,
    block: int = 512,
    implementation: str | None = None,
) -> tuple[jax.Array, Memory | None]:
    """Causal attention inside segments, without position encoding.

    Memory use is linear in the row length: a rank holds the keys and values of the whole row and
    its share of the queries; scores exist one block at a time.

    Args:
        q: [B, H, T, d]; k, v: [B, G, T, d], one dtype, float32 or bfloat16. H is a multiple of G;
            query head h uses the keys of head h // (H / G). T is any length; with axis_name, the
            rank's part.
        segments: from `plan_segments` with the same axis_name.
        memory: visible to the row's first segment; the same number of tokens on every rank.
        axis_name: the mesh axis over which T is split; the call must be inside `jax.shard_map`.
        block: queries per block, and keys per block; reduced to the rank's length. "mosaic_tpu"
            uses larger blocks if a row would have more than 2^18 pairs of blocks.
        implementation: "mosaic_tpu", "blockwise" or "one_query" (T = 1 on one rank), which run or
            raise. None chooses "one_query" where it fits, else "mosaic_tpu" on TPU for bfloat16,
            else "blockwise". "mosaic_tpu" needs check_vma=False in the enclosing `jax.shard_map`.

    Returns:
        out [B, H, T, d] in q's dtype, 0 at padding; and, if memory is given, the memory of the next
        row, with as many tokens: the positions up to the last segment's last token, valid if they
        belong to that segment and zero elsewhere. In a row without tokens, none is valid.

    Raises:
        ValueError: for shapes that do not match or an unknown implementation.
    """
    _check(q, k, v, segments, memory, block)
    line = line_of(axis_name)
    name = _choose(implementation, q, line.size)
    index = gather(line, segments.index, 1)
    keys = Memory(gather(line, k, 2), gather(line, v, 2), index >= 0)
    before = None
    if memory is not None:
        before = Memory(gather(line, memory.k, 2), gather(line, memory.v, 2), memory.valid)
        before = before._replace(valid=gather(line, memory.valid, 1))
    if name == "one_query":
        # The row's only token sees itself and, if it continues a segment, the tokens before.
        out = one_query.attend(q, [keys] if before is None else [before, keys])
    else:
        out = _attend(name, _unit(name, block, index, before, line), line, q, keys, index, before)
    out = jnp.where(segments.valid[:, None, :, None], out, 0)
    if before is None:
        return out, None
    return out, _next_memory(line, keys, index, before, segments.count)


def _attend(
    name: str, unit: Blocks, line: Line, q: jax.Array, keys: Memory, index: jax.Array, before
) -> jax.Array:
    """This rank's queries [B, H, t, d] against all keys.

    unit: the blocks. Each rank's tokens are padded separately, so that no block straddles ranks.
    """
    length = q.shape[2]
    multiple = unit.k if line.size == 1 else 2 * unit.q
    padded = -(-length // multiple) * multiple
    row = [_pad_parts(x, axis, line.size, padded, 0) for x, axis in ((keys.k, 2), (keys.v, 2))]
    k_index = _pad_parts(index, 1, line.size, padded, -1)
    lead = 0
    if before is not None:
        lead = -(-before.k.shape[2] // unit.k) * unit.k
        seen = jnp.where(before.valid, 0, -1).astype(jnp.int32)
        front = [_pad_front(x, axis, lead, 0) for x, axis in ((before.k, 2), (before.v, 2))]
        row = [jnp.concatenate(parts, 2) for parts in zip(front, row)]
        k_index = jnp.concatenate([_pad_front(seen, 1, lead, -1), k_index], 1)
    numbers = pieces(line)
    size = padded // len(numbers)
    starts = [lead + number * size for number in numbers]
    places = Places(
        jnp.concatenate(
            [jax.lax.dynamic_slice_in_dim(k_index, start, size, 1) for start in starts], 1
        ),
        jnp.concatenate([start + jnp.arange(size, dtype=jnp.int32) for start in starts]),
        k_index,
    )
    q = balance(line, _pad_parts(q, 2, 1, padded, 0), 2)
    out = _backend(name)(unit, q, *row, places)
    return restore(line, out, 2)[:, :, :length]


def _next_memory(
    line: Line, keys: Memory, index: jax.Array, before: Memory, count: jax.Array
) -> Memory:
    """This rank's part of the window of positions that ends at the last segment's last token."""
    tokens = before.valid.shape[1]
    length = index.shape[1]
    index = jnp.concatenate([jnp.where(before.valid, 0, -1), index], 1)
    kept = (index == count - 1) & (index >= 0)
    last = jnp.max(jnp.where(kept, jnp.arange(index.shape[1]), 0), axis=1)
    part = tokens // line.size
    start = last - tokens + 1 + line.rank * part

    def window(x: jax.Array, axis: int) -> jax.Array:
        if length == 1:  # one token or none: then nothing is kept, wherever the window begins
            return jax.lax.slice_in_dim(x, 1, None, axis=axis + 1)
        return jax.vmap(lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, part, axis))(
            x, start
        )

    valid = window(kept, 0)
    k, v = (window(jnp.concatenate(parts, 2), 1) for parts in zip(before[:2], keys[:2]))
    kept_tokens = valid[:, None, :, None]
    return Memory(jnp.where(kept_tokens, k, 0), jnp.where(kept_tokens, v, 0), valid)


def _unit(name: str, block: int, index: jax.Array, before: Memory | None, line: Line) -> Blocks:
    """Blocks for a rank's part of the row `index` [B, T]. With several ranks, a rank has two
    separate pieces of queries, and a block of keys is as long as one or two blocks of queries."""
    ranks, length = line.size, index.shape[1] // line.size
    total = index.shape[1] + (0 if before is None else before.valid.shape[1])
    if name == "mosaic_tpu":
        while (length // block) * (total // block) > _MOST_PAIRS:
            block *= 2
    multiple = _LANE if name == "mosaic_tpu" else 1
    piece = length if ranks == 1 else -(-length // 2)
    queries = min(-(-block // multiple), -(-piece // multiple)) * multiple
    return Blocks(queries, 2 * queries if ranks > 1 and 2 * queries <= block else queries)


def _pad_parts(x: jax.Array, axis: int, parts: int, length: int, value: int) -> jax.Array:
    """Cuts an axis into equal parts and pads each to `length` at its end."""
    part = x.shape[axis] // parts
    if part == length:
        return x
    x = x.reshape(*x.shape[:axis], parts, part, *x.shape[axis + 1 :])
    widths = [(0, 0)] * x.ndim
    widths[axis + 1] = (0, length - part)
    x = jnp.pad(x, widths, constant_values=value)
    return x.reshape(*x.shape[:axis], parts * length, *x.shape[axis + 2 :])


def _pad_front(x: jax.Array, axis: int, length: int, value: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (length - x.shape[axis], 0)
    return jnp.pad(x, widths, constant_values=value)


def _backend(name: str) -> Callable[..., jax.Array]:
    """The implementation. The TPU one is imported on first use, so CPU runs never load Pallas."""
    if name == "blockwise":
        return blockwise.attend
    from kernels.attention import tpu

    return tpu.attend


def _choose(implementation: str | None, q: jax.Array, ranks: int) -> str:
    single = q.shape[2] == 1 and ranks == 1
    if implementation is None:
        if single:
            return "one_query"
        return "mosaic_tpu" if platform(q) == "tpu" and q.dtype == jnp.bfloat16 else "blockwise"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention: implementation must be None or one of {IMPLEMENTATIONS}, "
            f"got {implementation!r}"
        )
    if implementation == "one_query" and not single:
        raise ValueError(
            f"attention: one_query needs one token on one rank, got {q.shape[2]} on {ranks}"
        )
    return implementation


def _check(q, k, v, segments: Segments, memory: Memory | None, block: int) -> None:
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[1] % k.shape[1]:
        raise ValueError(
            "attention: q must be [B, H, T, d] and k, v [B, G, T, d] with G a divisor of H, "
            f"got {q.shape}, {k.shape} and {v.shape}"
        )
    if (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ValueError(f"attention: q {q.shape} and k {k.shape} must agree in B, T and d")
    if segments.index.shape != (q.shape[0], q.shape[2]):
        raise ValueError(
            f"attention: segments must be planned for [B, T] = {(q.shape[0], q.shape[2])}, "
            f"got {segments.index.shape}"
        )
    if block < 1:
        raise ValueError(f"attention: block must be >= 1, got {block}")
    if memory is None:
        return
    tokens = memory.valid.shape[-1]
    wanted = (*k.shape[:2], tokens, k.shape[3])
    if memory.k.shape != wanted or memory.v.shape != wanted or memory.valid.ndim != 2:
        raise ValueError(
            f"attention: memory must be k, v [B, G, m, d] = {wanted} and valid [B, m], got "
            f"{memory.k.shape}, {memory.v.shape} and {memory.valid.shape}"
        )
