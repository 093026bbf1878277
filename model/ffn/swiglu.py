"""SwiGLU: (silu(x gate) * (x up)) down; gate, up [D, F], down [F, D].

Axes: B row, T token, D residual width, F FFN column.
"""

import jax
from jax.sharding import Mesh

from model.axes import TENSOR, Arrays, MeshNeed, Specs, matrix, matrix_flops
from model.config import ModelConfig
from model.layers import matmul
from model.mixers.protocol import Metrics, RowPlan


def param_specs(cfg: ModelConfig) -> Specs:
    """F = config.model.d_ff."""
    return swiglu_specs(cfg, cfg.d_ff)


def swiglu_specs(cfg: ModelConfig, columns: int) -> Specs:
    """Normally initialised matrices with F = columns; see `swiglu`."""
    shape, std = (cfg.d_model, columns), cfg.init_std
    return {
        "gate": matrix(shape, ("width", "ffn"), std),
        "up": matrix(shape, ("width", "ffn"), std),
        "down": matrix(shape[::-1], ("ffn", "width"), cfg.residual_std),
    }


def forward(
    params: Arrays, cfg: ModelConfig, x: jax.Array, plan: RowPlan, mesh: Mesh
) -> tuple[jax.Array, Metrics]:
    """x [B, T, D] -> [B, T, D]; no metrics. See `protocol.FeedForward`."""
    return swiglu(x, params), {}


def after_step(params: Arrays, cfg: ModelConfig, metrics: Metrics) -> tuple[Arrays, Metrics]:
    """Nothing changes outside the gradient."""
    return params, {}


def flops_per_token(cfg: ModelConfig) -> float:
    """Three products."""
    return matrix_flops(param_specs(cfg))


def mesh_needs(cfg: ModelConfig) -> list[MeshNeed]:
    """Columns over tensor."""
    return [MeshNeed(TENSOR, "d_ff", cfg.d_ff)]


@jax.named_scope("ffn")
def swiglu(x: jax.Array, params: Arrays) -> jax.Array:
    """[B, T, D] -> [B, T, D] with the parameters of `swiglu_specs`."""
    gate = matmul(x, params["gate"])
    return matmul(jax.nn.silu(gate) * matmul(x, params["up"]), params["down"])
