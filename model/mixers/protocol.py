"""The protocol of a mixer: its parameters, carry, forward, FLOPs, and metrics.

Each mixer is a module in this package, with one line in registry.py.

Axes: B row, T token, D residual width.
"""

from typing import NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from kernels.segments import Segments
from model.axes import Arrays, MeshNeed, Specs, Tree
from model.config import ModelConfig

# By name, float32: scalars, or [ranks, ...] with one contribution per token rank, summed later.
Metrics = dict[str, jax.Array]


class RowPlan(NamedTuple):
    """Metadata of a batch's rows for all layers; depends only on the ids and flags.

    segments: see kernels.segments. continues: [B] bool, whether the row's first segment continues
    from the carry. has_tokens: [B] bool, whether the row is not all padding. positions: [B, T]
    int32, the position of each token in its document, counted across rows; None if no layer reads
    them.
    """

    segments: Segments
    continues: jax.Array
    has_tokens: jax.Array
    positions: jax.Array | None


class Mixer(Protocol):
    """A layer that mixes tokens of a segment; a module with these functions."""

    def reads_positions(self, cfg: ModelConfig) -> bool:
        """Whether `forward` needs `RowPlan.positions`."""

    def param_specs(self, cfg: ModelConfig) -> Specs:
        """The parameters of one layer, by name."""

    def init_carry(self, cfg: ModelConfig, rows: int) -> Arrays:
        """The carry of one layer for `rows` streams before their first token; {}: none."""

    def carry_specs(self, cfg: ModelConfig) -> Tree:
        """Tree of `PartitionSpec` of the same structure."""

    def forward(
        self,
        params: Arrays,
        cfg: ModelConfig,
        x: jax.Array,
        plan: RowPlan,
        carry: Arrays,
        entry: Arrays | None,
        mesh: Mesh,
    ) -> tuple[jax.Array, Arrays, Arrays, Metrics]:
        """Mixes x [B, T, D] -> (y [B, T, D] in x's dtype, ends, entry, metrics).

        Args:
            params: matrices in the compute dtype, gathered over fsdp and context; the others
                float32, as one copy per token rank [ranks, ...], sharded over `TOKENS`.
            carry: arrays that are not sharded over the context axis come as one copy per rank,
                [P, ...].
            entry: None, or what this function returned for the same arguments: the messages that
                each context rank received, [P, ...]. Then none are sent; see layer_loop.py.

        Returns:
            ends: the input of `new_carry`, in the carry's structure; instead of copies, one
                contribution per context rank [P, ...], summed after the loop over layers.
        """

    def new_carry(self, cfg: ModelConfig, plan: RowPlan, carry: Arrays, ends: Arrays) -> Arrays:
        """The carry after a batch, from the carry before it and `ends` summed over ranks; both are
        stacked over repeats, [R, ...]."""

    def flops_per_token(self, cfg: ModelConfig) -> float:
        """Forward FLOPs of one layer per token, except those that grow with the keys seen."""

    def flops_per_key(self, cfg: ModelConfig) -> float:
        """Forward FLOPs of one layer per token and key seen."""

    def mesh_needs(self, cfg: ModelConfig) -> list[MeshNeed]:
        """Sizes that mesh axes must divide."""
