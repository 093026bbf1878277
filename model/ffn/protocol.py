"""The protocol of a feed-forward layer: parameters, forward, FLOPs, metrics, change per step.

Each layer is a module in this package, with one line in registry.py.

Axes: B row, T token, D residual width.
"""

from typing import Protocol

import jax
from jax.sharding import Mesh

from model.axes import Arrays, MeshNeed, Specs
from model.config import ModelConfig
from model.mixers.protocol import Metrics, RowPlan


class FeedForward(Protocol):
    """A layer that processes each token independently; a module with these functions."""

    def param_specs(self, cfg: ModelConfig) -> Specs:
        """The parameters of one layer, by name."""

    def forward(
        self, params: Arrays, cfg: ModelConfig, x: jax.Array, plan: RowPlan, mesh: Mesh
    ) -> tuple[jax.Array, Metrics]:
        """x [B, T, D] -> (y [B, T, D] in x's dtype, metrics).

        params: matrices as returned by `use_params`; the others float32, as one copy per token rank
        [ranks, ...].
        """

    def after_step(
        self, params: Arrays, cfg: ModelConfig, metrics: Metrics
    ) -> tuple[Arrays, Metrics]:
        """Changes parameters outside the gradient, once per optimizer step.

        Args:
            params: after the optimizer's update, all repeats stacked [R, ...], as stored.
            metrics: what `forward` returned, stacked [R, ...]: contributions summed, means over the
                windows and parts of the step.

        Returns:
            (new parameters, metrics to report, [R] each).
        """

    def flops_per_token(self, cfg: ModelConfig) -> float:
        """Forward FLOPs of one layer per token."""

    def mesh_needs(self, cfg: ModelConfig) -> list[MeshNeed]:
        """Sizes that mesh axes must divide."""
