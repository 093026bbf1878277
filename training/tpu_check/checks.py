"""The checks, in the order in which they run."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from training.tpu_check import speed, step, values
from training.tpu_check.outcome import Outcome
from training.tpu_check.site import NEEDED, Layout, Program, Site


class Check(NamedTuple):
    """programs: compiles, in every mode. judge: runs and compares. devices: the minimum needed."""

    name: str
    devices: int
    programs: Callable[[Site], list[Program]]
    judge: Callable[[Site, list[Program]], Outcome]


def _kda(name: str, layout: Layout) -> Check:
    return Check(
        f"KDA {name}, {layout}",
        NEEDED[layout],
        functools.partial(values.kda_programs, name, layout),
        functools.partial(values.judge_kda, name, layout),
    )


def _arranged(name: str, layout: Layout, programs: Callable, judge: Callable) -> Check:
    return Check(
        f"{name}, {layout}",
        NEEDED[layout],
        functools.partial(programs, layout),
        functools.partial(judge, layout),
    )


def _kernels(packed: bool) -> Check:
    return Check(
        f"time of KDA's kernels, {'packed' if packed else 'dense'}",
        1,
        functools.partial(speed.kernel_programs, packed),
        functools.partial(speed.judge_kernels, packed),
    )


CONVOLUTION = functools.partial(
    _arranged, "short convolution", programs=values.conv_programs, judge=values.judge_conv
)
ATTENTION = functools.partial(
    _arranged, "attention", programs=values.attention_programs, judge=values.judge_attention
)
LARGE = Check("memory and time of a step", 1, step.large_programs, step.judge_large)
# One device runs KDA's fused walk; several run its pipelined pass of states, and for packed rows
# with given states the fused walk in groups.
CHECKS = (
    _kda("dense", Layout.ONE),
    _kda("packed", Layout.ONE),
    _kda("softplus", Layout.ONE),
    _kda("bounded", Layout.ONE),
    _kda("dense", Layout.RANKS),
    _kda("packed", Layout.RANKS),
    _kda("dense", Layout.MINOR),
    _kda("dense", Layout.MAJOR),
    _kda("packed", Layout.MAJOR),
    CONVOLUTION(Layout.ONE),
    CONVOLUTION(Layout.RANKS),
    ATTENTION(Layout.ONE),
    ATTENTION(Layout.RANKS),
    Check("a training step", 1, step.step_programs, step.judge_step),
    Check("time of a product", 1, speed.product_programs, speed.judge_product),
    Check("time of HBM", 1, speed.hbm_programs, speed.judge_hbm),
    _kernels(False),
    _kernels(True),
    Check("time of messages", 2, speed.link_programs, speed.judge_links),
    Check("waiting of ranks", 2, speed.waiting_programs, speed.judge_waiting),
    LARGE,
)
BY_NAME = {check.name: check for check in CHECKS}
FRESH = {LARGE.name}  # run in a new process, because peak memory covers a process's whole life
