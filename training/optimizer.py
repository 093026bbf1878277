"""The optimizer: one optax chain, and rules that cover every parameter."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from model.config import ModelConfig
from model.params import decay_mask, muon_mask, param_shardings, trained_mask
from training.muon import scale_by_muon, scale_by_size
from training.options import OptimizerOptions
from training.tunables import Tunables, rate

# A step's numbers, inside or outside its program -> the optimizer with them.
MakeOptimizer = Callable[[Tunables], optax.GradientTransformation]


def options_of(optimizer: Mapping[str, Any], steps: int) -> OptimizerOptions:
    """config.optimizer with the schedule's length filled in; steps: config.train.steps."""
    options = dict(optimizer)
    options["schedule_steps"] = options["schedule_steps"] or steps
    return OptimizerOptions(**options)


def make_optimizer(
    options: OptimizerOptions, cfg: ModelConfig, mesh: Mesh, tunables: Tunables
) -> optax.GradientTransformation:
    """Clipping, then each parameter's rule from the model's parameter table. See `rule_names`.

    Schedule, clip norm and decay come from `tunables`, everything else from `options`.
    """
    schedule = functools.partial(rate, tunables.schedule)

    def adamw(weight_decay: jax.Array | float) -> optax.GradientTransformation:
        return optax.adamw(
            schedule, b1=options.b1, b2=options.b2, eps=options.eps, weight_decay=weight_decay
        )

    rules = {
        "adamw": adamw(tunables.weight_decay),
        "adamw_no_decay": adamw(0.0),
        "muon": _muon(options.muon_momentum, tunables, param_shardings(cfg, mesh)),
        "untrained": optax.set_to_zero(),
    }
    names = rule_names(options.name, cfg)
    used = set(jax.tree.leaves(names))
    return optax.chain(
        clip_by_norm(tunables.clip_norm),
        optax.partition({name: rules[name] for name in sorted(used)}, names),
    )


def clip_by_norm(limit: jax.Array) -> optax.GradientTransformation:
    """Scales gradients down to a global norm of `limit`.

    Like `optax.clip_by_global_norm`, but it multiplies first, so that with a limit of 1 the results
    are bit-identical to those of a program in which the limit is a constant.
    """

    def update(gradients, params=None):
        norm = optax.tree.norm(gradients)
        return jax.tree.map(lambda g: jax.lax.select(norm < limit, g, g * limit / norm), gradients)

    return optax.stateless(update)


def rule_names(optimizer: str, cfg: ModelConfig) -> Any:
    """Tree of the rule of each parameter: "muon", "adamw", "adamw_no_decay" or "untrained".

    Muon is applied to the matrices that the model's table marks for it; they decay. The table has
    an entry for every parameter, so every parameter has a rule.
    """

    def name(trained: bool, muon: bool, decays: bool) -> str:
        if not trained:
            return "untrained"
        if muon and optimizer == "muon":
            return "muon"
        return "adamw" if decays else "adamw_no_decay"

    return jax.tree.map(name, trained_mask(cfg), muon_mask(cfg), decay_mask(cfg))


def _muon(momentum: float, tunables: Tunables, shardings: Any) -> optax.GradientTransformation:
    chain = optax.chain(
        scale_by_muon(momentum, shardings),
        # 0.2 gives Muon's updates the size of AdamW's, so that both share one learning rate
        # (Liu et al., "Muon is Scalable for LLM Training", 2025).
        scale_by_size(0.2),
        optax.add_decayed_weights(tunables.weight_decay),
        optax.scale_by_learning_rate(functools.partial(rate, tunables.schedule)),
    )
    # In a partition, so that the state's arrays have the same names as with `optax.contrib.muon`.
    return optax.partition({"muon": chain}, lambda params: jax.tree.map(lambda _: "muon", params))
