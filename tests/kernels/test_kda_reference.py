"""The recurrence against a literal loop in numpy, and the "recurrent" backend against it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.cases import error, ids_of
from kernels.kda.cases import make_case, oracle
from kernels.kda.reference import log_decay, recurrence
from tests.kernels.kda_cases import check, run
from tests.kernels.test_segments import number
from tests.tolerances import KDA_BOUNDS_RECURRENT

# Ids out of order, one reused, one-token segments, padding leading, interior, trailing and inside a
# segment; a row of padding.
IDS = ids_of(
    [(1, 0), (4, 5), (2, 0), (1, 5), (1, 2), (6, 7), (3, 5), (2, 0)], [(20, 0)], [(12, 3), (8, 1)]
)


def loop(case, table_size):
    """Token by token over rows and heads, float64: (out, last state, states after segments)."""
    a = {n: np.asarray(x, np.float64) for n, x in case.arrays.items()}
    rows, heads, length, keys = a["q"].shape
    values = a["v"].shape[-1]
    out = np.zeros((rows, heads, length, values))
    last = np.zeros((rows, heads, keys, values))
    table = np.zeros((rows, table_size, heads, keys, values))

    def unit(x):
        return x / np.sqrt(x @ x + 1e-6)

    for b in range(rows):
        index, first = number(case.ids[b])
        for h in range(heads):

            def start(n, b=b, h=h):
                given = a.get("initial_state")
                if given is not None and n < given.shape[1]:
                    return given[b, n, h].copy()
                return (
                    a["default_initial_state"][h].copy()
                    if "default_initial_state" in a
                    else np.zeros((keys, values))
                )

            for n in range(table_size):
                table[b, n, h] = start(n)
            S = start(0)
            for t in np.flatnonzero(case.ids[b]):
                if first[t]:
                    S = start(index[t])
                q, k = unit(a["q"][b, h, t]), unit(a["k"][b, h, t])
                S = np.exp(gate(a, case.options, b, h, t))[:, None] * S
                S = S + a["beta"][b, h, t] * np.outer(k, a["v"][b, h, t] - k @ S)
                out[b, h, t] = keys**-0.5 * q @ S
                if index[t] < table_size:
                    table[b, index[t], h] = S
            last[b, h] = S
    return out, last, table


def gate(a, options, b, h, t):
    x = a["decay"][b, h, t]
    if "a_log" not in a:
        return x
    x, rate = x + a["dt_bias"][h], np.exp(a["a_log"][h])
    if "lower_bound" in options:
        return options["lower_bound"] / (1 + np.exp(-rate * x))
    return -rate * np.log1p(np.exp(x))


@pytest.mark.parametrize("gate", ["given", "softplus", "bounded"])
def test_recurrence_is_the_literal_loop(gate):
    case = make_case(
        IDS, keys=3, values=2, gate=gate, slots=2, start=True, final="all", max_segments=6
    )
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(np.asarray(x, np.float64)) for n, x in case.arrays.items()}
        index = np.stack([number(row)[0] for row in IDS])
        got = recurrence(
            **wide, index=index, lower_bound=case.options.get("lower_bound"), l2norm=True,
            scale=3**-0.5, table_size=6, dtype=jnp.float64,
        )  # fmt: skip
    for x, wanted in zip(got, loop(case, 6)):
        assert error(x, wanted) < 1e-14


def test_gradients_of_the_recurrence_are_its_slopes():
    """Central differences in float64 along one random direction for each input."""
    case = make_case(
        IDS, keys=3, values=2, gate="softplus", slots=2, start=True, final="all", max_segments=5
    )
    index = np.stack([number(row)[0] for row in IDS])
    gradients = oracle(case).gradients
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        wide = {n: np.asarray(x, np.float64) for n, x in case.arrays.items()}

        @jax.jit
        def loss(arrays):
            out, _, table = recurrence(
                **arrays, index=index, l2norm=True, scale=3**-0.5, table_size=5, dtype=jnp.float64
            )
            return jnp.sum(out * np.float64(case.d_out)) + jnp.sum(table * np.float64(case.d_final))

        for name, x in wide.items():
            step = 1e-5 * rng.standard_normal(x.shape)
            slope = (loss(wide | {name: x + step}) - loss(wide | {name: x - step})) / 2
            assert error(slope, np.sum(gradients[name] * step)) < 1e-7, name


def test_normalizing_a_zero_vector_has_a_finite_gradient():
    zero = jnp.zeros((1, 1, 2, 4))
    other = jnp.ones((1, 1, 2, 4))

    def loss(q, k):
        out, _, _ = recurrence(
            q, k, other, 0 * other, other[..., 0], np.zeros((1, 2), int), l2norm=True, scale=1.0
        )
        return jnp.sum(out)

    for gradient in jax.grad(loss, (0, 1))(zero, zero):
        assert np.all(np.isfinite(gradient))


def test_softplus_gate_at_large_inputs():
    x = jnp.asarray([-200.0, -20.0, 0.0, 20.0, 200.0])[None, None, :, None]
    wanted = -np.asarray([0.0, 2.0611536e-9, 0.6931472, 20.0, 200.0])
    np.testing.assert_allclose(log_decay(x, jnp.zeros(1))[0, 0, :, 0], wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("ranks", "check_vma", "options"),
    [
        (
            1,
            True,
            {"gate": "bounded", "slots": 2, "start": True, "final": "all", "max_segments": 6},
        ),
        (4, True, {"gate": "softplus", "slots": 1, "start": True, "final": "last"}),
        (2, False, {"slots": 3, "final": "all", "max_segments": 5}),
        (2, True, {}),
    ],
)
def test_recurrent_backend(ranks, check_vma, options):
    case = make_case(IDS, **options)
    result = run(case, ranks=ranks, check_vma=check_vma, implementation="recurrent")
    check(result, oracle(case), KDA_BOUNDS_RECURRENT)
