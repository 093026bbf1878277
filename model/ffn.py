"""Feed-forward layers: their protocol (with metrics they report), SwiGLU, and the registry.

Axes: B row, T token, D residual width, F FFN column.
"""

import dataclasses
from typing import Protocol

import jax
from jax.sharding import Mesh

from model.axes import TENSOR, Arrays, MeshNeed, Specs, matrix, matrix_flops
from model.config import ModelConfig
from model.layers import matmul
from model.mixers.protocol import Metrics, RowPlan
from options import wrong


class FeedForward(Protocol):
    """A layer that works on each token by itself."""

    def param_specs(self, cfg: ModelConfig) -> Specs:
        """The parameters of one layer, by name."""

    def forward(
        self, params: Arrays, cfg: ModelConfig, x: jax.Array, plan: RowPlan, mesh: Mesh
    ) -> tuple[jax.Array, Metrics]:
        """x [B, T, D] -> (y [B, T, D] in x's dtype, metrics).

        params: matrices in the compute dtype, gathered over fsdp; the others float32.
        """

    def flops_per_token(self, cfg: ModelConfig) -> float:
        """Forward FLOPs of one layer a token."""

    def mesh_needs(self, cfg: ModelConfig) -> list[MeshNeed]:
        """Sizes that mesh axes must divide."""


@dataclasses.dataclass(frozen=True)
class SwiGlu:
    """(silu(x gate) * (x up)) down; gate, up [D, F], down [F, D]."""

    def param_specs(self, cfg: ModelConfig) -> Specs:
        shape, std = (cfg.d_model, cfg.d_ff), cfg.init_std
        return {
            "gate": matrix(shape, ("width", "ffn"), std),
            "up": matrix(shape, ("width", "ffn"), std),
            "down": matrix(shape[::-1], ("ffn", "width"), cfg.residual_std),
        }

    def forward(
        self, params: Arrays, cfg: ModelConfig, x: jax.Array, plan: RowPlan, mesh: Mesh
    ) -> tuple[jax.Array, Metrics]:
        return swiglu(x, params), {}

    def flops_per_token(self, cfg: ModelConfig) -> float:
        return matrix_flops(self.param_specs(cfg))

    def mesh_needs(self, cfg: ModelConfig) -> list[MeshNeed]:
        return [MeshNeed(TENSOR, "d_ff", cfg.d_ff)]


@jax.named_scope("ffn")
def swiglu(x: jax.Array, params: Arrays) -> jax.Array:
    """[B, T, D] -> [B, T, D] by the parameters of a `SwiGlu`."""
    gate = matmul(x, params["gate"])
    return matmul(jax.nn.silu(gate) * matmul(x, params["up"]), params["down"])


FEED_FORWARDS: dict[str, FeedForward] = {
    "swiglu": SwiGlu(),
}


def feed_forwards_of(cfg: ModelConfig) -> tuple[FeedForward, ...]:
    """The feed-forward layers of one repeat, one beside each mixer of the pattern.

    Raises:
        OptionError: config.model.ffn names one that does not exist, or too few or too many.
    """
    names = cfg.ffns
    if any(name not in FEED_FORWARDS for name in names) or len(names) != len(cfg.mixers):
        needs = "one name, or one for each mixer of config.model.pattern, of "
        raise wrong("config.model.ffn", cfg.ffn, needs + ", ".join(FEED_FORWARDS), "swiglu")
    return tuple(FEED_FORWARDS[name] for name in names)
