"""The parts of a call that both TPU kernels share: its sizes, the types of its outputs, and the
conversion of a step's tiles in VMEM to units of pair_tiles.py."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels.kda.gates import log_decay
from kernels.kda.problem import Gate, Problem
from kernels.kda.tpu import pair_tiles as tiles
from kernels.kda.tpu.pair_tiles import C
from kernels.kda.tpu.relay import RankLine
from kernels.vma import varying_axes

Ref = Any  # a Pallas reference; they have no public type


@dataclass(frozen=True)
class Plan:
    """Sizes of one kernel. heads is rows x heads, rounded up to an even number; heads_a_row is the
    actual number of heads of a batch row; slots is the number of start states per head (0: all
    states start from zero)."""

    problem: Problem
    heads: int
    heads_a_row: int
    tokens: int
    keys: int
    values: int
    dtype: Any
    decay_dtype: Any
    group: int  # pairs of heads in lockstep
    chunks: int  # chunks per step
    slots: int
    pieces: bool
    line: RankLine | None
    rank_io_in_vmem: bool  # XLA also holds out, and d_out with d decay, in VMEM
    vmem_limit: int
    pass_pairs: int = 0  # pairs in lockstep in the pipelined state pass; 0: fused with local work
    pass_chunks: int = 1  # chunks per step of that pass

    @property
    def one_part(self) -> bool:
        """Whether the log decay is exact in bfloat16, so that its sums take one product."""
        return self.problem.gate is Gate.GIVEN and self.decay_dtype == jnp.bfloat16

    @property
    def group_heads(self) -> int:
        return 2 * self.group

    @property
    def groups(self) -> int:
        return self.heads // self.group_heads

    @property
    def state_groups(self) -> int:
        """Number of groups in which states pass between ranks, one message each."""
        return self.heads // (2 * self.pass_pairs) if self.pass_pairs else self.groups

    @property
    def heads_apart(self) -> bool | None:
        """See `pair_tiles.heads_dot`: in the pipelined pass, where products wait for each other and
        the MXU has unused slots, one product per head has the result sooner."""
        return True if self.pass_pairs else None

    @property
    def totals(self) -> tuple[int, int]:
        """The total decays that a chunk and group of the pipelined pass have: (pieces, heads)."""
        return C if self.pieces else 1, 2 * self.pass_pairs

    @property
    def steps(self) -> int:
        return self.tokens // (C * self.chunks)

    @property
    def row_of_head(self) -> tuple[int, ...]:
        """The row whose columns each head of a group reads, counted within the group."""
        if self.heads_a_row % self.group_heads == 0:
            return (0,) * self.group_heads
        if self.group_heads % self.heads_a_row == 0:
            return tuple(i // self.heads_a_row for i in range(self.group_heads))
        return tuple(range(self.group_heads))  # a group's rows differ from group to group

    @property
    def group_rows(self) -> int:
        return self.row_of_head[-1] + 1


def out_struct(operands, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
    """Shape of a kernel's output, typed as varying over the mesh axes of its operands.

    `coords` is excluded: it differs between all devices but does not change a result.
    """
    kind = jax.sharding.ManualAxisType(varying=varying_axes(operands._replace(coords=None)))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


class Tile:
    """Reads one step's tiles as units: `c` is the chunk in the step, `p` the pair in the group.

    gate: [2, groups, group heads, K] in VMEM, or None; s: buffers [2, ...] by name (q, k, v, decay
    [heads, T, .], rows, columns); g: the group; slot: the buffers' slot.
    """

    def __init__(self, plan: Plan, gate: Ref, s: dict[str, Any], g, slot):
        self._plan, self._gate, self._s, self._g, self._slot = plan, gate, s, g, slot
        self._wide: dict = {}

    def _tokens(self, c: int):
        return pl.ds(c * C, C)

    def heads(self, name: str, c: int, p: int) -> jax.Array:
        """[C, 2D] of a pair, as stored."""
        ref = self._s[name]
        pair = [ref[self._slot, h, self._tokens(c)] for h in (2 * p, 2 * p + 1)]
        return jnp.concatenate(pair, axis=1)

    def column(self, lane: int, c: int) -> jax.Array:
        return self._s["columns"][self._slot, self._tokens(c), lane : lane + 1]

    def beta_columns(self, c: int, p: int) -> jax.Array:
        """[C, 2C]: beta of the row token, on its head's lanes."""
        return tiles.per_head_lanes(self.column(2 * p, c), self.column(2 * p + 1, c), C)

    def beta_row(self, c: int, p: int) -> jax.Array:
        return self._s["rows"][self._slot, c, p : p + 1]

    def of_rows(self, kind: str, c: int, p: int, width: int) -> jax.Array:
        """[C, 2 * width] float32: a token's `low`, `high`, `valid` or `piece`, for both heads."""
        plan = self._plan
        halves = []
        for h in (2 * p, 2 * p + 1):
            row = plan.row_of_head[h]
            key = (kind, c, row, width)
            if key not in self._wide:
                at = ("low", "high", "valid", "piece").index(kind)
                column = self.column(plan.group_heads + at * plan.group_rows + row, c)
                self._wide[key] = jnp.broadcast_to(column, (C, width))
            halves.append(self._wide[key])
        return jnp.concatenate(halves, axis=1)

    def query(self, c: int, p: int) -> jax.Array:
        return self.normalized("q", c, p)[0] * self.of_rows("valid", c, p, self._plan.keys)

    def key(self, c: int, p: int) -> jax.Array:
        return self.normalized("k", c, p)[0]

    def normalized(self, name: str, c: int, p: int) -> tuple[jax.Array, jax.Array | None]:
        """q or k in float32; with l2norm normalized, and with its reciprocal norms, else None."""
        x = self.heads(name, c, p).astype(jnp.float32)
        return tiles.l2norm(x) if self._plan.problem.l2norm else (x, None)

    def gate_rows(self, p: int) -> tuple[jax.Array, jax.Array]:
        """(exp(a_log), dt_bias) [1, 2K] of a pair."""

        def wide(i: int) -> jax.Array:
            rows = [self._gate[i, self._g, h : h + 1] for h in (2 * p, 2 * p + 1)]
            return jnp.concatenate(rows, axis=1)

        return wide(0), wide(1)

    def raw_decay(self, c: int, p: int) -> jax.Array:
        """Log decay before padding and segments: as given, or from its gate in float32."""
        x, problem = self.heads("decay", c, p), self._plan.problem
        if problem.gate is Gate.GIVEN:
            return x
        return log_decay(problem, x.astype(jnp.float32), *self.gate_rows(p))

    def decay(self, c: int, p: int) -> jax.Array:
        """Log decay; 0 at padding, RESET at the start of a later segment of the row."""
        x = self.raw_decay(c, p)
        low, high = (self.of_rows(n, c, p, self._plan.keys) for n in ("low", "high"))
        return jnp.minimum(jnp.maximum(x, low.astype(x.dtype)), high.astype(x.dtype))

    def decay_of_piece(self, c: int, p: int, piece) -> jax.Array:
        """Log decay of one piece's tokens, 0 elsewhere."""
        x = self.raw_decay(c, p)
        here = self.of_rows("piece", c, p, self._plan.keys) == piece
        x = jnp.where(here, jnp.maximum(x.astype(jnp.float32), tiles.RESET), 0.0)
        return x.astype(jnp.bfloat16) if self._plan.one_part else x
