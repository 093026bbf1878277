"""Segment numbering against a plain loop over the row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.cases import number
from kernels.segments import pad_tokens, plan_segments, whole_row

FIELDS = ("index", "first", "valid", "before", "after", "count")


def expected(ids, ranks):
    """All fields as their global arrays [B, T] or [B, ranks]."""
    rows = [number(row) for row in ids]
    index, first = (np.stack(x) for x in zip(*rows))
    pieces = np.split(np.arange(ids.shape[1]), ranks)
    count = first.sum(1)
    before = np.stack([first[:, : p[0]].sum(1) for p in pieces], 1)
    after = np.array(
        [
            [next((i for i in index[b, p[-1] + 1 :] if i >= 0), count[b]) for p in pieces]
            for b in range(len(ids))
        ]
    )
    counts = np.repeat(count[:, None], ranks, 1)
    return dict(zip(FIELDS, (index, first, ids != 0, before, after, counts)))


def planned(ids, ranks, check_vma):
    if ranks == 1:
        return plan_segments(jnp.asarray(ids))
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("context",))
    spec = P(None, "context")
    plan = jax.shard_map(
        lambda ids: plan_segments(ids, "context"),
        mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma,
    )  # fmt: skip
    return jax.jit(plan)(jnp.asarray(ids))


# Ids that start anywhere, skip, repeat, go backwards; leading, interior and trailing padding;
# padding inside a segment; one-token segments; an empty row; pieces that are all padding.
ROWS = np.array(
    [
        [0, 3, 3, 0, 3, 5, 5, 5, 0, 0, 0, 0, 5, 1, 1, 0],
        [2] * 16,
        [0] * 16,
        [1, 3, 7, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0],
        [0] * 15 + [9],
        [1, 1, 1, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 6],
    ],
    np.int32,
)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_numbers_by_order_in_the_whole_row(ranks, check_vma):
    segments = planned(ROWS, ranks, check_vma)
    for name, wanted in expected(ROWS, ranks).items():
        np.testing.assert_array_equal(np.asarray(getattr(segments, name)), wanted, err_msg=name)


def test_random_rows_on_four_ranks():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 4, (64, 16)).astype(np.int32)
    segments = planned(ids, 4, True)
    for name, wanted in expected(ids, 4).items():
        np.testing.assert_array_equal(np.asarray(getattr(segments, name)), wanted, err_msg=name)


@pytest.mark.parametrize("ranks", [1, 4])
def test_whole_row_is_the_plan_of_ones(ranks):
    ones = np.ones((2, 8), np.int32)
    if ranks == 1:
        whole = whole_row(2, 8)
    else:
        mesh = Mesh(np.array(jax.devices()[:ranks]), ("context",))
        spec = P(None, "context")
        whole = jax.shard_map(
            lambda x: whole_row(*x.shape, "context"), mesh=mesh, in_specs=spec, out_specs=spec
        )(jnp.asarray(ones))
    for name, wanted in expected(ones, ranks).items():
        np.testing.assert_array_equal(np.asarray(getattr(whole, name)), wanted, err_msg=name)


def test_padding_tokens_at_the_end_changes_no_number():
    ids = np.pad(ROWS, ((0, 0), (0, 5)))
    padded = pad_tokens(plan_segments(jnp.asarray(ROWS)), 5)
    for name, wanted in expected(ids, 1).items():
        np.testing.assert_array_equal(np.asarray(getattr(padded, name)), wanted, err_msg=name)


def test_overflow_is_said():
    with pytest.raises(ValueError, match=r"4 segments but max_segments=3; give max_segments >= 4"):
        plan_segments(jnp.asarray(ROWS), max_segments=3)
    overflow = jax.jit(lambda ids: plan_segments(ids, max_segments=3).overflow)(ROWS)
    np.testing.assert_array_equal(overflow[:, 0], [False, False, False, True, False, True])
    assert not plan_segments(jnp.asarray(ROWS)).overflow.any()
    assert not plan_segments(jnp.asarray(ROWS), max_segments=4).overflow.any()


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (np.ones(4, np.int32), {}, r"must be \[B, T\], not empty; got \(4,\)"),
        (np.ones((2, 0), np.int32), {}, r"not empty; got \(2, 0\)"),
        (np.ones((2, 4), np.float32), {}, "must be integers, got float32"),
        (np.ones((2, 4), np.int32), {"max_segments": 0}, "at least 1, got 0"),
        (np.ones((2, 4), np.int32), {"max_segments": 8.0}, "a whole number, at least 1, got 8.0"),
        (np.ones((2, 4), np.int32), {"axis_name": "rows"}, "around the call, got 'rows'"),
        # Cut off to 32 bits the first are one document, the second padding.
        (np.array([[1, 2**32 + 1]]), {}, "fit into int32, got values from 1 to 4294967297"),
        (np.array([[2**40, 2**40]]), {}, "fit into int32"),
        ([[1, 2]], {}, "must be an array, got list"),
    ],
)
def test_refuses_what_is_not_a_row_of_ids(ids, options, message):
    with pytest.raises(ValueError, match=message):
        plan_segments(ids, **options)


def test_wide_ids_are_taken_where_their_values_are_known():
    segments = plan_segments(ROWS.astype(np.int64))
    np.testing.assert_array_equal(segments.index, plan_segments(jnp.asarray(ROWS)).index)
    with jax.enable_x64(True), pytest.raises(ValueError, match="must be int32 if they are traced"):
        jax.jit(plan_segments)(jnp.asarray(ROWS, jnp.int64))
