"""The optimizer: a rule for every parameter, and what each rule does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from model.axes import ParamSpec
from model.params import param_shardings, param_specs
from tests.model_cases import MIXED, make_mesh, make_params
from training import optimizer as training_optimizer
from training.muon import scale_by_muon
from training.optimizer import _muon, rule_names
from training.options import OptimizerOptions
from training.state import flatten, state_shapes
from training.tunables import rate, schedule_of, tunables_of

OPTIONS = OptimizerOptions(
    name="adamw",
    learning_rate=0.1,
    schedule="cosine",
    schedule_steps=100,
    warmup_steps=10,
    decay_steps=20,
    min_lr_ratio=0.1,
    clip_norm=1.0,
    weight_decay=0.5,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    muon_momentum=0.95,
)


def make_optimizer(options: OptimizerOptions, cfg, mesh) -> optax.GradientTransformation:
    return training_optimizer.make_optimizer(options, cfg, mesh, tunables_of(options, z_loss=0.0))


# What kind of parameter each name's end stands for, written down independently of the table.
NO_DECAY = ("norm", "a_log", "dt_bias", "start_state")
NEVER_MUON = (*NO_DECAY, "embedding", "head", "conv")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_has_the_rule_of_its_kind(optimizer):
    names = flatten(rule_names(optimizer, MIXED))
    params = flatten(make_params(MIXED))
    assert names.keys() == params.keys()
    for name, rule in names.items():
        decays = not name.endswith(NO_DECAY)
        muon = optimizer == "muon" and decays and not name.endswith(NEVER_MUON)
        expected = "muon" if muon else "adamw" if decays else "adamw_no_decay"
        assert rule == expected, f"{name}: {rule}"
        assert not muon or params[name].ndim == 3, "Muon takes stacks of matrices"


def updates(options: OptimizerOptions, gradients, params):
    """The first update of each parameter, by name."""
    optimizer = make_optimizer(options, MIXED, make_mesh())
    state = optimizer.init(params)
    change, _ = jax.jit(optimizer.update)(gradients, state, params)
    return jax.device_get(flatten(change))


@pytest.fixture(scope="module")
def tree():
    """(gradients, parameters); the gradient's global norm is far above 1."""
    params = make_params(MIXED)
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    gradients = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), params)
    return gradients, params


def test_adamw_is_adams_first_step_and_decay_where_it_applies(tree):
    """Bias-corrected, Adam's first step is the gradient's sign, however large the gradient."""
    options = dataclasses.replace(OPTIONS, warmup_steps=0, eps=1e-15)
    found, params = updates(options, *tree), jax.device_get(flatten(tree[1]))
    for name, gradient in jax.device_get(flatten(tree[0])).items():
        decay = 0.0 if name.endswith(NO_DECAY) else 0.5
        expected = -0.1 * (np.sign(gradient) + decay * params[name])
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_muon_orthogonalises_each_layers_matrix(tree):
    """Each layer's update has singular values near 0.2 sqrt(max(in, out)), decay left out."""
    options = dataclasses.replace(OPTIONS, name="muon", warmup_steps=0, weight_decay=0.0)
    found = updates(options, *tree)
    names = [n for n, rule in flatten(rule_names("muon", MIXED)).items() if rule == "muon"]
    assert names
    for name in names:
        for layer in found[name]:
            scale = 0.1 * 0.2 * np.sqrt(max(layer.shape))
            values = np.linalg.svd(layer, compute_uv=False) / scale
            # Five Newton-Schulz steps leave them between about 0.7 and 1.2; few are cut off small.
            assert np.median(values) == pytest.approx(1.0, abs=0.35), name
            assert values.max() < 1.4, name


def test_gradients_are_clipped_by_their_global_norm(tree):
    """A gradient 1e6 times larger gives the same update once it is clipped."""
    gradients, params = tree
    options = dataclasses.replace(OPTIONS, warmup_steps=0, eps=1e-3)
    large = jax.tree.map(lambda g: 1e6 * g, gradients)
    found, expected = updates(options, large, params), updates(options, gradients, params)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)
    small = jax.tree.map(lambda g: 1e-6 * g, gradients)
    other = updates(options, small, params)["embedding"]
    assert np.abs(other - expected["embedding"]).max() > 1e-3, "eps shows in small gradients"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_lie_where_their_parameters_do(optimizer):
    mesh = make_mesh(fsdp=2, tensor=2)
    options = dataclasses.replace(OPTIONS, name=optimizer)
    shapes = state_shapes(MIXED, mesh, make_optimizer(options, MIXED, mesh), 2, 4)
    params = flatten(shapes.params)
    moments = 0
    for path, leaf in flatten(shapes.opt_state).items():
        owners = [n for n in params if path.endswith("/" + n) and params[n].shape == leaf.shape]
        if leaf.ndim and "ns_coeffs" not in path:  # Newton-Schulz's numbers, whole everywhere
            assert len(owners) == 1, path
            assert leaf.sharding == params[owners[0]].sharding, path
            moments += 1
    rules = jax.tree.leaves(rule_names(optimizer, MIXED))
    assert moments == sum(1 if rule == "muon" else 2 for rule in rules)
    assert len(rules) == len(jax.tree.leaves(param_specs(MIXED)))
    assert any(s.sharding.spec != jax.P(*[None] * s.ndim) for s in params.values()), "all whole"
    assert jnp.float32 == params["embedding"].dtype


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("shape", [{"context": 2}, {"fsdp": 2, "context": 2, "tensor": 2}])
def test_updates_of_pieces_are_those_of_whole_parameters(optimizer, shape):
    """Three matrices of a shape do not divide by two or eight ranks."""
    cfg, mesh = dataclasses.replace(MIXED, num_repeats=3), make_mesh(**shape)
    options = dataclasses.replace(OPTIONS, name=optimizer, warmup_steps=0)
    shapes = state_shapes(cfg, mesh, make_optimizer(options, cfg, mesh), 2, 4)
    params = make_params(cfg)
    gradients = jax.tree.map(jnp.cos, params)
    whole = make_optimizer(options, cfg, make_mesh())
    alone, _ = jax.jit(whole.update)(gradients, whole.init(params), params)
    rule = make_optimizer(options, cfg, mesh)
    where = jax.tree.map(lambda x: x.sharding, (shapes.params, shapes.opt_state))
    given = jax.device_put((gradients, rule.init(params), params), (*where, where[0]))
    shared, _ = jax.jit(rule.update, out_shardings=where)(*given)
    for name, update in flatten(shared).items():
        expected = flatten(alone)[name]
        np.testing.assert_allclose(update, expected, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("count", [1, 5])
def test_muon_is_optaxs(count):
    """Updates and state, by name, over some steps; optax's own is the oracle."""
    cfg = dataclasses.replace(MIXED, num_repeats=count)
    params = {n: x for n, x in flatten(make_params(cfg)).items() if n.endswith(("/q", "down"))}
    names = flatten(param_shardings(cfg, make_mesh()))
    options = dataclasses.replace(OPTIONS, name="muon", warmup_steps=0)
    ours = _muon(0.95, tunables_of(options, z_loss=0.0), {name: names[name] for name in params})
    theirs = optax.contrib.muon(
        functools.partial(rate, schedule_of(options)), beta=0.95, weight_decay=0.5,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda tree: jax.tree.map(
            lambda x: optax.contrib.MuonDimensionNumbers(1, 2), tree
        ),
    )  # fmt: skip
    states = ours.init(params), theirs.init(params)
    for step in range(3):
        gradients = jax.tree.map(lambda x, step=step: jnp.cos(100 * x + step), params)
        ours_now, our_state = jax.jit(ours.update)(gradients, states[0], params)
        theirs_now, their_state = jax.jit(theirs.update)(gradients, states[1], params)
        states = our_state, their_state
        for name in params:
            np.testing.assert_allclose(ours_now[name], theirs_now[name], rtol=1e-4, atol=1e-6)
    found, expected = flatten(states[0]), flatten(states[1])
    assert found.keys() == {n for n in expected if "/adam/" not in n}
    for name, leaf in found.items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("sizes", [{}, {"expert": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_muon_orthogonalises_each_experts_matrix(sizes):
    """The update of a stack [R, E, I, O] is that of its matrices one by one, on every mesh."""
    shape, mesh = (3, 4, 8, 6), make_mesh(**sizes)
    stack = jax.random.normal(jax.random.key(2), shape)
    axes = ("repeats", "experts", "width", "ffn")
    spec = ParamSpec(shape, axes, None, decays=True, cast=True, muon=True)  # type: ignore[arg-type]
    sharding = jax.NamedSharding(mesh, spec.partition(mesh))
    assert not sizes or sharding.shard_shape(shape) == (3, 2, 4, 3)

    def update(x, sharding):
        optimizer = scale_by_muon(0.95, {"w": sharding})
        return jax.jit(optimizer.update)({"w": x}, optimizer.init({"w": x}))[0]["w"]

    found = update(jax.device_put(stack, sharding), sharding)
    whole = jax.NamedSharding(make_mesh(), jax.P(None, None, None))
    expected = update(stack.reshape(-1, *shape[2:]), whole).reshape(shape)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    values = np.linalg.svd(np.asarray(expected), compute_uv=False)
    assert np.median(values) == pytest.approx(1.0, abs=0.35)
