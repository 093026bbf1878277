"""The optimizer: one optax chain, its schedule, and rules that cover every parameter."""

from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from model.config import ModelConfig
from model.params import decay_mask, muon_mask, param_shardings, trained_mask
from training.muon import scale_by_muon, scale_by_size
from training.options import OptimizerOptions


def options_of(optimizer: Mapping[str, Any], steps: int) -> OptimizerOptions:
    """config.optimizer with the schedule's length filled in; steps: config.train.steps."""
    options = dict(optimizer)
    options["schedule_steps"] = options["schedule_steps"] or steps
    return OptimizerOptions(**options)


def make_schedule(options: OptimizerOptions) -> optax.Schedule:
    """Updates done so far -> learning rate. After the schedule's end the rate stays."""
    peak, final = options.learning_rate, options.learning_rate * options.min_lr_ratio
    if options.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0 if options.warmup_steps else peak,
            peak_value=peak,
            warmup_steps=options.warmup_steps,
            decay_steps=options.schedule_steps,
            end_value=final,
        )
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, options.warmup_steps),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, final, options.decay_steps),
        ],
        boundaries=[options.warmup_steps, options.schedule_steps - options.decay_steps],
    )


def make_optimizer(
    options: OptimizerOptions, cfg: ModelConfig, mesh: Mesh
) -> optax.GradientTransformation:
    """Clipping, then each parameter's rule by the model's own table. See `rule_names`."""
    schedule = make_schedule(options)

    def adamw(weight_decay: float) -> optax.GradientTransformation:
        return optax.adamw(
            schedule, b1=options.b1, b2=options.b2, eps=options.eps, weight_decay=weight_decay
        )

    rules = {
        "adamw": adamw(options.weight_decay),
        "adamw_no_decay": adamw(0.0),
        "muon": _muon(options, param_shardings(cfg, mesh)),
        "untrained": optax.set_to_zero(),
    }
    names = rule_names(options.name, cfg)
    used = set(jax.tree.leaves(names))
    return optax.chain(
        optax.clip_by_global_norm(options.clip_norm),
        optax.partition({name: rules[name] for name in sorted(used)}, names),
    )


def rule_names(optimizer: str, cfg: ModelConfig) -> Any:
    """Tree of the rule of each parameter: "muon", "adamw", "adamw_no_decay" or "untrained".

    Muon takes the matrices that the model's table gives it; they decay. The table has a line for
    every parameter, so every parameter has a rule.
    """

    def name(trained: bool, muon: bool, decays: bool) -> str:
        if not trained:
            return "untrained"
        if muon and optimizer == "muon":
            return "muon"
        return "adamw" if decays else "adamw_no_decay"

    return jax.tree.map(name, trained_mask(cfg), muon_mask(cfg), decay_mask(cfg))


def _muon(options: OptimizerOptions, shardings: Any) -> optax.GradientTransformation:
    chain = optax.chain(
        scale_by_muon(options.muon_momentum, shardings),
        # 0.2 gives Muon's updates the size of AdamW's, so that both share one learning rate
        # (Liu et al., "Muon is Scalable for LLM Training", 2025).
        scale_by_size(0.2),
        optax.add_decayed_weights(options.weight_decay),
        optax.scale_by_learning_rate(make_schedule(options)),
    )
    # In a partition, so that the state's arrays have the names that `optax.contrib.muon` gives.
    return optax.partition({"muon": chain}, lambda params: jax.tree.map(lambda _: "muon", params))
