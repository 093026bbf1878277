"""The decoder: embedding -> blocks -> final norm. A block is norm -> mixer -> norm -> FFN.

The code reads as on one device: parameters and activations are placed by the specs of
model/params.py, and only the mixers know of ranks (their `jax.shard_map` islands).

Axes: B row, T token, D residual width, R repeat of the layer pattern.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels.segments import plan_segments
from model.ahead import Ahead
from model.axes import CONTEXT, EXPERT, FSDP, TENSOR, TOKEN_SPEC, Arrays, Specs, Tree
from model.config import ModelConfig
from model.ffn.protocol import FeedForward
from model.ffn.registry import feed_forwards_of
from model.gathered import finish_with
from model.layer_loop import Layer, run_layers, run_layers_recomputed
from model.layers import constrain, rms_norm, rms_norm_by_copies
from model.mixers.protocol import Metrics, Mixer, RowPlan
from model.mixers.registry import mixers_of, reads_positions
from model.params import block_specs, copies, param_specs, spread_params, use_matrices

_TOKEN_AXIS = {FSDP: 0, EXPERT: 0, CONTEXT: 1}  # which axis of [B, T] a mesh axis cuts


def forward(
    params: Arrays,
    cfg: ModelConfig,
    tokens: jax.Array,
    segment_ids: jax.Array,
    continues: jax.Array,
    carry: Arrays,
    mesh: Mesh,
    positions: jax.Array | None = None,
) -> tuple[jax.Array, Arrays, Metrics]:
    """Hidden states of a batch, what the next rows of the same streams start from, and metrics.

    Args:
        params: see model.params.
        tokens, segment_ids: [B, T] int32, rows over `ROWS`, tokens over "context".
            Segment id 0 is padding; its hidden states are finite and mean nothing.
        continues: [B] bool, the row's first segment continues from the carry.
        carry: from `init_carry` or the previous call. Without cfg.carry it is returned unread, and
            every row starts afresh.
        positions: [B, T] int32, of each token in its document, counted across rows; needed by
            models with layers that read them (`reads_positions`).

    Returns:
        hidden [B, T, D] in the compute dtype, after the final norm; the new carry; and what layers
        report: a tuple over positions, stacked over repeats, for `after_step`.

    Raises:
        ValueError: positions are needed and missing.
    """
    if positions is None and reads_positions(cfg):
        raise ValueError("a layer of this model reads positions: forward needs them")
    plan = plan_rows(segment_ids, continues, mesh, positions)
    hidden = constrain(_embed(params, cfg, tokens, mesh), mesh, TOKEN_SPEC)
    hidden, (blocks, metrics) = _run_blocks(
        params["blocks"], cfg, hidden, plan, carry["blocks"], mesh
    )
    hidden = rms_norm(hidden, params["final_norm"], cfg.norm_eps)
    return hidden, {"blocks": blocks}, metrics


def after_step(
    params: Arrays, cfg: ModelConfig, metrics: tuple[Metrics, ...]
) -> tuple[Arrays, Metrics]:
    """What changes outside the gradient, once an optimizer step; see `FeedForward.after_step`.

    Args:
        params: after the optimizer's update. metrics: of `forward`, means over the step.

    Returns:
        (new parameters, scalars to report as "layer_07/NAME" for layer 7, counted from 0).
    """
    blocks, reported = [], []
    for block, ffn, found in zip(params["blocks"], feed_forwards_of(cfg), metrics, strict=True):
        changed, more = ffn.after_step(block["ffn"], cfg, found)
        blocks.append(block | {"ffn": changed})
        reported.append({name: x for name, x in found.items() if x.ndim == 1} | more)
    scalars = {
        f"layer_{layer:02d}/{name}": values[repeat]
        for layer, (position, repeat) in enumerate(cfg.places)
        for name, values in reported[position].items()
    }
    return params | {"blocks": tuple(blocks)}, scalars


def plan_rows(
    segment_ids: jax.Array, continues: jax.Array, mesh: Mesh, positions: jax.Array | None = None
) -> RowPlan:
    """Works out once per batch what segment_ids [B, T] and continues [B] mean for every layer."""
    axis_name = CONTEXT if mesh.shape[CONTEXT] > 1 else None
    plan = functools.partial(plan_segments, axis_name=axis_name)
    segments = jax.shard_map(plan, mesh=mesh, in_specs=TOKEN_SPEC, out_specs=TOKEN_SPEC)(
        segment_ids
    )
    return RowPlan(segments, continues, jnp.any(segment_ids != 0, axis=1), positions)


def init_carry(cfg: ModelConfig, rows: int) -> Arrays:
    """The carry of `rows` streams before their first token.

    {"blocks": a tuple over positions}, each what its mixer carries, stacked over repeats as
    [R, ...].
    """

    def stacked(repeats: int, mixer: Mixer) -> Arrays:
        layer = mixer.init_carry(cfg, rows)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (repeats, *x.shape)), layer)

    return {"blocks": tuple(map(stacked, cfg.repeats, mixers_of(cfg)))}


def carry_shardings(cfg: ModelConfig, mesh: Mesh) -> Arrays:
    """Tree of `NamedSharding`, one per array of the carry."""

    def sharding(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(None, *spec))

    specs = tuple(mixer.carry_specs(cfg) for mixer in mixers_of(cfg))
    return {"blocks": jax.tree.map(sharding, specs)}


def _embed(params: Arrays, cfg: ModelConfig, tokens: jax.Array, mesh: Mesh) -> jax.Array:
    """[B, T] -> [B, T, D]. A token outside the padded vocabulary gives NaN.

    A rank looks up its columns for the tokens of all ranks that share the table's width out, and
    the columns are then exchanged for tokens: neither the table nor its gradient is ever whole.
    """
    table, spec = params["embedding"], param_specs(cfg)["embedding"]
    kept = spec.partition(mesh)[1]
    axes = (kept,) if isinstance(kept, str) else kept or ()
    where = PartitionSpec(TENSOR, axes)

    def look_up(table, tokens):
        for axis in axes:
            tokens = jax.lax.all_gather(tokens, axis, axis=_TOKEN_AXIS[axis], tiled=True)
        first = jax.lax.axis_index(TENSOR) * table.shape[0]
        mine = (tokens >= first) & (tokens < first + table.shape[0])
        x = jnp.take(table, jnp.where(mine, tokens - first, 0), axis=0)
        x = jax.lax.psum(jnp.where(mine[..., None], x, 0), TENSOR)
        known = (tokens >= 0) & (tokens < cfg.padded_vocab_size)
        x = jnp.where(known[..., None], x, jnp.nan).astype(cfg.compute_dtype)
        for axis in reversed(axes):
            x = jax.lax.all_to_all(x, axis, _TOKEN_AXIS[axis], 2, tiled=True)
        return x

    look_up = jax.shard_map(look_up, mesh=mesh, in_specs=(where, TOKEN_SPEC), out_specs=TOKEN_SPEC)
    return look_up(constrain(table, mesh, where), tokens)


def _run_blocks(
    params: Tree, cfg: ModelConfig, hidden: jax.Array, plan: RowPlan, carry: Tree, mesh: Mesh
) -> tuple[jax.Array, tuple[Tree, Tree]]:
    """All layers: prefix, the pattern `num_repeats` times, suffix.

    params and carry: tuples over positions, stacked over repeats. Returns (hidden, (new carry,
    metrics)), the latter two likewise.

    Nothing inside the loop over layers sums over ranks but the gradients of matrices: small
    parameters and the carry enter it as one copy per rank, whose gradients are added after it, and
    what layers hand to the next row leaves it as one share per rank.
    """
    mixers, specs = mixers_of(cfg), block_specs(cfg)
    layers = [
        _checkpointed(cfg, _layer(cfg, mixer, ffn, spec, mesh))
        for mixer, ffn, spec in zip(mixers, feed_forwards_of(cfg), specs, strict=True)
    ]
    kept = tuple(mixer.carry_specs(cfg) for mixer in mixers)
    begins = jax.tree.map(
        lambda x, spec: x if _is_divided(spec) else copies(x, (CONTEXT,), spec, mesh), carry, kept
    )
    params = tuple(spread_params(*pair, mesh) for pair in zip(params, specs, strict=True))
    hidden, ends, metrics = _run_groups(layers, cfg, params, hidden, begins, plan, mesh)
    ends = jax.tree.map(
        lambda x, spec: x if _is_divided(spec) else jnp.sum(x, axis=1, dtype=x.dtype), ends, kept
    )
    new = (
        mixer.new_carry(cfg, plan, begin, end)
        for mixer, begin, end in zip(mixers, carry, ends, strict=True)
    )
    shares = jax.tree.map(lambda x: x if x.ndim == 1 else jnp.sum(x, axis=1), metrics)
    return hidden, (tuple(new), shares)


def _run_groups(
    layers: list[Layer],
    cfg: ModelConfig,
    params: Tree,
    hidden: jax.Array,
    carry: Tree,
    plan: Any,
    mesh: Mesh,
) -> tuple[jax.Array, tuple[Tree, ...], tuple[Metrics, ...]]:
    """(hidden, ends, metrics) after prefix, pattern and suffix; the latter two over positions."""
    specs = block_specs(cfg)
    all_ends: tuple[Tree, ...] = ()
    all_metrics: tuple[Metrics, ...] = ()
    for group in cfg.groups:
        part = group.positions
        scan = cfg.scan_layers and (group.repeats > 1 or len(cfg.groups) == 1)
        run = _loop_of(cfg.remat, Ahead(specs[part], cfg, mesh, group.repeats))
        hidden, (ends, metrics) = run(layers[part], params[part], hidden, carry[part], plan, scan)
        all_ends, all_metrics = all_ends + ends, all_metrics + metrics
    return hidden, all_ends, all_metrics


def _loop_of(remat: str, ahead: Ahead) -> Callable[..., tuple[jax.Array, tuple[Tree, Tree]]]:
    """The loop over layers for a policy of model/remat.py. "none" and "dots" leave the gradient to
    JAX, so their matrices are gathered where they are used."""
    if remat in ("none", "dots"):
        return run_layers
    return functools.partial(run_layers_recomputed, ahead, to_host=remat == "offload")


def _is_divided(spec: PartitionSpec) -> bool:
    """Whether the context axis divides an array of the carry."""
    return any(CONTEXT in (axes if isinstance(axes, tuple) else (axes,)) for axes in spec)


def _layer(cfg: ModelConfig, mixer: Mixer, ffn: FeedForward, specs: Specs, mesh: Mesh) -> Layer:
    """One layer as layer_loop.py wants it. params: matrices at rest, the others as copies."""

    def layer(params: Arrays, hidden: jax.Array, carry: Arrays, plan: RowPlan, entry: Tree):
        params = use_matrices(params, specs, cfg, mesh)
        x = rms_norm_by_copies(hidden, params["mixer_norm"], cfg.norm_eps, mesh)
        x, ends, entry, metrics = mixer.forward(params["mixer"], cfg, x, plan, carry, entry, mesh)
        ffn_params, hidden = finish_with(params["ffn"], hidden + x)
        x = rms_norm_by_copies(hidden, params["ffn_norm"], cfg.norm_eps, mesh)
        x, reported = ffn.forward(ffn_params, cfg, x, plan, mesh)
        return constrain(hidden + x, mesh, TOKEN_SPEC), ends, entry, metrics | reported

    return layer


def _checkpointed(cfg: ModelConfig, layer: Layer) -> Layer:
    """With remat="dots", the layer rematerialised but for its products."""
    if cfg.remat != "dots":
        return layer
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    # A scan's body is compiled apart from the forward, so nothing can be shared by mistake there.
    return jax.checkpoint(layer, policy=policy, prevent_cse=not cfg.scan_layers)
