"""The backward megakernel: KDA's gradients of all local chunks in one Pallas call.

Plan. As in the forward, heads go in groups of `plan.group` pairs side by side, a step is one chunk of
one group, and the kernel walks groups and steps itself, moving its tiles double buffered. Steps go
from a group's last chunk to its first. A chunk has two stages (backward_tiles.py): the chain, which
carries the state's cotangent, and the local stage, which yields the gradients.

One device: both stages in one walk.      Ranks: two walks, so that others wait for the chain only.
    for each group:                           for each group:
        take the exit state's cotangent           take the cotangent from the rank ahead
        for each chunk: chain, local              for each chunk: chain; keep dr and dS' in HBM
        give the entry state's away               hand the cotangent to the rank behind
                                              for each group and chunk: local

In VMEM for the whole call: the group's cotangents [heads, V, K] float32, transposed, sums for the
gate's parameters, constant tables. The gradients of q, k, v and decay take the buffers of the entry
states, dr and d_out where shapes agree: a tile is read before its gradient is written.

Segments. As in the forward a decay of -1e30 cuts the chunk at a start, for free. With `plan.pieces`
a chunk runs once a piece, last piece first, on the piece's own tokens; between two pieces the
cotangent goes to the segment's start state, and the one of the earlier segment's final state
takes its place.
"""

from collections.abc import Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.kda import backward_tiles, pair_tiles
from kernels.kda.backward_tiles import Unit, make_unit
from kernels.kda.exchange import Relay, relay_scratch
from kernels.kda.pair_tiles import C
from kernels.kda.plan import Plan, Ref, Tile, out_struct
from kernels.kda.problem import Gate
from kernels.kda.streams import Loads, Stores, divided

F32 = jnp.float32
BACKWARD_BARRIER = 12  # the barrier semaphore of this kernel
LAG = 2  # steps by which a pair's local stage follows the pair before it, see NOTES.md


class Operands(NamedTuple):
    """Inputs of the kernel, in HBM unless said; layouts as in forward.py."""

    q: Any  # [heads, T, K]
    k: Any  # [heads, T, K]
    v: Any  # [heads, T, V]
    decay: Any  # [heads, T, K]
    d_out: Any  # [heads, T, V]
    states: Any  # V // C arrays [heads, T, K]
    a: Any  # [pairs, T, 2C]
    aqk: Any  # [pairs, T, 2C]
    vn: Any  # [heads, T, V], or None: rebuilt
    columns: Any  # [groups, T, lanes] float32
    gate: Any  # VMEM [2, groups, group heads, K] float32, or None
    starts: Any  # [heads, slots, V, K] float32, or None
    d_exit: Any  # [heads, V, K] float32: cotangent of the row's last state, or None
    d_finals: Any  # [heads, max_segments, V, K] float32: of the segments' before it, or None
    pieces: Any  # SMEM [groups, N, 1 + 2 rows] int32, or None
    coords: Any  # SMEM [mesh axes] int32, or None


class Outputs(NamedTuple):
    q: Any  # [heads, T, K]
    k: Any  # [heads, T, K]
    v: Any  # [heads, T, V]
    decay: Any  # [heads, T, K]
    beta: Any  # [groups, N, group heads, C] float32
    starts: Any  # [heads, slots, V, K] float32, or None
    gate: Any  # [2, heads, 8, K] float32: parts of the sums for a_log and dt_bias, or None
    d_states: Any  # V // C arrays [heads, T, K]: cotangents of chunks' exit states, or None


def run(plan: Plan, operands: Operands) -> Outputs:
    """Launch the kernel."""
    places = {"gate": pltpu.VMEM, "pieces": pltpu.SMEM, "coords": pltpu.SMEM}
    specs = {
        name: jax.tree.map(lambda _: pl.BlockSpec(memory_space=places.get(name, pl.ANY)), x)
        for name, x in operands._asdict().items()
    }
    shapes = _output_shapes(plan, operands)
    return pl.pallas_call(
        lambda ops, *outs, **scratch: _Kernel(plan, ops, Outputs(*outs), scratch).run(),
        out_shape=shapes,
        in_specs=(Operands(**specs),),
        out_specs=jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), shapes),
        scratch_shapes=_scratch(plan, operands),
        input_output_aliases=_aliases(operands, shapes),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=plan.vmem_limit,
            collective_id=None if plan.line is None else BACKWARD_BARRIER,
            has_side_effects=plan.line is not None,
        ),
        name="kda_backward",
    )(operands)


def _output_shapes(plan: Plan, operands: Operands) -> Outputs:
    h, t, k, v = plan.heads, plan.tokens, plan.keys, plan.values
    like = lambda shape, dtype=plan.dtype: out_struct(operands, shape, dtype)  # noqa: E731
    ranks = plan.line is not None
    return Outputs(
        q=like((h, t, k)),
        k=like((h, t, k)),
        v=like((h, t, v)),
        decay=like((h, t, k), operands.decay.dtype),
        beta=like((plan.groups, t // C, plan.group_heads, C), F32),
        starts=None if operands.starts is None else like(operands.starts.shape, F32),
        gate=None if operands.gate is None else like((2, h, 8, k), F32),
        d_states=tuple(like((h, t, k)) for _ in range(v // C)) if ranks else None,
    )


def _aliases(operands: Operands, shapes: Outputs) -> dict[int, int]:
    """Operands whose buffers become outputs', by flat position: each is read, tile by tile, before
    the output's tile is written, and the residuals have no other reader."""
    wanted = [
        (operands.states[0], shapes.q),
        (operands.states[1], shapes.k),
        (operands.d_out, shapes.decay),
    ]
    if operands.vn is not None and shapes.d_states is None:
        wanted.append((operands.vn, shapes.v))
    sources, targets = jax.tree.leaves(operands), jax.tree.leaves(shapes)

    def position(leaves, x):
        return next(i for i, leaf in enumerate(leaves) if leaf is x)

    return {
        position(sources, x): position(targets, y)
        for x, y in wanted
        if (x.shape, x.dtype) == (y.shape, y.dtype)
    }


def _scratch(plan: Plan, operands: Operands) -> dict[str, Any]:
    """VMEM of the kernel: double buffers of a step's tiles, the group's cotangents, tables."""
    h, k, v, dtype = plan.group_heads, plan.keys, plan.values, plan.dtype
    two = lambda *shape, dtype=dtype: pltpu.VMEM((2, *shape), dtype)  # noqa: E731
    parts = 1 if plan.one_part else 3
    scratch = {
        "q": two(h, C, k),
        "k": two(h, C, k),
        "v": two(h, C, v),
        "decay": two(h, C, k, dtype=operands.decay.dtype),
        "d_out": two(h, C, v),
        "states": two(v // C, h, C, k),
        "a": two(plan.group, C, 2 * C),
        "aqk": two(plan.group, C, 2 * C),
        "columns": two(C, operands.columns.shape[-1], dtype=F32),
        "d_q": two(h, C, k),
        "d_k": two(h, C, k),
        "d_decay": two(h, C, k, dtype=operands.decay.dtype),
        "d_beta": two(h, C, dtype=F32),
        "dr": two(h, C, v),
        "carry": pltpu.VMEM((h, v, k), F32),
        "beta_sums": pltpu.VMEM((C, max(128, h)), F32),
        "level": pltpu.VMEM((C, 2 * C), dtype),
        "straddle": pltpu.VMEM((C, 8 * C), dtype),
        "sums": pltpu.VMEM((3 * C, parts * C), jnp.bfloat16),
        "loaded": pltpu.SemaphoreType.DMA((2,)),
        "stored": pltpu.SemaphoreType.DMA((2,)),
    }
    if operands.vn is not None:
        scratch["vn"] = two(h, C, v)
    if operands.gate is not None:
        scratch["gate"] = pltpu.VMEM((2, h, 8, k), F32)
    if operands.starts is not None:
        scratch["entry"] = pltpu.VMEM((h, v, k), F32)
    if plan.line is not None:
        scratch["d_states"] = two(v // C, h, C, k)
        scratch["relay"] = relay_scratch(jax.ShapeDtypeStruct((h, v, k), F32))
    return scratch


class _Piece(NamedTuple):
    """A piece of a chunk under way: its number, and whether the loop comes to it first."""

    index: jax.Array
    is_first: jax.Array


class _Kernel:
    """The kernel's walks; `s` holds the scratch references by name."""

    def __init__(self, plan: Plan, ops: Operands, outs: Outputs, s: dict[str, Any]):
        self.plan, self.ops, self.outs, self.s = plan, ops, outs, s
        self.steps = plan.tokens // C
        self.total = plan.groups * self.steps
        self.pairs = range(plan.group)
        self.relay = None
        if plan.line is not None:
            self.relay = Relay(plan.line, ops.coords, -1, plan.groups, s["relay"])

    def run(self) -> None:
        self.s["level"][...] = backward_tiles.signed_level_table().astype(self.plan.dtype)
        self.s["straddle"][...] = backward_tiles.straddle_table().astype(self.plan.dtype)
        self.s["sums"][...] = pair_tiles.sum_table(1 if self.plan.one_part else 3)
        ops, outs = self.ops, self.outs
        if ops.starts is not None:
            self._clear_starts()
        both = {"q": ops.q, "k": ops.k, "decay": ops.decay, "d_out": ops.d_out}
        both |= {"columns": ops.columns}
        chain = {"a": ops.a, "aqk": ops.aqk}
        local = {"v": ops.v, "states": ops.states}
        local |= {"a": ops.a} if ops.vn is None else {"vn": ops.vn}
        grads = {"d_q": outs.q, "d_k": outs.k, "d_decay": outs.decay, "d_beta": outs.beta}
        if self.relay is None:
            self._walk(both | chain | local, grads | {"dr": outs.v}, chain=True, local=True)
            return
        kept = {"dr": outs.v, "d_states": outs.d_states}
        self.relay.open()
        self._walk(both | chain, kept, chain=True, local=False)
        self.relay.close()
        self._walk(both | local | kept, grads, chain=False, local=True)

    def _walk(self, loads: dict, stores: dict, chain: bool, local: bool) -> None:
        """All groups and steps; `loads` and `stores` name the arrays that move with a step."""
        loads = Loads(self._tiles(loads), self.s["loaded"])
        stores = Stores(self._tiles(stores), self.s["stored"])
        loads.start(0)

        def group(g, _):
            if chain:
                self._enter(g)
            if local and self.ops.gate is not None:
                self.s["gate"][...] = jnp.zeros_like(self.s["gate"])

            def step(j, _):
                at = g * self.steps + j
                slot = jax.lax.rem(at, 2)
                loads.arrive(at, self.total)
                stores.make_room(at)
                self._step(g, self.steps - 1 - j, slot, chain, local)
                stores.start(at)
                return 0

            jax.lax.fori_loop(0, self.steps, step, 0)
            if chain:
                self._leave(g)
            if local and self.ops.gate is not None:
                pltpu.sync_copy(self.s["gate"], self.outs.gate.at[:, self._heads(g)])
            return 0

        jax.lax.fori_loop(0, self.plan.groups, group, 0)
        stores.drain(self.total)

    def _heads(self, g):
        return pl.ds(g * self.plan.group_heads, self.plan.group_heads)

    def _tiles(self, arrays: dict) -> list:
        """(view of a step's tile, its double buffer) of each array."""
        plan = self.plan
        sizes = {"a": plan.group, "aqk": plan.group}

        def split(at):
            g, j = divided(at, self.steps)
            return g, self.steps - 1 - j

        def view(ref, size):
            def of(at):
                g, n = split(at)
                return ref.at[pl.ds(g * size, size), pl.ds(n * C, C)]

            return of

        def columns(at):
            g, n = split(at)
            return self.ops.columns.at[g, pl.ds(n * C, C)]

        def beta(at):
            return self.outs.beta.at[split(at)]

        tiles = []
        for name, ref in arrays.items():
            if name in ("columns", "d_beta"):
                tiles.append((columns if name == "columns" else beta, self.s[name]))
            elif isinstance(ref, tuple):
                parts = enumerate(ref)
                tiles += [(view(r, plan.group_heads), self.s[name].at[:, j]) for j, r in parts]
            else:
                tiles.append((view(ref, sizes.get(name, plan.group_heads)), self.s[name]))
        return tiles

    # --- the group's cotangents -------------------------------------------------------------------

    def _enter(self, g) -> None:
        """The exit states' cotangents: the row's end on the last rank, else from the rank ahead."""
        carry = self.s["carry"]

        def end():
            if self.ops.d_exit is None:
                carry[...] = jnp.zeros_like(carry)
            else:
                pltpu.sync_copy(self.ops.d_exit.at[self._heads(g)], carry)

        relay = self.relay
        if relay is None:
            end()
            return
        pl.when(~relay.has_source)(end)

        @pl.when(relay.has_source)
        def _take():
            relay.receive(g)
            carry[...] = relay.message(g)[...]
            relay.release(g)

    def _leave(self, g) -> None:
        """The entry states' cotangents go to the rank behind, or to the row's first start state."""
        relay, carry = self.relay, self.s["carry"]
        if relay is not None:
            relay.reserve(g)
            relay.reply(g)[...] = carry[...]
            relay.send(g)
        if self.ops.starts is None:
            return

        def give():
            self._add_start(carry, self.s["entry"], self.outs.starts.at[self._heads(g), 0])

        if relay is None:
            give()
        else:
            pl.when(~relay.has_target)(give)

    def _clear_starts(self) -> None:
        entry, plan = self.s["entry"], self.plan
        entry[...] = jnp.zeros_like(entry)

        def clear(at, _):
            g, slot = divided(at, plan.slots)
            pltpu.sync_copy(entry, self.outs.starts.at[self._heads(g), slot])
            return 0

        jax.lax.fori_loop(0, plan.groups * plan.slots, clear, 0)

    def _add_start(self, d_state: Ref, room: Ref, target: Ref) -> None:
        """target += d_state, through `room` in VMEM: several segments may share a start state."""
        pltpu.sync_copy(target, room)
        room[...] = room[...] + d_state[...]
        pltpu.sync_copy(room, target)

    # --- one step ---------------------------------------------------------------------------------

    def _step(self, g, n, slot, chain: bool, local: bool) -> None:
        if chain and not local:
            for p in self.pairs:
                self._put_states(slot, p, self._pair(self.s["carry"], p))
        if self.plan.pieces:
            self._pieces(g, n, slot, chain, local)
        else:
            self._pass(g, slot, chain, local)
        if local:
            heads = self.plan.group_heads
            beta = self.s["columns"][slot, :, :heads]
            beta = jnp.where(beta == 0.0, 1.0, beta)
            self.s["d_beta"][slot] = (self.s["beta_sums"][:, :heads] / beta / beta).T

    def _pass(self, g, slot, chain: bool, local: bool, piece: _Piece | None = None) -> None:
        """Both stages of a chunk, or of one of its pieces."""
        tile = Tile(self.plan, self.ops.gate, self.s, g, slot)
        units = self._units(tile, piece)
        if chain:
            self._chain(slot, units, piece)
        if not local:
            return
        for p, u in enumerate(units):
            u.state = self._state("states", slot, p)
            if piece is not None:
                u.state = self._pair(self.s["entry"], p).astype(self.plan.dtype)
            if not chain:
                u.dr = tile.heads("dr", 0, p)
                if piece is None:
                    u.d_state = self._state("d_states", slot, p)
                else:
                    u.d_state = self._pair(self.s["carry"], p).astype(self.plan.dtype)
                    u.dr = self._kept(tile, u.dr, p, piece)
        self._values(tile, slot, units, piece)
        walks = [self._local(tile, u, g, p, slot, piece) for p, u in enumerate(units)]
        backward_tiles.interleave(walks, LAG)

    def _units(self, tile: Tile, piece) -> list[Unit]:
        if piece is None:
            decays = [tile.decay(0, p) for p in self.pairs]
        else:
            decays = [tile.decay_of_piece(0, p, piece.index) for p in self.pairs]
        ladders = pair_tiles.decay_ladders(decays, self.s["sums"][...])
        return [self._unit(tile, p, x, piece) for p, x in zip(self.pairs, ladders)]

    def _unit(self, tile: Tile, p: int, ladder, piece) -> Unit:
        plan = self.plan
        d_out = tile.heads("d_out", 0, p).astype(F32) * plan.problem.scale
        valid = tile.of_rows("valid", 0, p, plan.values) > 0
        d_out = jnp.where(valid, d_out, 0.0)
        q, k = (self._normalized(tile, name, p)[0] for name in ("q", "k"))
        if piece is not None:
            d_out, k = self._kept(tile, d_out, p, piece), self._kept(tile, k, p, piece)
        return make_unit(q, k, d_out.astype(plan.dtype), ladder)

    def _normalized(self, tile: Tile, name: str, p: int):
        """q or k in float32, and the reciprocal norms of its rows or None."""
        x = tile.heads(name, 0, p).astype(F32)
        return pair_tiles.l2norm(x) if self.plan.problem.l2norm else (x, None)

    def _chain(self, slot, units: list[Unit], piece) -> None:
        """Run the chain; leaves dr and the exit states' cotangents in the units, rounded."""
        carry, dtype = self.s["carry"], self.plan.dtype
        for p, u in enumerate(units):
            u.a, u.aqk = self.s["a"][slot, p], self.s["aqk"][slot, p]
            u.d_state = self._pair(carry, p)
        dr, entries = backward_tiles.chain(units)
        for p, u in enumerate(units):
            self._put("dr", slot, p, dr[p], piece)
            u.dr, u.d_state = dr[p].astype(dtype), u.d_state.astype(dtype)
            for i, x in enumerate(_halves(entries[p])):
                carry[2 * p + i] = x

    def _values(self, tile: Tile, slot, units: list[Unit], piece) -> None:
        """Put vn into the units, as the forward kept it or rebuilt."""
        name = "v" if self.ops.vn is None else "vn"
        values = [tile.heads(name, 0, p) for p in self.pairs]
        if piece is not None:
            values = [self._kept(tile, x, p, piece) for p, x in enumerate(values)]
        if self.ops.vn is None:
            for p, u in enumerate(units):
                u.a, u.v = self.s["a"][slot, p], values[p]
            values = backward_tiles.rebuild_vn(units)
        for u, x in zip(units, values):
            u.vn = x

    def _local(
        self, tile: Tile, unit: Unit, g, p: int, slot, piece
    ) -> Generator[None, None, None]:
        """The local stage of a pair and its way out."""
        plan = self.plan
        tables = self.s["level"][...], self.s["straddle"][...]
        found = yield from backward_tiles.local(unit, *tables)
        for name, x in (("q", found.q), ("k", found.k)):
            if plan.problem.l2norm:
                x = backward_tiles.l2norm_backward(*self._normalized(tile, name, p), x)
            self._put("d_" + name, slot, p, x, piece)
        yield
        if piece is None:
            low, high = (tile.of_rows(x, 0, p, plan.keys) for x in ("low", "high"))
            d_decay = jnp.where(low == high, 0.0, found.decay)
        else:
            d_decay = self._kept(tile, found.decay, p, piece)
        if self.ops.gate is not None:
            d_decay = self._gate(tile, g, p, d_decay)
        self._put("d_decay", slot, p, d_decay, piece)
        for i, x in enumerate(_halves(found.beta)):
            at = pl.ds(2 * p + i, 1)
            total = jnp.sum(x, axis=1, keepdims=True)
            if piece is not None:
                total += jnp.where(piece.is_first, 0.0, self.s["beta_sums"][:, at])
            self.s["beta_sums"][:, at] = total

    def _gate(self, tile: Tile, g, p: int, d_decay: jax.Array) -> jax.Array:
        """The raw gate's gradient; adds up those of its parameters."""
        rate, bias = (
            jnp.concatenate([self.ops.gate[i, g, h : h + 1] for h in (2 * p, 2 * p + 1)], axis=1)
            for i in (0, 1)
        )
        raw = tile.heads("decay", 0, p).astype(F32)
        if self.plan.problem.gate is Gate.SOFTPLUS:
            d_raw, d_rate = backward_tiles.softplus_backward(raw, rate, bias, d_decay)
        else:
            bound = self.plan.problem.lower_bound
            d_raw, d_rate = backward_tiles.bounded_backward(raw, rate, bias, bound, d_decay)
        for at, x in enumerate((d_rate, d_raw)):
            for i, half in enumerate(_halves(sum(backward_tiles.tiles8(x)))):
                self.s["gate"][at, 2 * p + i] += half
        return d_raw

    # --- chunks in which segments start -----------------------------------------------------------

    def _pieces(self, g, n, slot, chain: bool, local: bool) -> None:
        """One pass a piece, the last one first. In rows of the batch with fewer pieces than others
        a pass without tokens changes nothing."""
        count = self.ops.pieces[g, n, 0]
        if not chain:
            for p in self.pairs:
                for i, x in enumerate(_halves(self._state("d_states", slot, p))):
                    self.s["carry"][2 * p + i] = x.astype(F32)

        def body(at, _):
            index = count - 1 - at
            if local:
                self._load_entries(g, n, slot, index)
            self._pass(g, slot, chain, local, _Piece(index, at == 0))
            self._swap(g, n, index, chain)
            return 0

        jax.lax.fori_loop(0, count, body, 0)

    def _rows_with(self, g, n, index, act) -> None:
        """act(heads in the group, heads in all, segment) for rows whose chunk has this piece."""
        plan = self.plan
        for row in range(plan.group_rows):
            first, heads = plan.row_of_head.index(row), plan.row_of_head.count(row)

            @pl.when((index > 0) & (index < self.ops.pieces[g, n, 1 + row]))
            def _act(row=row, first=first, heads=heads):
                segment = self.ops.pieces[g, n, 1 + plan.group_rows + row] + index
                act(pl.ds(first, heads), pl.ds(g * plan.group_heads + first, heads), segment)

    def _load_entries(self, g, n, slot, index) -> None:
        """The states that a piece's tokens enter with."""
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

    def _swap(self, g, n, index, chain: bool) -> None:
        """Between pieces: a segment's start takes its cotangent, and the earlier segment's final
        state brings its own."""
        carry = self.s["carry"]

        def swap(here, heads, segment):
            if chain:
                at = jnp.minimum(segment, self.plan.slots - 1)
                target = self.outs.starts.at[heads, at]
                self._add_start(carry.at[here], self.s["entry"].at[here], target)
            carry[here] = jnp.zeros_like(carry[here])
            if self.ops.d_finals is not None:

                @pl.when(segment <= self.plan.problem.max_segments)
                def _load():
                    pltpu.sync_copy(self.ops.d_finals.at[heads, segment - 1], carry.at[here])

        self._rows_with(g, n, index, swap)

    # --- tiles ------------------------------------------------------------------------------------

    def _kept(self, tile: Tile, x: jax.Array, p: int, piece: _Piece) -> jax.Array:
        """x [C, 2D], 0 outside the piece."""
        here = tile.of_rows("piece", 0, p, x.shape[1] // 2) == piece.index.astype(F32)
        return jnp.where(here, x.astype(F32), 0.0).astype(x.dtype)

    def _pair(self, ref: Ref, p: int) -> jax.Array:
        return jnp.concatenate([ref[2 * p], ref[2 * p + 1]], axis=1)

    def _state(self, name: str, slot, p: int) -> jax.Array:
        """[V, 2K] of a pair, kept as V // C parts."""
        ref = self.s[name]
        heads = [
            jnp.concatenate([ref[slot, j, h] for j in range(self.plan.values // C)], axis=0)
            for h in (2 * p, 2 * p + 1)
        ]
        return jnp.concatenate(heads, axis=1)

    def _put(self, name: str, slot, p: int, x: jax.Array, piece) -> None:
        """Write a pair's [C, 2D]; pieces fill different rows and add up exactly in any dtype."""
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


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    d = x.shape[1] // 2
    return x[:, :d], x[:, d:]
