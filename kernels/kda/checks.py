"""Checks the arguments of `kda`, from shapes and dtypes, before anything is traced or compiled."""

import math

import jax.numpy as jnp

from kernels.kda.problem import FinalState, StatePolicy
from kernels.segments import Segments, check_axis, is_array

TOKEN_DTYPES = (jnp.dtype("float32"), jnp.dtype("bfloat16"))


def check(
    q, k, v, decay, beta, segments, *, initial_state, default_initial_state, final_state, a_log,
    dt_bias, lower_bound, scale, state_policy, axis_name,
):  # fmt: skip
    """Raises ValueError with one line that names the argument, what it is and what it must be."""
    _check_arrays(
        q=q, k=k, v=v, decay=decay, beta=beta, initial_state=initial_state,
        default_initial_state=default_initial_state, a_log=a_log, dt_bias=dt_bias,
    )  # fmt: skip
    _require(
        q.ndim == 4 and 0 not in q.shape, f"q must be [B, H, T, K] and not empty, got {q.shape}"
    )
    rows, heads, length, keys = q.shape
    _require(v.ndim == 4, f"v must be [B, H, T, V], got {v.shape}")
    values = v.shape[-1]
    _require(values > 0, f"v must have at least one channel, got {v.shape}")
    shapes = {
        "k": (k, (rows, heads, length, keys)),
        "v": (v, (rows, heads, length, values)),
        "decay": (decay, (rows, heads, length, keys)),
        "beta": (beta, (rows, heads, length)),
        "default_initial_state": (default_initial_state, (heads, keys, values)),
        "a_log": (a_log, (heads,)),
        "dt_bias": (dt_bias, (heads, keys)),
    }
    for name, (x, shape) in shapes.items():
        fits = x is None or x.shape == shape
        _require(fits, f"{name} must be {shape} to match q {q.shape} and v {v.shape}, got", x)
    _check_dtypes(q=q, k=k, v=v, decay=decay, beta=beta)
    _check_states(initial_state, default_initial_state, (rows, heads, keys, values))
    _check_gate(a_log, dt_bias, lower_bound)
    _require(
        scale is None or (isinstance(scale, (int, float)) and math.isfinite(scale)),
        f"scale must be a finite number, got {scale!r}",
    )
    check_axis("kda", axis_name)
    _check_name("final_state", final_state, FinalState)
    _check_name("state_policy", state_policy, StatePolicy)
    if segments is None:
        return
    _require(
        isinstance(segments, Segments),
        f"segments must come from plan_segments(segment_ids), got {type(segments).__name__}",
    )
    _require(
        segments.index.shape == (rows, length),
        f"segments must be planned for segment_ids [B, T] = {(rows, length)}, got",
        segments.index,
    )
    _require(
        final_state != "all" or segments.max_segments is not None,
        'final_state="all" needs plan_segments(..., max_segments=the most segments of a row)',
    )


def _require(fits: bool, message: str, x=None) -> None:
    if not fits:
        raise ValueError(f"kda: {message}" + ("" if x is None else f" {x.shape}"))


def _check_arrays(**arrays) -> None:
    optional = ("initial_state", "default_initial_state", "a_log", "dt_bias")
    for name, x in arrays.items():
        _require(
            is_array(x) or (x is None and name in optional),
            f"{name} must be an array, got {type(x).__name__}",
        )


def _check_dtypes(**tokens) -> None:
    for name, x in tokens.items():
        _require(x.dtype in TOKEN_DTYPES, f"{name} must be float32 or bfloat16, got {x.dtype}")
    q, k, v = tokens["q"], tokens["k"], tokens["v"]
    _require(
        q.dtype == k.dtype == v.dtype,
        f"q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}",
    )


def _check_states(initial_state, default_initial_state, sizes) -> None:
    rows, heads, keys, values = sizes
    if initial_state is not None:
        shape = initial_state.shape
        fits = len(shape) == 5 and shape[1] > 0 and (shape[0], *shape[2:]) == sizes
        _require(
            fits,
            f"initial_state must be [B, N, H, K, V] = ({rows}, N >= 1, {heads}, {keys}, {values}), "
            f"got {shape}",
        )
    for name, x in {
        "initial_state": initial_state,
        "default_initial_state": default_initial_state,
    }.items():
        _require(x is None or x.dtype == jnp.float32, f"{name} must be float32, got {_dtype(x)}")


def _check_gate(a_log, dt_bias, lower_bound) -> None:
    _require(dt_bias is None or a_log is not None, "dt_bias is part of the gate and needs a_log")
    if lower_bound is None:
        return
    _require(a_log is not None, "lower_bound bounds the gate and needs a_log")
    number = isinstance(lower_bound, (int, float))
    _require(
        number and -5 <= lower_bound < 0,
        f"lower_bound must be a number with -5 <= lower_bound < 0, got {lower_bound!r}",
    )


def _check_name(name: str, given, choices) -> None:
    names = [choice.value for choice in choices]
    _require(given in names, f"{name} must be one of {names}, got {given!r}")


def _dtype(x):
    return None if x is None else x.dtype
