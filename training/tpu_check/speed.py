"""Checks that measure seconds per bundle and per byte. They calibrate the estimates of `--plan`.

If a measured speed differs from the built-in one by more than a factor of `FAR`, the measurement or
the count of bundles is wrong: the check fails and the speed is not used.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.kda import kda
from kernels.segments import plan_segments
from training.estimate.collectives import collectives
from training.estimate.program import Work, is_kernel, works
from training.estimate.timeline import Timeline, events_of, seconds_of, simulate
from training.estimate.topology import Generation
from training.tpu_check.outcome import Outcome
from training.tpu_check.site import Layout, Program, Site
from training.tpu_check.values import KERNELS, packed_ids

FAR = 4.0
KERNEL_BUNDLE = "kernel_bundle_seconds"  # kernel_stalls follow from it and the measured clock
LATE = 2.0  # largest ratio of measured to modelled seconds of a call on several ranks
TIMES = 20  # exchanges in a program that measures links
INTERPRETED = "interpreted: no speed of a TPU"


def _near(found: float, built_in: float) -> bool:
    return built_in / FAR < found < built_in * FAR


def _compared(name: str, unit: str, scale: float, found: float, built_in: float) -> str:
    return f"{name} {found * scale:.3g} {unit} (built in {built_in * scale:.3g})"


# --- XLA's product, and HBM ----------------------------------------------------------------------


def product_programs(site: Site) -> list[Program]:
    """A product of two square matrices in bfloat16, which defines `clock`."""
    size, mesh = 128 if site.small else 8192, site.mesh(Layout.ONE)
    a, b = (site.normal(mesh, (size, size), "bfloat16", P()) for _ in range(2))
    return [site.compile(lambda a, b: a @ b, a, b)]


def judge_product(site: Site, programs: list[Program]) -> Outcome:
    """Bundles per second, and the share of the published peak."""
    seconds = site.seconds(programs[0])
    size = programs[0].arguments[0].shape[0]
    rate = 2 * size**3 / seconds
    if site.generation is None:
        return Outcome.of(True, f"{rate / 1e9:.1f} GFLOP/s; {INTERPRETED}")
    clock = programs[0].schedule.total / seconds
    text = _compared("clock", "bundles/ns", 1e-9, clock, site.generation.clock)
    share = rate / site.generation.flops_a_second
    return Outcome.of(
        _near(clock, site.generation.clock), f"{text}, {share:.0%} of peak", clock=clock
    )


def hbm_programs(site: Site) -> list[Program]:
    """Reads and writes a quarter of a gigabyte: twenty results fit in memory at once."""
    mesh = site.mesh(Layout.ONE)
    x = site.normal(mesh, (2**10 if site.small else 2**16, 1024), "float32", P())
    return [site.compile(lambda x: x + 1.0, x)]


def judge_hbm(site: Site, programs: list[Program]) -> Outcome:
    """Bytes per second."""
    moved = 2 * programs[0].arguments[0].nbytes
    speed = moved / site.seconds(programs[0])
    if site.generation is None:
        return Outcome.of(True, f"{speed / 1e9:.1f} GB/s; {INTERPRETED}")
    built_in = site.generation.hbm_bytes_a_second
    text = _compared("HBM", "TB/s", 1e-12, speed, built_in)
    return Outcome.of(_near(speed, built_in), text, hbm_bytes_a_second=speed)


# --- KDA's kernels on one device -----------------------------------------------------------------


def kda_call(mesh: Mesh, packed: bool) -> Callable:
    """Forward and VJP of `kda` with a cotangent of ones: q, k, v, decay, beta, ids."""

    def local(q, k, v, decay, beta, ids):
        segments = plan_segments(ids, "context") if packed else None

        def attend(q, k, v, decay, beta):
            out, _ = kda(
                q, k, v, decay, beta, segments, axis_name="context", implementation=KERNELS
            )
            return out

        out, pull = jax.vjp(attend, q, k, v, decay, beta)
        return out, pull(jnp.ones_like(out))

    token, scalar = P(None, None, "context"), P(None, None, "context")
    specs = (*(token,) * 4, scalar)
    return jax.shard_map(
        local, mesh=mesh, in_specs=(*specs, P(None, "context")), out_specs=(token, specs)
    )


def kda_programs_of(site: Site, layout: Layout, tokens: int, packed: bool) -> Program:
    """`kda_call` with `tokens` tokens per rank; 16 heads of 128 in bfloat16 (small: 2 of 32)."""
    mesh = site.mesh(layout)
    heads, channels = (2, 32) if site.small else (16, 128)
    length = tokens * mesh.shape["context"]
    token = functools.partial(
        site.normal, mesh, (1, heads, length, channels), spec=P(None, None, "context")
    )
    # Keys of length about 1, as qk_l2norm makes them, and decays below 0.
    q, k, v, decay = (token(dtype="bfloat16") for _ in range(4))
    beta = site.normal(mesh, (1, heads, length), "float32", P(None, None, "context"))
    ids = site.place(mesh, packed_ids(1, length), P(None, "context"))
    call = kda_call(mesh, packed)

    def scaled(q, k, v, decay, beta, ids):
        unit = [x * channels**-0.5 for x in (q, k)]
        return call(*unit, v, -0.05 * jnp.abs(decay), jax.nn.sigmoid(beta), ids)

    return site.compile(scaled, q, k, v, decay, beta, ids)


def kernel_programs(packed: bool, site: Site) -> list[Program]:
    """One row on one device."""
    return [kda_programs_of(site, Layout.ONE, 64 if site.small else 8192, packed)]


def judge_kernels(packed: bool, site: Site, programs: list[Program]) -> Outcome:
    """How much longer a bundle of the kernels takes than one of XLA's, measured on dense rows."""
    seconds = site.seconds(programs[0])
    if site.generation is None:
        return Outcome.of(True, f"{1e3 * seconds:.1f} ms; {INTERPRETED}")
    found = works(programs[0].module, programs[0].schedule.latest)
    stalls = stalls_of(found, seconds, site.generation)
    built_in = site.generation.kernel_stalls
    text = _compared("stalls", "x", 1.0, stalls, built_in)
    text += f", {1e3 * seconds:.3f} ms for {kernel_bundles(found):,} bundles of kernels"
    speeds = {} if packed else {KERNEL_BUNDLE: stalls / site.generation.clock}
    return Outcome.of(_near(stalls, built_in), text, **speeds)


def kernel_bundles(found: list[Work]) -> int:
    return sum(w.bundles * w.visit.times for w in found if is_kernel(w.visit.instruction))


def stalls_of(found: list[Work], seconds: float, generation: Generation) -> float:
    """The kernel_stalls for which the estimate equals the measured time (no collectives)."""
    others = sum(
        w.visit.times * seconds_of(w, generation)
        for w in found
        if not is_kernel(w.visit.instruction)
    )
    return max(seconds - others, 0.0) * generation.clock / max(kernel_bundles(found), 1)


# --- between devices -----------------------------------------------------------------------------


def link_programs(site: Site) -> list[Program]:
    """Sequential messages to the next rank: large ones, and small ones."""
    mesh = site.mesh(Layout.RANKS)
    ranks = mesh.shape["context"]

    def rounds(x):
        def send(_, x):
            return jax.lax.ppermute(x, "context", [(r, (r + 1) % ranks) for r in range(ranks)])

        return jax.lax.fori_loop(0, TIMES, send, x)

    spec = P("context")
    split = jax.shard_map(rounds, mesh=mesh, in_specs=spec, out_specs=spec)
    sizes = [(ranks * (8 if site.small else 2**14), 1024), (ranks * 8, 128)]
    return [site.compile(split, site.normal(mesh, s, "float32", spec)) for s in sizes]


def judge_links(site: Site, programs: list[Program]) -> Outcome:
    """Bytes per second of one link and direction, and a message's latency."""
    large, small = (site.seconds(program) / TIMES for program in programs)
    size = programs[0].arguments[0].nbytes / len(site.devices)
    if site.generation is None:
        return Outcome.of(True, f"{1e6 * small:.0f} us per message; {INTERPRETED}")
    speed = size / max(large - small, 1e-9)
    built_in = site.generation
    text = _compared("link", "GB/s", 1e-9, speed, built_in.link_bytes_a_second)
    text += ", " + _compared("message", "us", 1e6, small, built_in.hop_seconds)
    near = _near(speed, built_in.link_bytes_a_second) and small < 20 * FAR * built_in.hop_seconds
    return Outcome.of(near, text, link_bytes_a_second=speed, hop_seconds=small)


def waiting_programs(site: Site) -> list[Program]:
    """The same tokens per rank on one device and on all devices; and an empty program."""
    tokens, mesh = 64 if site.small else 2048, site.mesh(Layout.RANKS)
    calls = [kda_programs_of(site, layout, tokens, False) for layout in (Layout.ONE, Layout.RANKS)]
    nothing = site.normal(mesh, (mesh.size * 8, 128), "float32", P("context"))
    return [*calls, site.compile(lambda x: x + 1.0, nothing)]


def judge_waiting(site: Site, programs: list[Program]) -> Outcome:
    """Seconds of one call on all ranks against the timeline's, with the kernels' speed measured on
    one device. Each call is finished before the next begins, so that no rank can run ahead."""
    alone, ranks, dispatch = (site.latency(program) for program in programs)
    alone, ranks = alone - dispatch, ranks - dispatch
    if site.generation is None:
        text = f"{1e3 * alone:.1f} ms alone, {1e3 * ranks:.1f} ms on all ranks"
        return Outcome.of(True, f"{text}; {INTERPRETED}")
    model = waiting_model(programs[:2], alone, len(site.devices), site.generation)
    wait, modelled = ranks - model.work, model.seconds - model.work
    text = (
        f"waiting {1e6 * wait:.0f} us of {1e6 * ranks:.0f}, by the model {1e6 * modelled:.0f} of "
        f"{1e6 * model.seconds:.0f}"
    )
    return Outcome.of(model.seconds / LATE < ranks < model.seconds * LATE, text)


def waiting_model(
    programs: list[Program], alone: float, ranks: int, generation: Generation
) -> Timeline:
    """The timeline of the program of all ranks; alone: seconds of the one-device program."""
    one, many = ((works(p.module, p.schedule.latest), p) for p in programs)
    stalls = stalls_of(one[0], alone, generation)
    measured = dataclasses.replace(generation, kernel_stalls=stalls)
    exchanged = collectives(many[1].module, many[0], {"context": ranks})
    return simulate(events_of(many[0], exchanged, many[1].schedule.trees, measured), ranks)
