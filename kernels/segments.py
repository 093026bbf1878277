"""What a batch's segment ids mean, worked out once a batch for every layer and rank.

A segment is a run of one nonzero id; id 0 is padding and transparent: runs of one id with only
padding between them are one segment. Segments are numbered by their order in the whole row,
whatever the ids are. Everything here depends on the ids alone, so layers exchange none of it again.
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
        index: [B, T] int32, the 0-based order number of the token's segment in the whole row; -1 at
            padding.
        first: [B, T] bool, the token is its segment's first real token in the whole row.
        valid: [B, T] bool, the token is not padding.
        before: [B, 1] int32, how many segments started on earlier ranks. The first real token here
            continues a segment from upstream exactly if its index is before - 1.
        after: [B, 1] int32, index of the first real token on later ranks, count where there is
            none. The segment of this rank's last real token ends here exactly if its index is not
            after.
        count: [B, 1] int32, how many segments the whole row has.
        max_segments: static bound for arrays with one entry a segment, or None.
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
        """[B, 1] bool: the row has more segments than max_segments (never, without a bound)."""
        if self.max_segments is None:
            return jnp.zeros_like(self.count, dtype=bool)
        return self.count > self.max_segments


def plan_segments(
    segment_ids: jax.Array, axis_name: str | None = None, max_segments: int | None = None
) -> Segments:
    """Number the segments of `segment_ids` [B, T] integer, of values that int32 holds.

    With axis_name the call stands inside `jax.shard_map` and T is the rank's part of the row; three
    integers a row are gathered over that axis. max_segments bounds arrays that `kda` returns with
    one entry a segment (final_state="all") and nothing else.

    Raises:
        ValueError: for a wrong shape, dtype, axis or bound; for 64-bit ids, traced or beyond int32
            (cut off, two documents could become one); and when a row of concrete (not traced)
            ids has more than max_segments segments. Under tracing `Segments.overflow` says so.
    """
    _check(segment_ids, max_segments)
    check_axis("plan_segments", axis_name)
    ids = segment_ids.astype(jnp.int32)
    valid = ids != 0
    rows, length = ids.shape
    position = jnp.arange(length, dtype=jnp.int32)
    # Position of the last real token before each token, -1 where the rank has none.
    seen = jax.lax.cummax(jnp.where(valid, position, -1), axis=1)
    previous = jnp.concatenate([jnp.full_like(seen[:, :1], -1), seen[:, :-1]], axis=1)
    previous_id = jnp.take_along_axis(ids, jnp.maximum(previous, 0), axis=1)
    opens = valid & (previous >= 0) & (ids != previous_id)  # starts, decided without upstream
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
    """One segment without padding in every row: what `kda` assumes when no segments are given."""
    rank = jnp.int32(0) if axis_name is None else jax.lax.axis_index(axis_name)
    ones = jnp.ones((rows, length), jnp.int32)
    if axis_name is not None:
        ones = ones + 0 * rank  # the same on every rank, but typed as varying like the other fields
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
    """Whether x has a shape and a type: an array of JAX or NumPy, concrete or traced."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def check_axis(caller: str, axis_name: str | None) -> None:
    """Raises ValueError where axis_name is not an axis that a `jax.shard_map` around us maps."""
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
    """64-bit ids are taken where their values are known to fit into 32 bits."""
    if isinstance(ids, jax.core.Tracer):
        raise ValueError(
            f"plan_segments: segment_ids must be int32 where they are traced, got {ids.dtype}"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < -(2**31) or high >= 2**31:
        raise ValueError(
            f"plan_segments: segment_ids must fit into int32, got values from {low} to {high}"
        )


def _fold_ranks(
    first_id: jax.Array, last_id: jax.Array, opened: jax.Array, axis_name: str | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """From per-rank facts [B] to (last id upstream, before, after, count), each [B].

    A rank without real tokens has first_id = last_id = 0 and passes the upstream id on.
    """
    zero = jnp.zeros_like(first_id)
    if axis_name is None:
        count = opened + (first_id != 0)
        return zero, zero, count, count
    facts = jax.lax.all_gather(jnp.stack([first_id, last_id, opened]), axis_name)  # [P, 3, B]
    rank = jax.lax.axis_index(axis_name)

    # Scans over ranks rather than loops: sixteen ranks compile as fast as two.
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
