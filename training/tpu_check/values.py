"""Checks of values, gradients and states: kernels on the devices against float64 on the host."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from kernels.accuracy import (
    ATTENTION_BFLOAT16,
    CONVOLUTION_BFLOAT16,
    KDA_BOUNDS_BFLOAT16,
    KDA_BOUNDS_FLOAT32,
)
from kernels.attention import cases as attention_cases
from kernels.cases import error
from kernels.kda import cases as kda_cases
from kernels.short_conv import cases as conv_cases
from training.tpu_check.outcome import Outcome
from training.tpu_check.site import Layout, Program, Site

KERNELS = "mosaic_tpu"  # used or an error: a check never falls back to another implementation
REPEATS = 10  # calls whose results must be bit-identical, which a race between devices would break
TOKENS, WHOLE = P(None, None, "context"), P()


def worst(errors: dict[str, float], limits: dict[str, float]) -> tuple[bool, str]:
    """Whether all errors are within their limits, and a text with the output's and the largest.

    NaN is not within any limit.
    """
    share = {name: errors[name] / limits[name] for name in errors}
    share = {name: math.inf if math.isnan(x) else x for name, x in share.items()}
    beyond = [name for name, x in share.items() if not x <= 1]
    names = beyond or [max(share, key=lambda name: share[name])]
    shown = [name for name in ("out", "final") if name in errors and name not in names]
    text = ", ".join(f"{n} {errors[n]:.1e} of {limits[n]:g}" for n in [*names, *shown])
    return not beyond, f"{'beyond its bound: ' if beyond else 'worst: '}{text}"


def packed_ids(rows: int, length: int) -> np.ndarray:
    """[B, T] int32: pieces of one token to a sixth of the row. Every fourth piece is padding,
    between two segments or inside one."""
    random = np.random.default_rng(length)
    ids = np.zeros((rows, length), np.int32)
    for row in ids:
        at, piece, number = 0, 0, 0
        while at < length:
            size = int(random.integers(1, max(length // 6, 2)))
            number += piece % 4 != 0 and piece % 8 != 5
            row[at : at + size] = number if piece % 4 != 0 else 0
            at, piece = at + size, piece + 1
    return ids


# --- KDA -----------------------------------------------------------------------------------------


@functools.cache
def kda_case(name: str, ranks: int, small: bool) -> kda_cases.Case:
    """A call by name.

    dense: bfloat16, one segment, given start and final state. packed: bfloat16, start states of
    some segments, final ones of all. softplus, bounded: float32, with the gate's parameters, whose
    gradients are sums that cancel, and residuals rebuilt or saved.
    """
    channels, heads, tokens = (64, 2, 64) if small else (128, 4, 256)
    sizes = {"keys": channels, "values": channels, "heads": heads}
    rows = 1 if small else 2
    ids = np.ones((rows, ranks * tokens), np.int32)
    if name in ("softplus", "bounded"):
        policy = "remat" if name == "softplus" else "save"
        return kda_cases.make_case(
            ids, **sizes, gate=name, slots=1, final="last", state_policy=policy
        )
    if name == "dense":
        case = kda_cases.make_case(ids, **sizes, dtype="bfloat16", slots=1, final="last")
    else:
        ids = packed_ids(rows, ranks * tokens)
        case = kda_cases.make_case(
            ids, **sizes, dtype="bfloat16", slots=2, start=True, final="all",
            max_segments=int(ids.max()),
        )  # fmt: skip
    return kda_cases.with_narrow_decay(case)


def kda_programs(name: str, layout: Layout, site: Site) -> list[Program]:
    """Values and gradients of a case, with tokens split over the context axis."""
    mesh = site.mesh(layout)
    case = kda_case(name, mesh.shape["context"], site.small)
    call = kda_cases.call_of(
        case.options, case.arrays, case.max_segments, mesh=mesh, implementation=KERNELS
    )
    arrays = {
        n: site.place(mesh, x, TOKENS if n in kda_cases.TOKENS else WHOLE)
        for n, x in case.arrays.items()
    }
    d_out = site.place(mesh, jnp.asarray(case.d_out, case.arrays["v"].dtype), TOKENS)
    cotangents = (d_out, site.place(mesh, case.d_final, WHOLE))
    ids = site.place(mesh, case.ids, P(None, "context"))
    return [site.compile(kda_cases.with_gradients(call), arrays, ids, cotangents)]


@functools.cache
def _kda_oracle(name: str, ranks: int, small: bool) -> kda_cases.Result:
    return kda_cases.oracle(kda_case(name, ranks, small))


def judge_kda(name: str, layout: Layout, site: Site, programs: list[Program]) -> Outcome:
    """Compares with the float64 recurrence; on a TPU, repeated calls must be bit-identical."""
    found = kda_cases.numbers(*site.run(programs[0]))
    reference = _kda_oracle(name, site.mesh(layout).shape["context"], site.small)
    bounds = KDA_BOUNDS_BFLOAT16 if name in ("dense", "packed") else KDA_BOUNDS_FLOAT32
    errors = kda_cases.errors(found, reference)
    passed, text = worst(errors, kda_cases.limits(errors, bounds))
    return _repeated(site, programs[0], passed, text)


def _repeated(site: Site, program: Program, passed: bool, text: str) -> Outcome:
    """The outcome; FAILED if further calls do not give bit-identical results."""
    if site.small:  # the interpreter detects races itself
        return Outcome.of(passed, text)
    first = jax.tree.map(np.asarray, site.run(program))
    for _ in range(REPEATS - 1):
        again = jax.tree.map(np.asarray, site.run(program))
        same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), first, again)
        if not all(jax.tree.leaves(same)):
            return Outcome.of(False, f"{text}; repeated calls give different bits")
    return Outcome.of(passed, f"{text}; {REPEATS} bit-identical calls")


# --- the short convolution -----------------------------------------------------------------------


def conv_case(ranks: int, small: bool):
    """(ids, x, weight, tail, cotangents), in bfloat16 except the weight."""
    rows, tokens, channels = (1, 32, 128) if small else (2, 256, 512)
    ids = packed_ids(rows, ranks * tokens)
    x, weight, tail, cotangents = conv_cases.example(ids, channels=channels)
    x, tail, *cotangents = (np.asarray(jnp.asarray(a, "bfloat16")) for a in (x, tail, *cotangents))
    return ids, x, weight, tail, tuple(cotangents)


def conv_programs(layout: Layout, site: Site) -> list[Program]:
    """Values and gradients of a convolution with four taps."""
    mesh = site.mesh(layout)
    ids, x, weight, tail, (d_y, d_tail) = conv_case(mesh.shape["context"], site.small)
    tokens = P(None, "context")
    call = conv_cases.call_of(mesh, implementation=KERNELS)
    arguments = (
        site.place(mesh, x, tokens),
        site.place(mesh, weight, WHOLE),
        site.place(mesh, tail, WHOLE),
        site.place(mesh, ids, tokens),
        (site.place(mesh, d_y, tokens), site.place(mesh, d_tail, WHOLE)),
    )
    return [site.compile(conv_cases.with_gradients(call), *arguments)]


def judge_conv(layout: Layout, site: Site, programs: list[Program]) -> Outcome:
    """Compares with float64 sums over taps."""
    ids, x, weight, tail, cotangents = conv_case(site.mesh(layout).shape["context"], site.small)
    wanted = conv_cases.oracle(x, weight, tail, ids, "silu", cotangents)
    names = (("out", "tail"), ("d_x", "d_weight", "d_tail"))
    errors = {
        name: error(np.asarray(a, np.float64), np.asarray(b))
        for group, found, exact in zip(names, site.run(programs[0]), wanted)
        for name, a, b in zip(group, found, exact)
    }
    passed, text = worst(errors, dict.fromkeys(errors, CONVOLUTION_BFLOAT16))
    return _repeated(site, programs[0], passed, text)


# --- attention -----------------------------------------------------------------------------------


def attention_case(ranks: int, small: bool) -> attention_cases.Case:
    """Grouped keys, segments, and keys carried from the previous row."""
    heads, size, tokens, memory = ((2, 1), 64, 128, 64) if small else ((4, 2), 128, 512, 256)
    ids = packed_ids(1 if small else 2, ranks * tokens)
    return attention_cases.Case(tuple(ids), heads, size, ranks * memory)


def attention_programs(layout: Layout, site: Site) -> list[Program]:
    """Values and gradients, with carried keys."""
    mesh = site.mesh(layout)
    case = attention_case(mesh.shape["context"], site.small)
    arrays, valid = attention_cases.make_inputs(case, "bfloat16")
    step = attention_cases.step_of(case, mesh, 256, KERNELS)
    placed = site.place(mesh, arrays, attention_cases.KEYS)
    return [site.compile(step, placed, site.place(mesh, valid, attention_cases.TOKENS))]


def judge_attention(layout: Layout, site: Site, programs: list[Program]) -> Outcome:
    """Compares with the full score matrix in float64."""
    case = attention_case(site.mesh(layout).shape["context"], site.small)
    out, gradients, _ = site.run(programs[0])
    exact, exact_gradients = attention_cases.oracle(case, "bfloat16")
    names = ("out", "d_q", "d_k", "d_v", "d_memory_k", "d_memory_v")
    pairs = zip(names, (out, *gradients), (exact, *exact_gradients))
    errors = {name: error(np.asarray(a, np.float64), b) for name, a, b in pairs}
    passed, text = worst(errors, dict.fromkeys(errors, ATTENTION_BFLOAT16))
    return _repeated(site, programs[0], passed, text)
