"""`kda(...)`: checks, shapes, gradient rule and choice of implementation.

The gradient rule wraps one core that works on per-rank partial values (`problem.py`). Outside the
rule, inputs shared by the ranks are cast to varying and the final state is summed by a psum. JAX
therefore sums the gradients of shared inputs over the ranks, and counts the cotangent of a shared
output once.
"""

import functools
import importlib
from types import ModuleType

import jax
import jax.numpy as jnp

from kernels.kda import checks
from kernels.kda.problem import CHUNK, Entry, FinalState, Gate, Inputs, Problem, StatePolicy
from kernels.segments import Segments, pad_tokens, whole_row
from kernels.select import choose
from kernels.vma import vary, varying_axes


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    segments: Segments | None = None,
    *,
    initial_state: jax.Array | None = None,
    default_initial_state: jax.Array | None = None,
    final_state: str = "none",
    a_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    scale: float | None = None,
    axis_name: str | None = None,
    state_policy: str = "remat",
    rank_io_in_vmem: bool = True,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Kimi Delta Attention: S <- Diag(exp(a)) S; S <- S + beta k (v - k^T S)^T; o = scale S^T q.

    Args:
        q, k, decay: [B, H, T, K]; v: [B, H, T, V]; beta: [B, H, T]. q, k, v share a dtype, float32
            or bfloat16; decay and beta may be either. T is any length; with axis_name, the rank's
            part. "mosaic_tpu" needs finite numbers at padding too; in bfloat16 it is meant for beta
            |k|^2 <= 1, which a sigmoid and qk_l2norm ensure (see NOTES.md for larger values).
        segments: from `plan_segments` with the same axis_name; None: every row is one segment.
        initial_state: [B, N, H, K, V] float32; the row's n-th segment starts from slot n.
        default_initial_state: [H, K, V] float32; the start state of segments beyond N. None: zeros.
        final_state: "none", "last" or "all" (needs plan_segments(max_segments=...)).
        a_log: [H]. If given, decay is a raw gate x, and the log decay is -exp(a_log) softplus(x +
            dt_bias), or with lower_bound it is lower_bound sigmoid(exp(a_log) (x + dt_bias)). If
            None, decay is the log decay itself (<= 0).
        dt_bias: [H, K], only with a_log.
        lower_bound: in [-5, 0), only with a_log.
        qk_l2norm: divide q and k by sqrt(sum of squares + 1e-6) first.
        scale: factor on the output, K^-1/2 by default.
        axis_name: the mesh axis over which T is split; the call must be inside `jax.shard_map`.
            Inputs without a T axis are the same on all of its ranks, and so is the returned state.
        state_policy: "remat" recomputes in the backward pass what "save" keeps from the forward.
        rank_io_in_vmem: False keeps every array that the TPU kernels exchange with XLA in HBM. By
            default some are placed in VMEM if tokens are split over ranks, they fit, and a device
            has one TensorCore.
        implementation: None chooses by device (see `kernels.select`); "mosaic_tpu", "chunked" or
            "recurrent" run or raise.

    Returns:
        out [B, H, T, V] in v's dtype, 0 at padding; and None, the last segment's state [B, H, K,
        V], or every segment's [B, max_segments, H, K, V], float32. A segment without tokens returns
        its start state. With "all", rows that have more than max_segments segments are NaN.

    Raises:
        ValueError: an argument is invalid; one line, before tracing.
    """
    out, state, _ = _on_rank(
        Entry.UNUSED, None, q, k, v, decay, beta, segments, initial_state, default_initial_state,
        final_state, a_log, dt_bias, lower_bound, qk_l2norm, scale, axis_name, state_policy,
        rank_io_in_vmem, implementation,
    )  # fmt: skip
    if state is None or axis_name is None:
        return out, state
    return out, jax.lax.psum(state, axis_name)


def kda_on_rank(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    segments: Segments,
    *,
    entry: jax.Array | None,
    initial_state: jax.Array | None,
    default_initial_state: jax.Array | None,
    final_state: str,
    a_log: jax.Array | None,
    dt_bias: jax.Array | None,
    lower_bound: float | None,
    qk_l2norm: bool,
    axis_name: str | None,
    state_policy: str,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """`kda` without the final sum over ranks, which can be repeated without communication.

    Args:
        entry: None, or the state that a call with the same arguments returned. The call then starts
            from it and receives nothing. Its gradient is that of the first call, in which
            cotangents pass from rank to rank; no gradient flows into `entry`.

    Returns:
        out; the rank's share of the returned state, whose sum over the ranks of axis_name is the
        state (meaningless if entry is given, but differentiable); and the state [B, H, K, V]
        float32 that entered this rank.
    """
    return _on_rank(
        Entry.KEPT if entry is None else Entry.GIVEN, entry, q, k, v, decay, beta, segments,
        initial_state, default_initial_state, final_state, a_log, dt_bias, lower_bound,
        qk_l2norm, None, axis_name, state_policy, True, implementation,
    )  # fmt: skip


def _on_rank(
    use, entry, q, k, v, decay, beta, segments, initial_state, default_initial_state, final_state,
    a_log, dt_bias, lower_bound, qk_l2norm, scale, axis_name, state_policy, rank_io_in_vmem,
    implementation,
):  # fmt: skip
    """See `kda_on_rank`."""
    checks.check(
        q, k, v, decay, beta, segments,
        initial_state=initial_state, default_initial_state=default_initial_state,
        final_state=final_state, a_log=a_log, dt_bias=dt_bias, lower_bound=lower_bound,
        scale=scale, state_policy=state_policy, axis_name=axis_name,
    )  # fmt: skip
    name = choose(implementation, q)
    if segments is None:
        segments = whole_row(q.shape[0], q.shape[2], axis_name)
    many_ranks = axis_name is not None and jax.lax.axis_size(axis_name) > 1
    final = FinalState(final_state)
    problem = Problem(
        gate=_gate(a_log, lower_bound),
        lower_bound=lower_bound,
        l2norm=bool(qk_l2norm),
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        axis_name=axis_name if many_ranks else None,
        final_state=final,
        state_policy=StatePolicy(state_policy),
        max_segments=segments.max_segments if final is FinalState.ALL else None,
        rank_io_in_vmem=rank_io_in_vmem,
        entry=use,
    )
    a_log, dt_bias = _gate_parameters(q, a_log, dt_bias)
    inputs = Inputs(q, k, v, decay, beta, initial_state, default_initial_state, a_log, dt_bias)
    return _attend(name, problem, inputs, segments, entry, axis_name)


def _attend(name: str, problem: Problem, inputs: Inputs, segments: Segments, entry, axis_name):
    """The core on whole chunks of tokens, typed as varying over the ranks; the recurrence, which
    generation runs a token at a time, needs no chunks."""
    length = inputs.q.shape[2]
    extra = 0 if name == "recurrent" else -length % CHUNK
    inputs, segments = _pad(inputs, extra), pad_tokens(segments, extra)
    axes = varying_axes((inputs, segments)) | ({axis_name} if axis_name else set())
    inputs, segments, entry = vary((inputs, segments, entry), axes)
    out, state, entry = _core(name, problem, inputs, segments, entry)
    if problem.final_state is FinalState.ALL:
        state = jnp.where(segments.overflow[..., None, None, None], jnp.nan, state)
    return out[:, :, :length], state, entry


def _gate_parameters(q: jax.Array, a_log, dt_bias):
    """Both in float32; dt_bias is 0 if only a_log is given."""
    if a_log is None:
        return None, None
    if dt_bias is None:
        dt_bias = jnp.zeros((q.shape[1], q.shape[3]))
    return a_log.astype(jnp.float32), dt_bias.astype(jnp.float32)


def _gate(a_log, lower_bound) -> Gate:
    if a_log is None:
        return Gate.GIVEN
    return Gate.SOFTPLUS if lower_bound is None else Gate.BOUNDED


def _pad(inputs: Inputs, extra: int) -> Inputs:
    """The same inputs with `extra` zero tokens at the end."""
    if extra == 0:
        return inputs
    tokens = {}
    for name in ("q", "k", "v", "decay", "beta"):
        x = getattr(inputs, name)
        tokens[name] = jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0))[: x.ndim])
    return inputs._replace(**tokens)


def _backend(name: str) -> ModuleType:
    """The backend's module, imported on first use so that CPU runs never load Pallas."""
    modules = {"mosaic_tpu": "tpu", "chunked": "chunked", "recurrent": "recurrent"}
    return importlib.import_module(f"kernels.kda.{modules[name]}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
@jax.named_scope("kda_forward")
def _core(name: str, problem: Problem, inputs: Inputs, segments: Segments, entry):
    return _backend(name).forward(problem, inputs, segments, entry)[:3]


@jax.named_scope("kda_forward")
def _core_forward(name, problem, inputs, segments, entry):
    *results, residuals = _backend(name).forward(problem, inputs, segments, entry)
    return tuple(results), (inputs, segments, residuals)


@jax.named_scope("kda_backward")
def _core_backward(name, problem, saved, cotangents):
    inputs, segments, residuals = saved
    d_out, d_final, _ = cotangents
    d_inputs = _backend(name).backward(problem, inputs, segments, residuals, d_out, d_final)
    return d_inputs, None, None


_core.defvjp(_core_forward, _core_backward)
