"""Waiting of context ranks, against closed forms and against a program's text."""

import dataclasses

import pytest

from tests.training.estimate.programs import BUNDLES, TEXT
from training.estimate import hlo, program
from training.estimate.bundles import Loop
from training.estimate.collectives import collectives
from training.estimate.timeline import (
    Busy,
    Relay,
    Repeat,
    Start,
    Wait,
    events_of,
    relay_of,
    simulate,
)
from training.estimate.topology import GENERATIONS

MESH = {"data": 1, "fsdp": 1, "context": 4, "tensor": 1}
FORWARD = Relay(before=5.0, slot=2.0, after=0.0, groups=3, tail=0.0, wire=0.0, backward=False)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_relay_fills_once_and_then_runs_at_the_pace_of_its_slots(ranks):
    wire = 0.5
    done = simulate((dataclasses.replace(FORWARD, wire=wire),), ranks)
    # The last rank's first message has passed all ranks before it; nothing delays it after that.
    assert done.seconds == pytest.approx(5 + (ranks - 1) * (2 + wire) + 3 * 2)
    assert done.work == 5 + 3 * 2


def test_a_backward_relay_starts_at_the_last_rank():
    """Rank 0 is late by the fill; a forward relay after it makes the last rank wait for rank 0."""
    backward = Relay(0.0, 1.0, 0.0, 1, 0.0, 0.0, backward=True)
    forward = Relay(0.0, 1.0, 0.0, 1, 0.0, 0.0, backward=False)
    assert simulate((backward, forward), 4).seconds == 4 + 4
    assert simulate((forward, forward), 4).seconds == 4 + 1


def test_without_a_barrier_the_fill_is_paid_once_for_all_layers():
    layers, ranks = 10, 8
    free = simulate((Repeat(layers, (FORWARD, Busy(4.0))),), ranks)
    assert free.seconds == pytest.approx(free.work + (ranks - 1) * 2)
    barrier = (Start("sum", 0.0), Wait("sum"))
    level = simulate((Repeat(layers, (FORWARD, Busy(4.0), *barrier)),), ranks)
    assert level.seconds == pytest.approx(level.work + layers * (ranks - 1) * 2)


def test_a_collective_that_spans_a_layer_hides_a_skew_of_one_layer():
    """Begun and ended in one body of 15 s: a fill of 6 s is free, one of 28 s is not."""
    spanning = (Start("sum", 0.0), FORWARD, Busy(4.0), Wait("sum"))
    few = simulate((Repeat(10, spanning),), 4)
    assert few.seconds == pytest.approx(few.work + 3 * 2)
    many = simulate((Repeat(10, spanning),), 15)
    assert many.seconds > many.work + 14 * 2
    level = simulate((Repeat(10, (FORWARD, Busy(4.0), Start("sum", 0.0), Wait("sum"))),), 15)
    assert many.seconds < level.seconds


def test_a_permute_waits_for_one_neighbour_only():
    """The receiver is late by one hop's fill of 2 s, for which the sender waits once a layer; a
    barrier waits for the fill of all hops."""
    layers, ranks = 6, 8
    halo = (Start("halo", 0.0, target=1), Wait("halo"))
    barrier = (Start("halo", 0.0), Wait("halo"))
    free = simulate((Repeat(layers, (FORWARD,)),), ranks)
    with_halo = simulate((Repeat(layers, (*halo, FORWARD)),), ranks)
    assert with_halo.seconds == free.seconds + (layers - 1) * 2
    with_barrier = simulate((Repeat(layers, (*barrier, FORWARD)),), ranks)
    assert with_barrier.seconds == free.seconds + (layers - 1) * (ranks - 1) * 2


def test_collectives_use_the_links_one_after_another():
    both = (Start("a", 3.0), Start("b", 2.0), Busy(1.0), Wait("b"), Wait("a"))
    assert simulate(both, 4).seconds == 5.0


def kernel(groups: int) -> Loop:
    """100 bundles of local work, then groups of 30 before and 20 after the send, 5 at the end."""
    local = Loop(1, 10, [10])
    group = Loop(1, groups, [Loop(2, 3, [10]), 20], sends=[1], sent=9000)
    return Loop(0, 1, [local, group, 5])


def test_a_kernels_relay_is_read_from_the_loops_of_its_schedule():
    tpu = GENERATIONS["tpu7x"]
    bundle, message = tpu.kernel_stalls / tpu.clock, 9000 / tpu.link_bytes_a_second

    def bundles_of(tree: Loop) -> tuple:
        relay = relay_of(tree, tpu, True)
        parts = (relay.before, relay.slot, relay.after, relay.tail)
        return *(round(part / bundle, 6) for part in parts), relay.groups, relay.wire

    assert bundles_of(kernel(4)) == (100, 30, 20, 5, 4, message + tpu.hop_seconds)
    # One group: the compiler unrolls the walk over groups.
    single = Loop(0, 1, [7, Loop(1, 10, [10]), 3, Loop(1, 3, [10]), 25], sends=[4], sent=9000)
    assert bundles_of(single) == (110, 30, 0, 25, 1, message + tpu.hop_seconds)
    # Nothing is sent: all of it is work.
    assert bundles_of(Loop(0, 1, [40]))[:5] == (40, 0, 0, 0, 0)


@pytest.mark.parametrize("backward", [False, True])
def test_a_kernel_that_sends_nothing_waits_for_no_rank(backward):
    """A forward that the backward repeats from the saved entry state."""
    tree = Loop(0, 1, [100, Loop(1, 4, [10])])
    silent = relay_of(tree, GENERATIONS["tpu7x"], backward)
    done = simulate((Repeat(3, (silent,)),), 8)
    assert done.seconds == done.work > 0


def efficiency(text: str, ranks: int) -> float:
    """Of a program whose first product is the forward kernel of `kernel(4)`."""
    text = text.replace("product.1", "kda_forward.1")
    bundles = {"kda_forward.1": 305} | BUNDLES
    module = hlo.parse(text)
    works = program.works(module, bundles)
    exchanged = collectives(module, works, MESH)
    events = events_of(works, exchanged, {"kda_forward.1": kernel(4)}, GENERATIONS["tpu7x"])
    return simulate(events, ranks).efficiency


def without(text: str, *names: str) -> str:
    """The program with collectives replaced by copies."""
    lines = []
    for line in text.splitlines():
        found = [name for name in names if line.strip().startswith(f"%{name} = ")]
        if found and "all-reduce" in line:
            line = line.split(" all-reduce(")[0] + " copy(%layer.1)"
        elif found and "all-gather-start" in line:
            line = line.split(" all-gather-start(")[0] + " copy(%sum.1)"
        elif found:
            line = line.replace("all-gather-done", "copy")
        lines.append(line)
    return "\n".join(lines) + "\n"


def test_a_sum_over_context_in_a_layer_lowers_the_efficiency():
    gathered = without(TEXT, "sum.1")
    free = without(TEXT, "sum.1", "gather.1", "gathered.1")
    for ranks in (4, 16, 64):
        assert efficiency(TEXT, ranks) < efficiency(gathered, ranks) < efficiency(free, ranks)


def test_a_collective_over_other_axes_makes_no_rank_wait():
    module = hlo.parse(TEXT)
    works = program.works(module, BUNDLES)
    exchanged = collectives(module, works, {"data": 1, "fsdp": 4, "context": 1, "tensor": 1})
    events = events_of(works, exchanged, {}, GENERATIONS["v6e"])
    assert simulate(events, 8).efficiency == 1.0
