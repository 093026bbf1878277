"""Segment metadata, computed from a batch's segment ids once per batch for all layers and ranks.

A segment is a run of one nonzero id. Id 0 is padding and transparent: runs of the same id with only
padding between them are one segment. Segments are numbered by their order in the whole row,
whatever the ids are. The metadata depend only on the ids, so layers need not exchange them again.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["index", "first", "valid", "before", "after", "count"],
    meta_fields=["max_segments"],
)
@dataclass(frozen=True)
class Segments:
    """Segments of a rank's tokens. Every array is [B, n] with dimension 1 sharded over the context
    axis.

    Attributes:
        index: [B, T] int32, the 0-based number of the token's segment in the whole row; -1 at
            padding.
        first: [B, T] bool, whether the token is its segment's first real token in the whole row.
        valid: [B, T] bool, whether the token is not padding.
        before: [B, 1] int32, the number of segments that start on earlier ranks. The rank's first
            real token continues an earlier rank's segment if and only if its index is before - 1.
        after: [B, 1] int32, the index of the first real token on later ranks, or count if there is
            none. The segment of this rank's last real token ends here if and only if its index is
            not equal to after.
        count: [B, 1] int32, the number of segments in the whole row.
        max_segments: static bound for arrays with one entry per segment, or None.
    """

    index: jax.Array
    first: jax.Array
    valid: jax.Array
    before: jax.Array
    after: jax.Array
    count: jax.Array
    max_segments: int | None = None

    @property
    def overflow(self) -> jax.Array:
        """[B, 1] bool: whether the row has more than max_segments segments (False if None)."""
        if self.max_segments is None:
            return jnp.zeros_like(self.count, dtype=bool)
        return self.count > self.max_segments


def plan_segments(
    segment_ids: jax.Array, axis_name: str | None = None, max_segments: int | None = None
) -> Segments:
    """Numbers the segments of `segment_ids` [B, T], integers whose values fit into int32.

    With axis_name the call must be inside `jax.shard_map`, and T is the rank's part of the row;
    three integers per row are gathered over that axis. max_segments only bounds the arrays that
    `kda` returns with one entry per segment (final_state="all").

    Raises:
        ValueError: for a wrong shape, dtype, axis or bound; for 64-bit ids that are traced or
            exceed int32 (truncation could merge two documents); and if a row of concrete (not
            traced) ids has more than max_segments segments. Under tracing, see `Segments.overflow`.
    """
    _check(segment_ids, max_segments)
    check_axis("plan_segments", axis_name)
    ids = segment_ids.astype(jnp.int32)
    valid = ids != 0
    rows, length = ids.shape
    position = jnp.arange(length, dtype=jnp.int32)
    # Position of the last real token before each token, -1 if the rank has none.
    seen = jax.lax.cummax(jnp.where(valid, position, -1), axis=1)
    previous = jnp.concatenate([jnp.full_like(seen[:, :1], -1), seen[:, :-1]], axis=1)
    previous_id = jnp.take_along_axis(ids, jnp.maximum(previous, 0), axis=1)
    opens = valid & (previous >= 0) & (ids != previous_id)  # starts that do not depend on upstream
    leads = valid & (previous < 0)  # the rank's first real token
    first_id = jnp.sum(jnp.where(leads, ids, 0), axis=1)
    last_id = jnp.take_along_axis(ids, jnp.maximum(seen[:, -1:], 0), axis=1)[:, 0]
    opened = jnp.sum(opens, axis=1, dtype=jnp.int32)
    upstream_id, before, after, count = _fold_ranks(first_id, last_id, opened, axis_name)
    first = opens | (leads & (ids != upstream_id[:, None]))
    started = before[:, None] + jnp.cumsum(first, axis=1, dtype=jnp.int32)
    index = jnp.where(valid, started - 1, -1)
    if max_segments is not None and not isinstance(count, jax.core.Tracer):
        most = int(jnp.max(count)) if rows else 0
        if most > max_segments:
            raise ValueError(
                f"plan_segments: a row has {most} segments but max_segments={max_segments}; "
                f"give max_segments >= {most}"
            )
    return Segments(
        index, first, valid, before[:, None], after[:, None], count[:, None], max_segments
    )


def whole_row(rows: int, length: int, axis_name: str | None = None) -> Segments:
    """One segment per row, without padding: what `kda` assumes if no segments are given."""
    rank = jnp.int32(0) if axis_name is None else jax.lax.axis_index(axis_name)
    ones = jnp.ones((rows, length), jnp.int32)
    if axis_name is not None:
        ones = ones + 0 * rank  # equal on every rank, but typed as varying like the other fields
    before = jnp.broadcast_to(jnp.minimum(rank, 1), (rows, 1)).astype(jnp.int32)
    starts = (jnp.arange(length) == 0) & (before == 0)
    last = jnp.bool_(True) if axis_name is None else rank == jax.lax.axis_size(axis_name) - 1
    after = jnp.broadcast_to(last.astype(jnp.int32), (rows, 1))
    return Segments(ones - 1, starts, ones > 0, before, after, ones[:, :1], 1)


def pad_tokens(segments: Segments, extra: int) -> Segments:
    """The same segments with `extra` padding tokens at the end of the rank's part."""
    if extra == 0:
        return segments
    widths = ((0, 0), (0, extra))
    return Segments(
        jnp.pad(segments.index, widths, constant_values=-1),
        jnp.pad(segments.first, widths),
        jnp.pad(segments.valid, widths),
        segments.before,
        segments.after,
        segments.count,
        segments.max_segments,
    )


def is_array(x: object) -> bool:
    """Whether x is a JAX or NumPy array, concrete or traced: it has a shape and a dtype."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def check_axis(caller: str, axis_name: str | None) -> None:
    """Raises ValueError if axis_name is not an axis of the enclosing `jax.shard_map`."""
    if axis_name is None:
        return
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"{caller}: axis_name must be a mesh axis of the jax.shard_map around the call, "
            f"got {axis_name!r}"
        ) from None


def _check(segment_ids: jax.Array, max_segments: int | None) -> None:
    if not is_array(segment_ids):
        raise ValueError(
            f"plan_segments: segment_ids must be an array, got {type(segment_ids).__name__}"
        )
    if segment_ids.ndim != 2 or 0 in segment_ids.shape:
        raise ValueError(
            f"plan_segments: segment_ids must be [B, T], not empty; got {segment_ids.shape}"
        )
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"plan_segments: segment_ids must be integers, got {segment_ids.dtype}")
    if segment_ids.dtype.itemsize > 4:
        _check_wide(segment_ids)
    if max_segments is None:
        return
    if not isinstance(max_segments, (int, np.integer)) or max_segments < 1:
        raise ValueError(
            f"plan_segments: max_segments must be a whole number, at least 1, got {max_segments!r}"
        )


def _check_wide(ids: jax.Array) -> None:
    """Accepts 64-bit ids only if their values are known to fit into 32 bits."""
    if isinstance(ids, jax.core.Tracer):
        raise ValueError(
            f"plan_segments: segment_ids must be int32 if they are traced, got {ids.dtype}"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < -(2**31) or high >= 2**31:
        raise ValueError(
            f"plan_segments: segment_ids must fit into int32, got values from {low} to {high}"
        )


def _fold_ranks(
    first_id: jax.Array, last_id: jax.Array, opened: jax.Array, axis_name: str | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """From per-rank values [B] to (last id upstream, before, after, count), each [B].

    A rank without real tokens has first_id = last_id = 0 and passes on the upstream id.
    """
    zero = jnp.zeros_like(first_id)
    if axis_name is None:
        count = opened + (first_id != 0)
        return zero, zero, count, count
    facts = jax.lax.all_gather(jnp.stack([first_id, last_id, opened]), axis_name)  # [P, 3, B]
    rank = jax.lax.axis_index(axis_name)

    # Scans over ranks rather than unrolled loops: sixteen ranks compile as fast as two.
    def forward(carry, fact):
        seen_id, started = carry
        head, tail, inside = fact
        leads = (head != 0) & (head != seen_id)
        heads = jnp.where(head != 0, started + leads - 1, -1)  # index of the rank's first token
        after_rank = (jnp.where(tail != 0, tail, seen_id), started + inside + leads)
        return after_rank, (seen_id, started, heads)

    def backward(following, heads):
        return jnp.where(heads >= 0, heads, following), following

    zero = zero + 0 * rank
    (_, count), (upstream_id, before, heads) = jax.lax.scan(forward, (zero, zero), facts)
    _, after = jax.lax.scan(backward, count, heads, reverse=True)
    return upstream_id[rank], before[rank], after[rank], count
