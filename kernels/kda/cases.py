"""Random calls of `kda`, their results in float64 by the definition, and how far results differ.

For tests, and for the check of the kernels on a TPU (training/tpu_check). Nothing here compiles for
a TPU: callers jit what `call_of` returns for their devices.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.cases import error
from kernels.kda.api import kda
from kernels.kda.reference import recurrence
from kernels.segments import plan_segments

TOKENS = ("q", "k", "v", "decay", "beta")


class Case(NamedTuple):
    """Arguments of a call by name, its static options, and the cotangents of what it returns."""

    arrays: dict
    options: dict
    ids: np.ndarray  # [B, T]
    d_out: np.ndarray
    d_final: np.ndarray | None
    max_segments: int | None


def make_case(
    ids, *, heads=2, keys=16, values=16, gate="given", dtype="float32", slots=0, start=False,
    final="none", max_segments=None, decay=None, beta=None, same_keys=False, key_noise=0.0,
    positive=False, seed=0,
    **options,
) -> Case:  # fmt: skip
    """Random inputs; decay names a profile of the given gate, beta a constant, gate one of "given",
    "softplus", "bounded"; same_keys: one key, and key_noise of others; positive: q and k uniform
    from 0 to 1."""
    rng = np.random.default_rng(seed)
    rows, length = ids.shape
    token = (rows, heads, length)
    normal = rng.standard_normal
    arrays: dict[str, Any] = {
        "q": normal((*token, keys)),
        "k": normal((*token, keys)),
        "v": normal((*token, values)),
    }
    if same_keys:
        arrays["k"] = arrays["k"][:, :, :1] + key_noise * arrays["k"]
    if positive:
        arrays |= {n: rng.uniform(size=arrays[n].shape) for n in ("q", "k")}
    arrays["decay"] = _decay(rng, (*token, keys), decay or ("mild" if gate == "given" else "raw"))
    arrays["beta"] = 1 / (1 + np.exp(-normal(token))) if beta is None else np.full(token, beta)
    options = {"qk_l2norm": True, "final_state": final} | options
    if gate != "given":
        arrays["a_log"] = np.log(rng.uniform(1, 16, heads))
        arrays["dt_bias"] = rng.uniform(-8, -1.5, (heads, keys))
    if gate == "bounded":
        options["lower_bound"] = -5.0
    if slots:
        arrays["initial_state"] = 0.1 * normal((rows, slots, heads, keys, values))
    if start:
        arrays["default_initial_state"] = 0.1 * normal((heads, keys, values))
    narrow = ("q", "k", "v")
    arrays = {n: jnp.asarray(x, dtype if n in narrow else "float32") for n, x in arrays.items()}
    state = {"none": None, "last": (rows,), "all": (rows, max_segments)}[final]
    d_final = None
    if state is not None:
        d_final = np.asarray(normal((*state, heads, keys, values)), np.float32)
    rounded = jnp.asarray(normal((*token, values)), dtype)  # a cotangent has its output's dtype
    d_out = np.asarray(rounded, np.float32)
    return Case(arrays, options, ids, d_out, d_final, max_segments)


def _decay(rng, shape, profile):
    if profile == "mild":
        return -0.05 * np.abs(rng.standard_normal(shape))
    if profile == "slow":
        return -0.001 * np.abs(rng.standard_normal(shape))
    if profile == "none":
        return np.zeros(shape)
    if profile == "strong":  # forgets everything at a tenth of the tokens
        mild = -0.05 * np.abs(rng.standard_normal(shape))
        return np.where(rng.random((*shape[:3], 1)) < 0.1, -1000.0, mild)
    if profile == "ten":
        return np.full(shape, -10.0)
    if profile == "twelve":
        return np.full(shape, -12.0)
    if profile == "lower bound":
        return np.full(shape, -5.0)
    if profile == "beyond float32":  # 2^-126 passed within 16 tokens, then slow
        a = np.full(shape, -0.01)
        a[:, :, 3::16] = -90.0
        return a
    if profile == "raw":
        return rng.standard_normal(shape)
    if profile == "strong raw":
        return rng.uniform(2, 4.5, shape)
    raise ValueError(profile)


class Result(NamedTuple):
    """What a call returned, and the gradients of its arrays by name."""

    out: np.ndarray
    final: np.ndarray | None
    gradients: dict


def oracle(case: Case) -> Result:
    """The recurrence and its gradients in float64, on the host."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = {n: jnp.asarray(np.asarray(x, np.float64)) for n, x in case.arrays.items()}
        index = plan_segments(jnp.asarray(case.ids)).index
        d_out = np.asarray(case.d_out, np.float64)
        d_final = None if case.d_final is None else np.asarray(case.d_final, np.float64)
        function = _oracle(tuple(sorted(case.options.items())), case.max_segments)
        return numbers(*function(wide, index, (d_out, d_final)))


@functools.cache
def _oracle(options, max_segments):
    options = dict(options)

    def call(arrays, index):
        out, last, table = recurrence(
            **arrays,
            index=index,
            lower_bound=options.get("lower_bound"),
            l2norm=options["qk_l2norm"],
            scale=options.get("scale") or arrays["q"].shape[-1] ** -0.5,
            table_size=max_segments or 0,
            dtype=jnp.float64,
        )
        return out, {"none": None, "last": last, "all": table}[options["final_state"]]

    def function(arrays, index, cotangents):
        return _value_and_pull(lambda arrays: call(arrays, index), arrays, cotangents)

    return jax.jit(function)


def call_of(
    options: dict[str, Any],
    names: Iterable[str],
    max_segments: int | None,
    *,
    mesh: Mesh | None = None,
    check_vma: bool = True,
    implementation: str | None = None,
) -> Callable:
    """(arrays by name, ids [B, T]) -> (out, final), to be jitted.

    Args:
        options: static ones of `kda`. names: of the arrays. mesh: its axis "context" divides T;
            None for one device.
    """
    axis = None if mesh is None else "context"
    attend: Callable = kda

    def call(arrays, ids):
        segments = plan_segments(ids, axis, max_segments)
        rest = {n: x for n, x in arrays.items() if n not in TOKENS}
        return attend(
            *(arrays[n] for n in TOKENS), segments, **rest, **options, axis_name=axis,
            implementation=implementation,
        )  # fmt: skip

    if mesh is None:
        return call
    token = P(None, None, "context")
    specs = {n: token if n in TOKENS else P() for n in names}
    final = None if options["final_state"] == "none" else P()
    return jax.shard_map(
        call, mesh=mesh, in_specs=(specs, P(None, "context")), out_specs=(token, final),
        check_vma=check_vma,
    )  # fmt: skip


def with_gradients(call: Callable) -> Callable:
    """(arrays, ids, cotangents of out and final) -> (out, final, gradients by name)."""

    def function(arrays, ids, cotangents):
        return _value_and_pull(lambda arrays: call(arrays, ids), arrays, cotangents)

    return function


def _value_and_pull(call, arrays, cotangents):
    (out, final), pull = jax.vjp(call, arrays)
    return out, final, pull(cotangents)[0]


def numbers(out, final, gradients) -> Result:
    """Results on the host, in float64."""

    def number(x):
        return None if x is None else np.asarray(x, np.float64)

    return Result(number(out), number(final), {n: number(x) for n, x in gradients.items()})


def errors(result: Result, reference: Result) -> dict[str, float]:
    """Relative errors of out, final and each gradient, by name."""
    found = {"out": error(result.out, reference.out)}
    if reference.final is not None:
        found["final"] = error(result.final, reference.final)
    return found | {n: error(x, reference.gradients[n]) for n, x in result.gradients.items()}


def limits(names: Iterable[str], bounds: dict[str, float]) -> dict[str, float]:
    """What each error may be; bounds {"out": ., "gradient": ., "decay": .} as in accuracy.py."""
    known = {"out": bounds["out"], "final": bounds["out"], "decay": bounds["decay"]}
    return {name: known.get(name, bounds["gradient"]) for name in names}


def with_narrow_decay(case: Case) -> Case:
    """The case with its log decay in bfloat16, which the kernels sum exactly in one product."""
    return case._replace(arrays=case.arrays | {"decay": case.arrays["decay"].astype("bfloat16")})


def same_bits(x: Result, y: Result) -> bool:
    """Whether outputs and states are equal."""
    pairs = ((x.out, y.out), (x.final, y.final))
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
