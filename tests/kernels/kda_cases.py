"""What the tests of `kda` share: random cases, the float64 oracle, and calls on simulated ranks."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.kda import kda
from kernels.kda.reference import recurrence
from kernels.segments import plan_segments
from tests.compiling import fast_jit

TOKENS = ("q", "k", "v", "decay", "beta")


class Case(NamedTuple):
    """Arguments of a call by name, its static options, and the cotangents of what it returns."""

    arrays: dict
    options: dict
    ids: np.ndarray  # [B, T]
    d_out: np.ndarray
    d_final: np.ndarray | None
    max_segments: int | None


def ids_of(*rows) -> np.ndarray:
    """[B, T] from rows of (length, id), e.g. ids_of([(3, 7), (2, 0)]) = [[7, 7, 7, 0, 0]]."""
    return np.array([np.repeat([i for _, i in row], [n for n, _ in row]) for row in rows], np.int32)


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
    arrays = {
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
    d_final = None if state is None else normal((*state, heads, keys, values)).astype(np.float32)
    d_out = jnp.asarray(normal((*token, values)), dtype)  # a cotangent has its output's dtype
    d_out = np.asarray(d_out, np.float32)
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
    """The recurrence and its gradients in float64."""
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(np.asarray(x, np.float64)) for n, x in case.arrays.items()}
        index = plan_segments(jnp.asarray(case.ids)).index
        d_out = np.asarray(case.d_out, np.float64)
        d_final = None if case.d_final is None else np.asarray(case.d_final, np.float64)
        function = _oracle(tuple(sorted(case.options.items())), case.max_segments)
        return _numbers(*function(wide, index, (d_out, d_final)))


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


def run(case: Case, *, ranks: int = 1, check_vma: bool = True, implementation="chunked", **more):
    """`kda` on `ranks` simulated devices, and its gradients taken outside the shard_map."""
    function = compiled(
        tuple(sorted((case.options | more).items())), tuple(case.arrays), ranks, check_vma,
        implementation, case.max_segments, True,
    )  # fmt: skip
    cotangents = jnp.asarray(case.d_out, case.arrays["v"].dtype), case.d_final
    return _numbers(*function(case.arrays, jnp.asarray(case.ids), cotangents))


def forward(case: Case, *, ranks=1, check_vma=True, implementation="chunked", **more):
    """The same without gradients."""
    function = compiled(
        tuple(sorted((case.options | more).items())), tuple(case.arrays), ranks, check_vma,
        implementation, case.max_segments, False,
    )  # fmt: skip
    return _numbers(*function(case.arrays, jnp.asarray(case.ids)), {})


@functools.cache
def compiled(options, names, ranks, check_vma, implementation, max_segments, gradients):
    """Jitted (arrays, ids, cotangents) -> (out, final, gradients), or (arrays, ids) -> (out,
    final); cached, so that cases that differ in their data only share a compilation."""
    options = dict(options)
    axis = "context" if ranks > 1 else None

    def call(arrays, ids):
        segments = plan_segments(ids, axis, max_segments)
        rest = {n: x for n, x in arrays.items() if n not in TOKENS}
        return kda(
            *(arrays[n] for n in TOKENS), segments, **rest, **options, axis_name=axis,
            implementation=implementation,
        )  # fmt: skip

    if ranks > 1:
        mesh = Mesh(np.array(jax.devices()[:ranks]), ("context",))
        token = P(None, None, "context")
        specs = {n: token if n in TOKENS else P() for n in names}
        final = None if options["final_state"] == "none" else P()
        call = jax.shard_map(
            call, mesh=mesh, in_specs=(specs, P(None, "context")), out_specs=(token, final),
            check_vma=check_vma,
        )  # fmt: skip

    def function(arrays, ids, cotangents):
        return _value_and_pull(lambda arrays: call(arrays, ids), arrays, cotangents)

    # Programs of interpreted kernels are larger, and overflow the compiler's stack like this.
    return (jax.jit if implementation == "mosaic_tpu" else fast_jit)(
        function if gradients else call
    )


def _value_and_pull(call, arrays, cotangents):
    (out, final), pull = jax.vjp(call, arrays)
    return out, final, pull(cotangents)[0]


def _numbers(out, final, gradients) -> Result:
    def number(x):
        return None if x is None else np.asarray(x, np.float64)

    return Result(number(out), number(final), {n: number(x) for n, x in gradients.items()})


def error(x, reference) -> float:
    """RMS(x - reference) / RMS(reference); the absolute RMS where the reference is zero."""
    off = np.sqrt(np.mean(np.square(np.asarray(x, np.float64) - reference)))
    size = np.sqrt(np.mean(np.square(reference)))
    return float(off / size) if size > 0 else float(off)


def check(result: Result, reference: Result, bounds: dict) -> None:
    """Compare with bounds {"out": ., "gradient": ., "decay": .}; says by how much it fails."""
    errors = {"out": error(result.out, reference.out)}
    if reference.final is not None:
        errors["final"] = error(result.final, reference.final)
    errors |= {n: error(x, reference.gradients[n]) for n, x in result.gradients.items()}
    limits = {"out": bounds["out"], "final": bounds["out"], "decay": bounds["decay"]}
    wrong = {
        n: f"{e:.1e} > {limits.get(n, bounds['gradient'])}"
        for n, e in errors.items()
        if not e <= limits.get(n, bounds["gradient"])
    }
    assert not wrong, f"{wrong}; all errors: { {n: f'{e:.1e}' for n, e in errors.items()} }"


def with_narrow_decay(case: Case) -> Case:
    """The case with its log decay in bfloat16, which the kernels sum exactly in one product."""
    return case._replace(arrays=case.arrays | {"decay": case.arrays["decay"].astype("bfloat16")})


def same_bits(x: Result, y: Result) -> bool:
    return np.array_equal(x.out, y.out) and np.array_equal(x.final, y.final)
