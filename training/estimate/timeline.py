"""When context ranks wait for each other: a timeline of a compiled step over any number of ranks.

Bundles count work, not waiting. Here every rank runs the program's instructions in their scheduled
order. A KDA kernel passes states from rank to rank, group by group, as the loops of its schedule
say. A collective over the context axis lets no rank pass its end (`-done`, or itself where it is
synchronous) before all ranks have reached its start, and collectives use the links one after
another. A permute's sender waits at its start until the receiver is there, too, and the receiver at
the end for the data: its schedule has a wait for the one rank that receives, and no other. So how
far ranks may drift apart follows from the compiled program and is not an argument.

Axes: P rank of the context axis.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from training.estimate.bundles import Loop
from training.estimate.collectives import Collective
from training.estimate.program import Work, is_kernel
from training.estimate.topology import Generation

CONTEXT = "context"
FORWARD_KERNEL, BACKWARD_KERNEL = "kda_forward", "kda_backward"


@dataclasses.dataclass(frozen=True)
class Busy:
    """Work that needs no other rank, seconds."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Relay:
    """A kernel that passes states along the ranks, in groups; seconds.

    Work is `before`, then for each group: the neighbour's message arrives, `slot`, the own message
    leaves, `after`; last `tail`. wire: of a message from rank to rank. backward: messages go from
    the last rank to the first.
    """

    before: float
    slot: float
    after: float
    groups: int
    tail: float
    wire: float
    backward: bool

    @property
    def work(self) -> float:
        return self.before + self.groups * (self.slot + self.after) + self.tail


@dataclasses.dataclass(frozen=True)
class Start:
    """This rank's part in a collective is ready; the transfer takes `seconds`.

    target: 0 for a collective of all ranks; 1 for a permute that sends to the rank after, which
    waits here until that rank has arrived; -1 for one that sends to the rank before.
    """

    name: str
    seconds: float
    target: int = 0


@dataclasses.dataclass(frozen=True)
class Wait:
    """Until the collective that started under this name is complete."""

    name: str


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A loop's body, `trips` times."""

    trips: int
    body: "tuple[Event, ...]"


Event = Busy | Relay | Start | Wait | Repeat


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Seconds from the start until the last rank is done, and of one rank's own work."""

    seconds: float
    work: float

    @property
    def efficiency(self) -> float:
        return self.work / self.seconds if self.seconds else 1.0


def simulate(events: tuple[Event, ...], ranks: int) -> Timeline:
    """Runs the events on `ranks` ranks."""
    run = _Run(ranks)
    run.play(events)
    return Timeline(max(run.clocks), run.work)


def instantaneous(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The events with collectives that take no time; ranks still wait for each other in them."""

    def change(event: Event) -> Event:
        if isinstance(event, Start):
            return dataclasses.replace(event, seconds=0.0)
        return (
            Repeat(event.trips, instantaneous(event.body)) if isinstance(event, Repeat) else event
        )

    return tuple(change(event) for event in events)


class _Run:
    """Clocks of all ranks, and when collectives are complete on each."""

    def __init__(self, ranks: int):
        self.clocks = [0.0] * ranks
        self.work = 0.0
        self._complete: dict[str, list[float]] = {}
        self._links = 0.0  # free from then on

    def play(self, events: tuple[Event, ...]) -> None:
        for event in events:
            match event:
                case Busy(seconds):
                    self.clocks = [clock + seconds for clock in self.clocks]
                    self.work += seconds
                case Relay():
                    self._relay(event)
                case Start(name, seconds, 0):
                    self._links = max(*self.clocks, self._links) + seconds
                    self._complete[name] = [self._links] * len(self.clocks)
                case Start():
                    self._permute(event)
                case Wait(name):
                    complete = self._complete.get(name, self.clocks)
                    self.clocks = list(map(max, self.clocks, complete))
                case Repeat(trips, body):
                    for _ in range(trips):
                        self.play(body)

    def _relay(self, relay: Relay) -> None:
        """Ranks in the order of the messages, each group as soon as its message is there."""
        order = range(len(self.clocks))
        sent: list[float] = []
        for rank in reversed(order) if relay.backward else order:
            clock, arrived, sent = self.clocks[rank] + relay.before, sent, []
            for group in range(relay.groups):
                if arrived:
                    clock = max(clock, arrived[group] + relay.wire)
                clock += relay.slot
                sent.append(clock)
                clock += relay.after
            self.clocks[rank] = clock + relay.tail
        self.work += relay.work

    def _permute(self, start: Start) -> None:
        """Ranks at the end of the line that have no target, or no source, wait for none."""
        arrived, places = self.clocks, range(len(self.clocks))
        target = [arrived[r + start.target] if r + start.target in places else 0.0 for r in places]
        self.clocks = list(map(max, arrived, target))
        self._complete[start.name] = [
            self.clocks[r - start.target] + start.seconds if r - start.target in places else 0.0
            for r in places
        ]


# --- events of a compiled program ----------------------------------------------------------------


def relay_of(tree: Loop, generation: Generation, backward: bool) -> Relay:
    """The relay that a kernel's schedule holds.

    The loop that sends is the walk over groups; if there is one group, it is unrolled and the
    last inner loop before the send walks the group's chunks. A kernel that sends nothing is work.
    """
    group = _sender(tree)
    groups, after = 1, 0
    if group is None:
        before, slot, tail, groups = tree.bundles(), 0, 0, 0
    elif group is tree:
        send = tree.sends[-1]
        inner = [i for i, item in enumerate(tree.items[:send]) if isinstance(item, Loop)]
        first = inner[-1] if inner else 0
        before, slot, tail = tree.bundles(0, first), tree.bundles(first, send), tree.bundles(send)
    else:
        at, send, groups = tree.items.index(group), group.sends[-1], group.trips
        before, tail = tree.bundles(0, at), tree.bundles(at + 1)
        slot, after = group.bundles(0, send), group.bundles(send)
    scale = generation.kernel_stalls / generation.clock
    sent = group.sent if group else 0
    wire = sent / generation.link_bytes_a_second + generation.hop_seconds
    return Relay(before * scale, slot * scale, after * scale, groups, tail * scale, wire, backward)


def _sender(tree: Loop) -> Loop | None:
    """The root, or the outermost loop below it, that sends."""
    if tree.sends:
        return tree
    for item in tree.items:
        if isinstance(item, Loop) and (item.sends or _sender(item) is not None):
            return item if item.sends else _sender(item)
    return None


def events_of(
    works: list[Work],
    exchanged: list[Collective],
    trees: Mapping[str, Loop],
    generation: Generation,
) -> tuple[Event, ...]:
    """The events of one step, as far as the collectives over the context axis divide it."""
    crossing = {c.begin: c for c in exchanged if CONTEXT in c.axes}
    waits = {c.done: c for c in crossing.values() if c.done}
    local = {c.done or c.name: c for c in exchanged if CONTEXT not in c.axes}
    starts = {c.name for c in exchanged} | {c.begin for c in exchanged}
    relays = _relays(works, trees, generation)

    def translate(work: Work) -> Iterator[Event]:
        name = work.visit.instruction.name
        if name in crossing:
            yield _start(crossing[name], generation)
            if not crossing[name].asynchronous:
                yield Wait(crossing[name].name)
        elif name in waits:
            yield Wait(waits[name].name)
        elif name in local:
            yield Busy(local[name].exposed_seconds(generation))
        elif name in relays:
            yield relays[name]
        elif name not in starts:
            yield Busy(seconds_of(work, generation))

    return _nest(works, translate)


def seconds_of(work: Work, generation: Generation) -> float:
    """One execution on a device: the longer of its bundles and its HBM traffic."""
    stalls = generation.kernel_stalls if is_kernel(work.visit.instruction) else 1.0
    issue = work.bundles * stalls / generation.clock
    asynchronous = work.visit.instruction.opcode.endswith("-start")
    traffic = 0.0 if asynchronous else work.hbm_bytes / generation.hbm_bytes_a_second
    return max(issue, traffic)


def _start(collective: Collective, generation: Generation) -> Start:
    target = 0
    if collective.kind == "collective-permute":
        target = 1 if collective.upward else -1
    return Start(collective.name, collective.seconds(generation), target)


def _relays(
    works: list[Work], trees: Mapping[str, Loop], generation: Generation
) -> dict[str, Relay]:
    """Relays by instruction name. Equal kernels are compiled once, under one of their names."""
    found: dict[str, Relay] = {}
    for kernel in (FORWARD_KERNEL, BACKWARD_KERNEL):
        dumped = {name: tree for name, tree in trees.items() if name.startswith(kernel)}
        for work in works:
            name = work.visit.instruction.name
            if name.startswith(kernel) and is_kernel(work.visit.instruction) and dumped:
                tree = dumped.get(name, next(iter(dumped.values())))
                found[name] = relay_of(tree, generation, kernel == BACKWARD_KERNEL)
    return found


def _nest(works: list[Work], translate: Callable[[Work], Iterator[Event]]) -> tuple[Event, ...]:
    """Events with loops as `Repeat`. A loop's body follows its instruction in `works`."""
    place = 0

    def block(loops: tuple[str, ...], times: int) -> tuple[Event, ...]:
        nonlocal place
        events: list[Event] = []
        while place < len(works) and works[place].visit.loops[: len(loops)] == loops:
            visit = works[place].visit
            if len(visit.loops) > len(loops):
                inner = visit.loops[: len(loops) + 1]
                events.append(Repeat(visit.times // times, block(inner, visit.times)))
                continue
            _append(events, translate(works[place]))
            place += 1
        return tuple(events)

    return block((), 1)


def _append(events: list[Event], new: Iterator[Event]) -> None:
    """Adds events, work joined to work."""
    for event in new:
        if isinstance(event, Busy) and events and isinstance(events[-1], Busy):
            events[-1] = Busy(events[-1].seconds + event.seconds)
        elif not isinstance(event, Busy) or event.seconds:
            events.append(event)
