"""The decoder: embedding -> blocks -> final norm. A block is norm -> mixer -> norm -> SwiGLU.

The code reads as on one device: parameters and activations are placed by the specs of
model/sharding.py, and only the mixers know of ranks (their `jax.shard_map` islands).

Axes: B row, T token, D residual width, R repeat of the layer pattern.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels.segments import plan_segments
from model.attention import attention_mixer
from model.config import ModelConfig
from model.kda_layer import STATE_SPEC, TAIL_SPEC, RowPlan, init_kda_carry, kda_mixer
from model.layers import constrain, rms_norm, swiglu
from model.sharding import CONTEXT, TOKEN_SPEC, block_specs, param_specs, use_params

Arrays = dict[str, Any]
_TOKEN_AXIS = {"fsdp": 0, "context": 1}  # which axis of [B, T] a mesh axis cuts


def forward(
    params: Arrays,
    cfg: ModelConfig,
    tokens: jax.Array,
    segment_ids: jax.Array,
    continues: jax.Array,
    carry: Arrays,
    mesh: Mesh,
) -> tuple[jax.Array, Arrays]:
    """Hidden states of a batch, and what the next rows of the same streams start from.

    Args:
        params: see model.sharding.
        tokens, segment_ids: [B, T] int32, rows over ("data", "fsdp"), tokens over "context".
            Segment id 0 is padding; its hidden states are finite and mean nothing.
        continues: [B] bool, the row's first segment goes on from the carry.
        carry: from `init_carry` or the previous call. Without cfg.carry it is handed on unread, and
            every row starts afresh.

    Returns:
        hidden [B, T, D] in the compute dtype, after the final norm; the new carry. A KDA layer
        carries its state and the convolution's last inputs. Attention layers carry nothing: they
        see this row only, also where it continues.
    """
    plan = plan_rows(segment_ids, continues, mesh)
    hidden = constrain(_embed(params, cfg, tokens, mesh), mesh, TOKEN_SPEC)
    hidden, blocks = _run_blocks(params["blocks"], cfg, hidden, plan, carry["blocks"], mesh)
    hidden = rms_norm(hidden, params["final_norm"], cfg.norm_eps)
    return hidden, {"blocks": blocks}


def plan_rows(segment_ids: jax.Array, continues: jax.Array, mesh: Mesh) -> RowPlan:
    """Works out once a batch what segment_ids [B, T] and continues [B] mean for every layer."""
    axis_name = CONTEXT if mesh.shape[CONTEXT] > 1 else None
    plan = functools.partial(plan_segments, axis_name=axis_name)
    segments = jax.shard_map(plan, mesh=mesh, in_specs=TOKEN_SPEC, out_specs=TOKEN_SPEC)(
        segment_ids
    )
    return RowPlan(segments, continues, jnp.any(segment_ids != 0, axis=1))


def init_carry(cfg: ModelConfig, rows: int) -> Arrays:
    """The carry of `rows` streams before their first token.

    {"blocks": a tuple over the pattern}, KDA layers {"state": [R, B, H, K, V] float32, "conv":
    {"q", "k", "v"} [R, B, W - 1, channels] in the compute dtype}, others {}; {} everywhere without
    cfg.carry.
    """

    def stacked(mixer: str) -> Arrays:
        if mixer != "kda" or not cfg.carry:
            return {}
        layer = init_kda_carry(cfg, rows)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (cfg.num_repeats, *x.shape)), layer)

    return {"blocks": tuple(stacked(mixer) for mixer in cfg.pattern)}


def carry_shardings(cfg: ModelConfig, mesh: Mesh) -> Arrays:
    """Tree of `NamedSharding`, one an array: rows as the batch's, heads over tensor."""

    def sharding(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(None, *spec))

    def stacked(mixer: str) -> Arrays:
        if mixer != "kda" or not cfg.carry:
            return {}
        conv = dict.fromkeys(("q", "k", "v"), sharding(TAIL_SPEC))
        return {"state": sharding(STATE_SPEC), "conv": conv}

    return {"blocks": tuple(stacked(mixer) for mixer in cfg.pattern)}


def _embed(params: Arrays, cfg: ModelConfig, tokens: jax.Array, mesh: Mesh) -> jax.Array:
    """[B, T] -> [B, T, D]. A token outside the padded vocabulary gives NaN.

    A rank looks up its columns for the tokens of all ranks that share the table's width out, and
    the columns are then exchanged for tokens: neither the table nor its gradient is ever whole.
    """
    table, spec = params["embedding"], param_specs(cfg)["embedding"]
    kept = spec.partition(mesh)[1]
    axes = (kept,) if isinstance(kept, str) else kept or ()
    where = PartitionSpec("tensor", axes)

    def look_up(table, tokens):
        for axis in axes:
            tokens = jax.lax.all_gather(tokens, axis, axis=_TOKEN_AXIS[axis], tiled=True)
        first = jax.lax.axis_index("tensor") * table.shape[0]
        mine = (tokens >= first) & (tokens < first + table.shape[0])
        x = jnp.take(table, jnp.where(mine, tokens - first, 0), axis=0)
        x = jax.lax.psum(jnp.where(mine[..., None], x, 0), "tensor")
        known = (tokens >= 0) & (tokens < cfg.padded_vocab_size)
        x = jnp.where(known[..., None], x, jnp.nan).astype(cfg.compute_dtype)
        for axis in reversed(axes):
            x = jax.lax.all_to_all(x, axis, _TOKEN_AXIS[axis], 2, tiled=True)
        return x

    look_up = jax.shard_map(look_up, mesh=mesh, in_specs=(where, TOKEN_SPEC), out_specs=TOKEN_SPEC)
    return look_up(constrain(table, mesh, where), tokens)


def _run_blocks(params, cfg: ModelConfig, hidden, plan: RowPlan, carry, mesh: Mesh):
    """All layers: the pattern, `repeats` times. params and carry: tuples over the pattern, stacked
    over repeats."""
    blocks = [_block(cfg, mixer, plan, mesh) for mixer in cfg.pattern]

    def repeat(hidden, stacked):
        ends = []
        for block, layer, begin in zip(blocks, *stacked):
            hidden, end = block(layer, hidden, begin)
            ends.append(end)
        return hidden, tuple(ends)

    if cfg.scan_layers:
        return jax.lax.scan(repeat, hidden, (params, carry))
    ends = []
    for index in range(cfg.num_repeats):
        stacked = jax.tree.map(lambda x, index=index: x[index], (params, carry))
        hidden, end = repeat(hidden, stacked)
        ends.append(end)
    return hidden, jax.tree.map(lambda *layers: jnp.stack(layers), *ends)


def _block(cfg: ModelConfig, mixer: str, plan: RowPlan, mesh: Mesh):
    """(params, hidden, carry) -> (hidden, carry) of one layer, rematerialised as cfg.remat says."""
    specs = block_specs(cfg, mixer)

    def block(params, hidden, carry):
        # Else XLA casts all layers' matrices before the loop over layers, and keeps both.
        params, hidden = jax.lax.optimization_barrier((params, hidden))
        params = use_params(params, specs, cfg, mesh)
        x = rms_norm(hidden, params["mixer_norm"], cfg.norm_eps)
        if mixer == "kda":
            x, carry = kda_mixer(params["mixer"], cfg, x, plan, carry, mesh)
        else:
            x = attention_mixer(params["mixer"], cfg, x, plan.segments, mesh)
        hidden = hidden + x
        x = rms_norm(hidden, params["ffn_norm"], cfg.norm_eps)
        return constrain(hidden + swiglu(x, params["ffn"]), mesh, TOKEN_SPEC), carry

    if cfg.remat == "none":
        return block
    if cfg.remat == "full":
        policy = jax.checkpoint_policies.nothing_saveable
    else:
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    # A scan's body is compiled apart from the forward, so nothing can be shared by mistake there.
    return jax.checkpoint(block, policy=policy, prevent_cse=not cfg.scan_layers)
