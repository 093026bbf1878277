"""The description of one `kda` call: `Problem`, `Inputs`, and CHUNK, the chunk length of all forms.

Backends share one internal signature (axes: B row, T token, H head, K key channel, V value
channel):

    forward(problem, inputs, segments, entry) -> (out [B, H, T, V], final, entry, residuals)
    backward(problem, inputs, segments, residuals, d_out, d_final) -> Inputs of gradients

`final` is None, [B, H, K, V] (LAST) or [B, max_segments, H, K, V] (ALL), float32. It is a per-rank
partial value: the sum over the ranks of `problem.axis_name` is the state. `d_final` is the complete
cotangent on every rank. Gradients of inputs that ranks share (initial_state, default_initial_state,
a_log, dt_bias) are also per-rank partial values, and are None if the input is None. T is a multiple
of CHUNK (the interface adds padding tokens), but for "recurrent".

`entry` [B, H, K, V] float32 is the state before this rank's first token. With Entry.KEPT the
forward returns it. With Entry.GIVEN the forward starts from it, receives and sends nothing, and
returns the same residuals as the call that returned it (`final` is then meaningless). Otherwise it
is None.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import jax

CHUNK = 64  # tokens per chunk, in both fast forms
assert CHUNK & (CHUNK - 1) == 0, "levels double: CHUNK must be a power of two"


class Gate(Enum):
    """How the log decay is computed from the `decay` input x; x' = x + dt_bias."""

    GIVEN = "given"  # x itself
    SOFTPLUS = "softplus"  # -exp(a_log) softplus(x')
    BOUNDED = "bounded"  # lower_bound sigmoid(exp(a_log) x')


class FinalState(Enum):
    """Which segments' states are returned."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


class StatePolicy(Enum):
    """What the forward keeps for the backward: its intermediate results, or only inputs and states
    from which the backward recomputes them."""

    SAVE = "save"
    REMAT = "remat"


class Entry(Enum):
    """What the forward does with the state that enters a rank."""

    UNUSED = "unused"
    KEPT = "kept"
    GIVEN = "given"


@dataclass(frozen=True)
class Problem:
    """Static description of a call; hashable, so it can be a nondifferentiable argument.

    axis_name is None if the context axis is absent or has one rank. lower_bound is set only for
    Gate.BOUNDED. max_segments is the bound given to `plan_segments`, set only for FinalState.ALL.
    rank_io_in_vmem allows the TPU kernels to place arrays of a context rank in VMEM.
    """

    gate: Gate
    lower_bound: float | None
    l2norm: bool
    scale: float
    axis_name: str | None
    final_state: FinalState
    state_policy: StatePolicy
    max_segments: int | None
    rank_io_in_vmem: bool = True
    entry: Entry = Entry.UNUSED


class Inputs(NamedTuple):
    """Differentiable arrays of a call, or their gradients.

    a_log and dt_bias are present for the gates SOFTPLUS and BOUNDED (dt_bias is zeros if the caller
    gave none).
    """

    q: jax.Array  # [B, H, T, K]
    k: jax.Array  # [B, H, T, K]
    v: jax.Array  # [B, H, T, V]
    decay: jax.Array  # [B, H, T, K]
    beta: jax.Array  # [B, H, T]
    initial_state: jax.Array | None  # [B, N, H, K, V] float32
    default_initial_state: jax.Array | None  # [H, K, V] float32
    a_log: jax.Array | None  # [H] float32
    dt_bias: jax.Array | None  # [H, K] float32
