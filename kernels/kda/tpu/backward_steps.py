"""One step of the backward kernel on tiles in VMEM: a chunk's cotangent pass and local stage, and
chunks that run piece by piece. See backward_kernel.py."""

from collections.abc import Generator
from enum import Enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.kda.problem import Gate
from kernels.kda.tpu import backward_tiles, pair_tiles
from kernels.kda.tpu.backward_tiles import Unit, make_unit
from kernels.kda.tpu.pair_tiles import C
from kernels.kda.tpu.plan import Plan, Ref, Tile

F32 = jnp.float32
LAG = 2  # steps by which a pair's local stage follows that of the previous pair, see NOTES.md


class Stages(Enum):
    """The stages that a walk over the chunks runs for each chunk."""

    BOTH = "both"
    PASS = "pass"
    LOCAL = "local"

    @property
    def passes(self) -> bool:
        return self is not Stages.LOCAL

    @property
    def local(self) -> bool:
        return self is not Stages.PASS


class _Piece(NamedTuple):
    """The current piece of a chunk: its number, and whether it is the first of the loop."""

    number: jax.Array
    is_first: jax.Array


class Steps:
    """Steps of the kernel. `ops` and `outs` are its HBM references, `s` its VMEM references by name
    (double buffers [2, ...] of the step's tiles, see backward_kernel.py)."""

    def __init__(self, plan: Plan, ops: Any, outs: Any, s: dict[str, Any]):
        self.plan, self.ops, self.outs, self.s = plan, ops, outs, s
        self.pairs = range(plan.group)

    def run(self, g, n, slot, stages: Stages) -> None:
        """Runs chunk n of group g, whose tiles are in `slot` of the buffers."""
        if stages is Stages.PASS:
            for p in self.pairs:
                self._put_states(slot, p, self._pair(self.s["carry"], p))
        if self.plan.pieces:
            self._pieces(g, n, slot, stages)
        else:
            self._pass(g, slot, stages)
        if stages.local:
            heads = self.plan.group_heads
            beta = self.s["columns"][slot, :, :heads]
            beta = jnp.where(beta == 0.0, 1.0, beta)
            self.s["d_beta"][slot] = (self.s["beta_sums"][:, :heads] / beta / beta).T

    def _pass(self, g, slot, stages: Stages, piece: _Piece | None = None) -> None:
        """Runs the stages of a chunk, or of one of its pieces."""
        tile = Tile(self.plan, self.ops.gate, self.s, g, slot)
        units = self._units(tile, piece)
        if stages.passes:
            self._pass_cotangents(slot, units, piece)
        if not stages.local:
            return
        for p, u in enumerate(units):
            u.state = self._state("states", slot, p)
            if piece is not None:
                u.state = self._pair(self.s["entry"], p).astype(self.plan.dtype)
            if not stages.passes:
                u.dr = tile.heads("dr", 0, p)
                if piece is None:
                    u.d_state = self._state("d_states", slot, p)
                else:
                    u.d_state = self._pair(self.s["carry"], p).astype(self.plan.dtype)
                    u.dr = self._kept(tile, u.dr, p, piece)
        self._values(tile, slot, units, piece)
        walks = [self._local(tile, u, p, slot, piece) for p, u in enumerate(units)]
        backward_tiles.interleave(walks, LAG)

    def _units(self, tile: Tile, piece) -> list[Unit]:
        if piece is None:
            decays = [tile.decay(0, p) for p in self.pairs]
        else:
            decays = [tile.decay_of_piece(0, p, piece.number) for p in self.pairs]
        factors = pair_tiles.decay_factors(decays, self.s["sums"][...])
        return [self._unit(tile, p, x, piece) for p, x in zip(self.pairs, factors)]

    def _unit(self, tile: Tile, p: int, factors, piece) -> Unit:
        plan = self.plan
        d_out = tile.heads("d_out", 0, p).astype(F32) * plan.problem.scale
        valid = tile.of_rows("valid", 0, p, plan.values) > 0
        d_out = jnp.where(valid, d_out, 0.0)
        q, k = (tile.normalized(name, 0, p)[0] for name in ("q", "k"))
        if piece is not None:
            d_out, k = self._kept(tile, d_out, p, piece), self._kept(tile, k, p, piece)
        return make_unit(q, k, d_out.astype(plan.dtype), factors)

    def _pass_cotangents(self, slot, units: list[Unit], piece) -> None:
        """Runs the cotangent pass; leaves dr and the exit states' cotangents, rounded, in the
        units."""
        carry, dtype = self.s["carry"], self.plan.dtype
        for p, u in enumerate(units):
            u.a, u.w = (self.s["matrices"][slot, 2 * p + i] for i in (0, 1))
            u.d_state = self._pair(carry, p)
        dr, entries = backward_tiles.pass_cotangents(units)
        for p, u in enumerate(units):
            self._put("dr", slot, p, dr[p], piece)
            u.dr, u.d_state = dr[p].astype(dtype), u.d_state.astype(dtype)
            for i, x in enumerate(_halves(entries[p])):
                carry[2 * p + i] = x

    def _values(self, tile: Tile, slot, units: list[Unit], piece) -> None:
        """Sets v_new of the units, as kept by the forward or recomputed."""
        name = "v" if self.ops.v_new is None else "v_new"
        values = [tile.heads(name, 0, p) for p in self.pairs]
        if piece is not None:
            values = [self._kept(tile, x, p, piece) for p, x in enumerate(values)]
        if self.ops.v_new is None:
            for p, u in enumerate(units):
                u.a, u.v = self.s["matrices"][slot, 2 * p], values[p]
            values = backward_tiles.rebuild_v_new(units)
        for u, x in zip(units, values):
            u.v_new = x

    def _local(self, tile: Tile, unit: Unit, p: int, slot, piece) -> Generator[None, None, None]:
        """Runs the local stage of a pair and stores its results."""
        plan = self.plan
        tables = self.s["level"][...], self.s["straddle"][...]
        found = yield from backward_tiles.local(unit, *tables)
        for name, x in (("q", found.q), ("k", found.k)):
            unit_rows, rstd = tile.normalized(name, 0, p)
            if rstd is not None:
                x = backward_tiles.l2norm_backward(unit_rows, rstd, x)
            self._put("d_" + name, slot, p, x, piece)
        yield
        if piece is None:
            low, high = (tile.of_rows(x, 0, p, plan.keys) for x in ("low", "high"))
            d_decay = jnp.where(low == high, 0.0, found.decay)
        else:
            d_decay = self._kept(tile, found.decay, p, piece)
        if self.ops.gate is not None:
            d_decay = self._gate(tile, p, d_decay)
        self._put("d_decay", slot, p, d_decay, piece)
        for i, x in enumerate(_halves(found.beta)):
            at = pl.ds(2 * p + i, 1)
            total = jnp.sum(x, axis=1, keepdims=True)
            if piece is not None:
                total += jnp.where(piece.is_first, 0.0, self.s["beta_sums"][:, at])
            self.s["beta_sums"][:, at] = total

    def _gate(self, tile: Tile, p: int, d_decay: jax.Array) -> jax.Array:
        """Returns the raw gate's gradient; accumulates those of its parameters."""
        rate, bias = tile.gate_rows(p)
        raw = tile.heads("decay", 0, p).astype(F32)
        if self.plan.problem.gate is Gate.SOFTPLUS:
            d_raw, d_rate = backward_tiles.softplus_backward(raw, rate, bias, d_decay)
        else:
            bound = self.plan.problem.lower_bound
            assert bound is not None
            d_raw, d_rate = backward_tiles.bounded_backward(raw, rate, bias, bound, d_decay)
        for at, x in enumerate((d_rate, d_raw)):
            for i, half in enumerate(_halves(backward_tiles.add_tiles(x))):
                self.s["gate"][at, 2 * p + i] += half
        return d_raw

    # --- chunks in which segments start -----------------------------------------------------------

    def _pieces(self, g, n, slot, stages: Stages) -> None:
        """One pass per piece, the last one first. For batch rows with fewer pieces than others, a
        pass without tokens changes nothing."""
        count = self.ops.pieces[g, 0, n]
        if not stages.passes:
            for p in self.pairs:
                for i, x in enumerate(_halves(self._state("d_states", slot, p))):
                    self.s["carry"][2 * p + i] = x.astype(F32)

        def body(at, _):
            index = count - 1 - at
            if stages.local:
                self._load_entries(g, n, slot, index)
            self._pass(g, slot, stages, _Piece(index, at == 0))
            self._swap(g, n, index, stages)
            return 0

        jax.lax.fori_loop(0, count, body, 0)

    def _rows_with(self, g, n, index, act) -> None:
        """Calls act(heads in the group, heads overall, segment) for rows whose chunk has the
        piece."""
        plan = self.plan
        for row in range(plan.group_rows):
            first, heads = plan.row_of_head.index(row), plan.row_of_head.count(row)

            @pl.when((index > 0) & (index < self.ops.pieces[g, 1 + row, n]))
            def _act(row=row, first=first, heads=heads):
                segment = self.ops.pieces[g, 1 + plan.group_rows + row, n] + index
                act(pl.ds(first, heads), pl.ds(g * plan.group_heads + first, heads), segment)

    def _load_entries(self, g, n, slot, index) -> None:
        """Loads the entry states of a piece's tokens."""
        entry = self.s["entry"]

        @pl.when(index == 0)
        def _carried():
            for p in self.pairs:
                for i, x in enumerate(_halves(self._state("states", slot, p))):
                    entry[2 * p + i] = x.astype(F32)

        def load(here, heads, segment):
            at = jnp.minimum(segment, self.plan.slots - 1)
            pltpu.sync_copy(self.ops.starts.at[heads, at], entry.at[here])

        self._rows_with(g, n, index, load)

    def _swap(self, g, n, index, stages: Stages) -> None:
        """Between pieces: adds the cotangent to that of the segment's start state, and replaces it
        by the cotangent of the earlier segment's final state."""
        carry = self.s["carry"]

        def swap(here, heads, segment):
            if stages.passes:
                at = jnp.minimum(segment, self.plan.slots - 1)
                target = self.outs.starts.at[heads, at]
                self.add_start(carry.at[here], self.s["entry"].at[here], target)
            carry[here] = jnp.zeros_like(carry[here])
            if self.ops.d_finals is not None:

                @pl.when(segment <= self.plan.problem.max_segments)
                def _load():
                    pltpu.sync_copy(self.ops.d_finals.at[heads, segment - 1], carry.at[here])

        self._rows_with(g, n, index, swap)

    # --- tiles ------------------------------------------------------------------------------------

    def _kept(self, tile: Tile, x: jax.Array, p: int, piece: _Piece) -> jax.Array:
        """x [C, 2D], 0 outside the piece."""
        here = tile.of_rows("piece", 0, p, x.shape[1] // 2) == piece.number.astype(F32)
        return jnp.where(here, x.astype(F32), 0.0).astype(x.dtype)

    def _pair(self, ref: Ref, p: int) -> jax.Array:
        return jnp.concatenate([ref[2 * p], ref[2 * p + 1]], axis=1)

    def _state(self, name: str, slot, p: int) -> jax.Array:
        """[V, 2K] of a pair, from V // C parts."""
        ref = self.s[name]
        heads = [
            jnp.concatenate([ref[slot, j, h] for j in range(self.plan.values // C)], axis=0)
            for h in (2 * p, 2 * p + 1)
        ]
        return jnp.concatenate(heads, axis=1)

    def _put(self, name: str, slot, p: int, x: jax.Array, piece) -> None:
        """Writes a pair's [C, 2D]. Pieces fill different rows, so their sum is exact in any
        dtype."""
        ref = self.s[name]
        for i, half in enumerate(_halves(x)):
            if piece is not None:
                old = ref[slot, 2 * p + i].astype(F32)
                half = half + jnp.where(piece.is_first, 0.0, old)
            ref[slot, 2 * p + i] = half.astype(ref.dtype)

    def _put_states(self, slot, p: int, x: jax.Array) -> None:
        ref = self.s["d_states"]
        for i, half in enumerate(_halves(x)):
            for j in range(self.plan.values // C):
                ref[slot, j, 2 * p + i] = half[j * C : (j + 1) * C].astype(ref.dtype)

    def add_start(self, d_state: Ref, room: Ref, target: Ref) -> None:
        """target += d_state, via `room` in VMEM; several segments may share a start state."""
        pltpu.sync_copy(target, room)
        room[...] = room[...] + d_state[...]
        pltpu.sync_copy(room, target)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    d = x.shape[1] // 2
    return x[:, :d], x[:, d:]
