"""Attention on TPU: JAX's splash attention kernels, with block tables computed from the segments.

The library usually builds its tables from a mask that is known at trace time. Here the tables are
traced: the rank's position in the row determines what is causal, and blocks without a common
segment are skipped. Inside a block, positions and segment numbers mask the scores.

The separate dq kernel is used, because the library's fused backward keeps one dq per block of keys,
which is quadratic in the row length. The kernels do not declare the mesh axes over which their
results vary, so inside `jax.shard_map` they need check_vma=False.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from kernels.attention.places import Blocks, Places, meeting, own_block


def attend(blocks: Blocks, q: jax.Array, k: jax.Array, v: jax.Array, places: Places) -> jax.Array:
    """See `blockwise.attend`; the result at padding is finite but meaningless."""
    # A padding query meets its own block of keys, because a softmax over no keys would be NaN.
    run = meeting(places, blocks) | own_block(places, blocks)
    q = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)

    def attend_row(row):
        q, k, v, q_index, k_index, run = row
        kernel = _kernel(blocks, run, places.q_position)
        return kernel(q, k, v, splash.SegmentIds(q_index, k_index))

    rows = (q, k, v, places.q_index, places.k_index, run)
    if q.shape[0] == 1:
        return attend_row(jax.tree.map(lambda x: x[0], rows))[None]
    return jax.lax.map(attend_row, rows)


def _kernel(blocks: Blocks, run: jax.Array, q_position: jax.Array) -> splash.SplashAttentionKernel:
    """The library's kernels for one row; run: [n / blocks.q, s / blocks.k] bool."""
    by_queries, by_keys = _next_key_block(run), _next_query_block(run)

    def table(following: jax.Array) -> MaskInfo:
        return MaskInfo(
            data_next=following.astype(jnp.int16)[None],
            mask_next=None,
            block_mask=run.astype(jnp.int8)[None],
            partial_mask_blocks=None,
            q_sequence=q_position,  # type: ignore[arg-type]  # may be traced, like the others
        )

    return splash.SplashAttentionKernel(
        table(by_queries),
        table(by_queries),
        table(by_keys),
        block_sizes=splash.BlockSizes(
            block_q=blocks.q,
            block_kv=blocks.k,
            block_q_dkv=blocks.q,
            block_kv_dkv=blocks.k,
            block_q_dq=blocks.q,
            block_kv_dq=blocks.k,
        ),
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=None,
        mask_function=_causal,
        interpret=False,
    )


def _causal(q_position: jax.Array, k_position: jax.Array) -> jax.Array:
    return q_position >= k_position


def _next_key_block(run: jax.Array) -> jax.Array:
    """For each step along the keys, the key block to load: the block of this step if it runs, else
    that of the next step that does, possibly for the next block of queries."""
    here = _next_along(run, axis=1)
    then = jnp.roll(here[:, :1], -1, axis=0)
    return jnp.where(here < run.shape[1], here, then)


def _next_query_block(run: jax.Array) -> jax.Array:
    """The same for steps along the queries; a block of keys may have no query at all."""
    here = _next_along(run, axis=0)
    then = jnp.roll(here[:1], -1, axis=1)
    return jnp.minimum(jnp.where(here < run.shape[0], here, then), run.shape[0] - 1)


def _next_along(run: jax.Array, axis: int) -> jax.Array:
    """For each block, the first block at or after it that runs; the axis size if there is none."""
    size = run.shape[axis]
    number = jax.lax.broadcasted_iota(jnp.int32, run.shape, axis)
    return jax.lax.cummin(jnp.where(run, number, size), axis=axis, reverse=True)
