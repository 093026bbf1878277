"""One training step: loss -> gradient -> update, compiled once.

Axes: W window, B row, T token, A part of the rows (accumulation).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data.batch import Batch
from model.axes import CONTEXT, MESH_AXES, ROWS
from model.config import ModelConfig
from model.decoder import after_step, carry_shardings, forward
from model.flops import key_flops_per_token
from model.loss import LossSums, loss_sums, token_scores
from training.compiler import compiler_options
from training.optimizer import MakeOptimizer
from training.options import TrainOptions
from training.state import TrainState
from training.tunables import Tunables, rate

LN2 = math.log(2.0)
Metrics = dict[str, jax.Array]
# What a step returns for the loop and the meter; everything else it returns is reported.
CONTROL = ("finite", "stop", "tokens", "attended")


def make_train_step(
    options: TrainOptions,
    cfg: ModelConfig,
    mesh: Mesh,
    make_optimizer: MakeOptimizer,
    shapes: TrainState,
) -> Any:
    """jitted (state, batch, votes, tunables) -> (state, metrics). The state given is used up
    (donated).

    Args:
        shapes: from `state_shapes`: the new state lies where the old one did.

    batch: [W, B, T]; the gradient flows back through all W windows. votes: int32 [devices], one of
    each process's `Votes`; metrics["stop"] is their maximum, so that all processes hear of one wish
    at the same step. tunables: see `training.tunables.place`; options.z_loss only says whether that
    loss is reported. metrics: float32 and int32 scalars, whole on every device, all of which are
    reported but `CONTROL`; those of layers are means over windows and parts, under the names that
    the decoder gives them.
    """

    where = jax.tree.map(lambda x: x.sharding, shapes)

    def step(
        state: TrainState, batch: Batch, votes: jax.Array, tunables: Tunables
    ) -> tuple[TrainState, Metrics]:
        optimizer = make_optimizer(tunables)
        total = jnp.maximum(jnp.sum(batch.loss_weights), 1.0)
        grads, (nll, z, correct), reported, carry = _gradients(
            options, tunables.z_loss, cfg, mesh, state, batch, total
        )
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        params, reported = after_step(params, cfg, reported)
        done = state._replace(params=params, opt_state=opt_state, carry=carry)
        loss, norm = nll / total, optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(z) & jnp.isfinite(norm)
        applied = finite & ~_is_spike(options, state, loss)
        if options.may_skip:
            done = jax.tree.map(lambda new, old: jnp.where(applied, new, old), done, state)
        done = _count(done, loss, applied)
        count = lambda x: jnp.sum(x, dtype=jnp.int32)  # noqa: E731
        metrics = {
            "loss": loss,
            "accuracy": correct / total,
            "bits_per_byte": nll / LN2 / jnp.maximum(count(batch.target_bytes), 1),
            "grad_norm": norm,
            "learning_rate": rate(tunables.schedule, state.step - state.skipped),
            "tokens": count(batch.segment_ids != 0),
            "attended": _attended(cfg, batch.segment_ids),
            "finite": finite,
            "steps_skipped": done.skipped,
            "stop": jnp.max(votes),
        }
        if options.z_loss:
            metrics["z_loss"] = z / total
        return done, reported | metrics

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(where, whole),
        compiler_options=compiler_options(mesh),
    )


def make_eval_step(cfg: ModelConfig, mesh: Mesh) -> Any:
    """jitted (params, carry, batch [W, B, T]) -> (carry, sums as `eval_values` takes).

    The carry given is used up.
    """

    def eval_step(params: Any, carry: Any, batch: Batch) -> tuple[Any, Metrics]:
        carry, (sums, _) = _windows(cfg, mesh, params, batch, carry)
        return carry, {
            "nll": sums.nll,
            "correct": sums.correct,
            "weight": jnp.sum(batch.loss_weights),
            "bytes": jnp.sum(batch.target_bytes, dtype=jnp.int32),
        }

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        eval_step,
        donate_argnums=1,
        out_shardings=(carry_shardings(cfg, mesh), whole),
        compiler_options=compiler_options(mesh),
    )


def make_score_step(cfg: ModelConfig, mesh: Mesh) -> Any:
    """jitted (params, carry, batch [1, B, T]) -> (carry, (nats, correct) of each target [B, T]).

    What `make_eval_step` sums, token by token, whatever its weight; see `token_scores`. The carry
    given is used up.
    """

    def score_step(
        params: Any, carry: Any, batch: Batch
    ) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        one: Batch = jax.tree.map(lambda x: x[0], batch)
        hidden, carry, _ = forward(
            params, cfg, one.tokens, one.segment_ids, one.continues, carry, mesh, one.positions
        )
        return carry, token_scores(params, cfg, hidden, one.targets, mesh)

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        score_step,
        donate_argnums=1,
        out_shardings=(carry_shardings(cfg, mesh), whole),
        compiler_options=compiler_options(mesh),
    )


class Votes(NamedTuple):
    """What this process may say with a step: int32 [devices], one on each of its devices.

    Each process makes its own; the step's maximum is over what every process hands in.
    """

    proceed: jax.Array  # 0
    stop: jax.Array  # 1: a signal
    no_data: jax.Array  # NO_DATA + its number: it will have no further batch


NO_DATA = 2


def make_votes(mesh: Mesh) -> Votes:
    """The votes of this process."""
    sharding = NamedSharding(mesh, PartitionSpec(MESH_AXES))

    def vote(wish: int) -> jax.Array:
        return jax.make_array_from_callback(
            (mesh.size,), sharding, lambda index: np.full(1, wish, np.int32)
        )

    return Votes(vote(0), vote(1), vote(NO_DATA + jax.process_index()))


def batch_shapes(
    mesh: Mesh, windows: int, rows: int, length: int, positions: bool = False
) -> Batch:
    """A batch's shapes, types and shardings; nothing is read."""

    def array(shape, dtype, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def tokens(dtype):
        return array((windows, rows, length), dtype, None, ROWS, CONTEXT)

    number = tokens(jnp.int32)
    return Batch(
        tokens=number,
        targets=number,
        segment_ids=number,
        positions=number if positions else None,
        loss_weights=tokens(jnp.float32),
        target_bytes=number,
        continues=array((windows, rows), jnp.bool_, None, ROWS),
    )


def _gradients(options: TrainOptions, z_loss, cfg, mesh: Mesh, state: TrainState, batch, total):
    """(gradient of the summed loss over `total`, LossSums, layers' metrics, new carry), over all
    rows.

    Rows are cut into `grad_accum_steps` parts, each taking some rows of every rank. The parts'
    losses are divided by the whole step's weight, so their gradients add up to that of all rows.
    """

    def loss(params, carry, batch):
        carry, (sums, reported) = _windows(cfg, mesh, params, batch, carry)
        return (sums.nll + z_loss * sums.z) / total, (sums, reported, carry)

    gradient = jax.grad(loss, has_aux=True)
    if options.grad_accum_steps == 1:
        grads, (sums, reported, carry) = gradient(state.params, state.carry, batch)
        return grads, sums, reported, carry

    def add(so_far, part):
        grads, (sums, reported, carry) = gradient(state.params, *part)
        return jax.tree.map(jnp.add, so_far, (grads, sums)), (reported, carry)

    zeros = jax.tree.map(jnp.zeros_like, (state.params, LossSums(*[jnp.float32(0)] * 3)))
    parts = jax.tree.map(lambda x: _split_rows(x, options.grad_accum_steps), (state.carry, batch))
    (grads, sums), (reported, carry) = jax.lax.scan(add, zeros, parts)
    return grads, sums, _means(reported), jax.tree.map(_join_rows, carry)


def _split_rows(x: jax.Array, parts: int) -> jax.Array:
    """[L, B, ...] -> [A, L, B/A, ...], part a holding rows a, A + a, ...: some of every rank."""
    lead, rows, *rest = x.shape
    return jnp.moveaxis(x.reshape(lead, rows // parts, parts, *rest), 2, 0)


def _join_rows(x: jax.Array) -> jax.Array:
    """The inverse of `_split_rows`."""
    parts, lead, rows, *rest = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(lead, rows * parts, *rest)


def _windows(cfg: ModelConfig, mesh: Mesh, params, batch: Batch, carry):
    """(new carry, (LossSums, layers' metrics)) over the windows of a batch, one after another.

    Each window is rematerialised: between windows only the carry is kept for the gradient.
    """

    def window(carry, batch: Batch):
        arrays = batch.tokens, batch.segment_ids, batch.continues
        hidden, carry, reported = forward(params, cfg, *arrays, carry, mesh, batch.positions)
        sums = loss_sums(params, cfg, hidden, batch.targets, batch.loss_weights, mesh)
        return carry, (sums, reported)

    if batch.tokens.shape[0] == 1:
        return window(carry, jax.tree.map(lambda x: x[0], batch))
    carry, (sums, reported) = jax.lax.scan(jax.checkpoint(window, prevent_cse=False), carry, batch)
    # A window's metrics are [W] here, and the sum of its losses.
    return carry, (jax.tree.map(jnp.sum, sums), _means(reported))


def _means(reported: Any) -> Any:
    """Means over the first axis, windows or parts."""
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), reported)


def _is_spike(options: TrainOptions, state: TrainState, loss: jax.Array) -> jax.Array:
    """Whether the loss is far above the last losses; never before the window is full."""
    if not options.spike_deviations:
        return jnp.bool_(False)
    full = state.seen >= state.recent.shape[0]
    limit = state.recent.mean() + options.spike_deviations * state.recent.std()
    return full & (loss > limit)


def _attended(cfg: ModelConfig, segment_ids: jax.Array) -> jax.Array:
    """Keys of the row that a step's real tokens see in an attention layer, float32; 0 without such
    layers. Keys carried from the row before are not counted."""
    if not key_flops_per_token(cfg, 1.0):
        return jnp.float32(0)
    place = jnp.arange(segment_ids.shape[-1])
    begins = segment_ids != jnp.roll(segment_ids, 1, axis=-1)
    begin = jax.lax.cummax(jnp.where(begins | (place == 0), place, 0), axis=segment_ids.ndim - 1)
    seen = jnp.where(segment_ids != 0, place - begin + 1, 0)
    return jnp.sum(seen, dtype=jnp.float32)


def _count(state: TrainState, loss: jax.Array, applied: jax.Array) -> TrainState:
    """The step's own bookkeeping. A spike's loss counts among the last ones: after a lasting change
    of the data the rule gets used to it, where it would skip every step from then on."""
    place, finite = state.seen % state.recent.shape[0], jnp.isfinite(loss)
    kept = jnp.where(finite, loss, state.recent[place])
    return state._replace(
        step=state.step + 1,
        skipped=state.skipped + (~applied).astype(jnp.int32),
        recent=state.recent.at[place].set(kept),
        seen=state.seen + finite.astype(jnp.int32),
    )
