"""The table of parameters: initial values, shardings and masks for every parameter."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model.axes import MESH_AXES
from model.checks import check_mesh
from model.config import ModelConfig
from model.params import (
    decay_mask,
    init_params,
    muon_mask,
    param_count,
    param_shardings,
    param_specs,
    use_params,
)
from tests.compiling import fast_jit
from tests.model_cases import KDA, MIXED, make_mesh
from tests.tolerances import INITIAL_VALUES

WIDE = dataclasses.replace(MIXED, d_model=256, kda_heads=8, key_dim=32, value_dim=64, gate_rank=16)
PLAIN = {"a_log", "dt_bias", "mixer_norm", "ffn_norm", "final_norm", "output_norm", "start_state"}


def named(tree) -> dict:
    """Leaves by path; the last key of a path is the parameter's name."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def last_key(path: str) -> str:
    return path.split("'")[-2]


@pytest.fixture(scope="module")
def wide_params():
    return fast_jit(init_params, static_argnums=0)(WIDE, jax.random.key(0))


def test_every_tree_has_every_parameter(wide_params):
    trees = [
        param_specs(WIDE),
        param_shardings(WIDE, make_mesh()),
        decay_mask(WIDE),
        muon_mask(WIDE),
    ]
    for tree in trees:
        assert jax.tree.structure(tree) == jax.tree.structure(wide_params)
    for path, spec in named(param_specs(WIDE)).items():
        assert len(spec.axes) == len(spec.shape), path
        assert named(wide_params)[path].shape == spec.shape, path
        assert named(wide_params)[path].dtype == jnp.float32, path
    assert param_count(WIDE) == sum(x.size for x in jax.tree.leaves(wide_params))


def test_plain_vectors_neither_decay_nor_go_to_muon_and_all_matrices_do():
    decays, muon = named(decay_mask(WIDE)), named(muon_mask(WIDE))
    seen = set()
    for path in decays:
        name = last_key(path)
        seen.add(name)
        assert decays[path] == (name not in PLAIN), path
        assert muon[path] == (name not in PLAIN | {"embedding", "head"} and "conv" not in name), (
            path
        )
    assert seen >= PLAIN | {"embedding", "head", "q", "beta", "decay_b", "down", "k_conv"}


def flat_axes(spec) -> list[str]:
    return [axis for axes in spec for axis in (axes if isinstance(axes, tuple) else [axes]) if axis]


@pytest.mark.parametrize(
    "shape", [(1, 2, 1, 2, 2), (1, 4, 1, 2, 1), (1, 1, 1, 8, 1), (2, 1, 2, 1, 2)]
)
def test_matrices_are_cut_over_fsdp_context_and_tensor_and_vectors_over_tensor_only(shape):
    mesh = make_mesh(**dict(zip(MESH_AXES, shape)))
    for path, spec in named(param_specs(WIDE)).items():
        partition = spec.partition(mesh)
        axes = flat_axes(partition)
        assert len(set(axes)) == len(axes), path
        pieces = math.prod(mesh.shape[axis] for axis in axes)
        shard = NamedSharding(mesh, partition).shard_shape(spec.shape)  # raises where none divides
        assert math.prod(shard) * pieces == math.prod(spec.shape), path
        name = last_key(path)
        if name in {"q", "k", "v", "output", "gate", "up", "down", "embedding", "head", "decay_b"}:
            assert set(axes) == {"fsdp", "expert", "context", "tensor"}, path
        elif name in PLAIN or "conv" in name:
            assert set(axes) <= {"tensor"}, path


def test_a_matrix_is_cut_along_whichever_axes_divide():
    mesh = make_mesh(fsdp=2, context=4)
    axes = ("repeats", "width", "ffn")
    cut = {(5, 16, 3): (None, ("fsdp", "expert", "context"), "tensor"),
           (5, 6, 16): (None, None, ("tensor", "fsdp", "expert", "context")),
           (5, 6, 12): (None, ("fsdp", "expert"), ("tensor", "context")),
           (8, 3, 5): (None, "expert", "tensor")}  # fmt: skip
    for shape, expected in cut.items():
        spec = dataclasses.replace(param_specs(WIDE)["blocks"][0]["ffn"]["up"], shape=shape)
        assert spec.axes == axes
        assert spec.partition(mesh) == PartitionSpec(*expected), shape


def test_initial_values_are_those_of_the_sources(wide_params):
    mixer = wide_params["blocks"][0]["mixer"]
    rate = np.exp(mixer["a_log"])
    assert 1 <= rate.min() < 4 and 12 < rate.max() <= 16
    step = np.log1p(np.exp(np.asarray(mixer["dt_bias"], np.float64)))
    assert 0.001 * 0.99 < step.min() < 0.0015 and 0.07 < step.max() < 0.1 * 1.01
    assert np.median(step) == pytest.approx(0.01, rel=0.3)  # log-uniform
    assert np.std(mixer["q"]) == pytest.approx(WIDE.init_std, rel=0.02)
    residual = WIDE.init_std / math.sqrt(2 * WIDE.layers)
    assert np.std(mixer["output"]) == pytest.approx(residual, rel=0.02)
    assert np.std(wide_params["blocks"][1]["ffn"]["down"]) == pytest.approx(residual, rel=0.02)
    assert 0.49 < np.abs(mixer["v_conv"]).max() <= 0.5
    assert not mixer["start_state"].any()
    assert (mixer["output_norm"] == 1).all()


def test_no_two_parameters_start_alike(wide_params):
    blocks = wide_params["blocks"]
    assert not np.allclose(blocks[0]["ffn"]["gate"], blocks[0]["ffn"]["up"])
    assert not np.allclose(blocks[0]["ffn"]["gate"], blocks[1]["ffn"]["gate"])
    assert not np.allclose(blocks[0]["mixer"]["q"][0], blocks[0]["mixer"]["q"][1])


def test_initial_values_do_not_depend_on_mesh_or_on_other_parameters(wide_params):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    shardings = param_shardings(WIDE, mesh)
    cut = fast_jit(init_params, static_argnums=0, out_shardings=shardings)(WIDE, jax.random.key(0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, INITIAL_VALUES), cut, wide_params)
    assert cut["blocks"][0]["ffn"]["up"].addressable_shards[0].data.shape == (2, 128, 24)

    fewer = dataclasses.replace(WIDE, learned_initial_state=False, tie_embeddings=True)
    rest = named(fast_jit(init_params, static_argnums=0)(fewer, jax.random.key(0)))
    assert set(named(wide_params)) - set(rest) == {
        "['blocks'][0]['mixer']['start_state']",
        "['head']",
    }
    for path, x in rest.items():
        np.testing.assert_allclose(x, named(wide_params)[path], INITIAL_VALUES, err_msg=path)


def test_use_casts_matrices_gathers_fsdp_and_keeps_tensor(wide_params):
    cfg = dataclasses.replace(WIDE, compute_dtype="bfloat16")
    mesh = make_mesh(fsdp=2, tensor=2)
    specs = param_specs(cfg)
    params = jax.device_put(wide_params, param_shardings(cfg, mesh))
    used = named(jax.jit(lambda p: use_params(p, specs, cfg, mesh))(params))
    up, bias = used["['blocks'][0]['ffn']['up']"], used["['blocks'][0]['mixer']['dt_bias']"]
    assert up.dtype == jnp.bfloat16 and up.sharding.shard_shape(up.shape) == (2, 256, 24)
    assert bias.dtype == jnp.float32 and bias.sharding.shard_shape(bias.shape) == (2, 4, 32)
    assert used["['embedding']"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("changes", "mesh", "message"),
    [
        (
            {},
            {"tensor": 4},
            r"config.mesh.tensor=4: needs a divisor of config.model.kda_heads .2.; try 1, 2",
        ),
        ({}, {"fsdp": 3}, r"config.mesh.fsdp=3: .* config.model.d_model .32."),
        ({"gate_rank": 6}, {"fsdp": 4}, r"config.mesh.fsdp=4: .*gate_rank .6."),
        ({"d_ff": 47}, {"tensor": 2}, r"config.mesh.tensor=2: .*d_ff .47."),
        ({"attention_kv_heads": 1}, {"tensor": 2}, r"mesh.tensor=2: .*attention_kv_heads .1."),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(changes, mesh, message):
    cfg = dataclasses.replace(MIXED, **changes)
    sizes = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | mesh
    with pytest.raises(ValueError, match=message):
        check_mesh(cfg, sizes)


def test_what_a_model_does_not_have_does_not_constrain_its_mesh():
    sizes = {"data": 3, "fsdp": 2, "context": 5, "tensor": 2}
    check_mesh(dataclasses.replace(KDA, attention_kv_heads=1), sizes)
    attention = dataclasses.replace(MIXED, pattern="attention", kda_heads=1, gate_rank=3)
    check_mesh(attention, sizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": ""}, "config.model.pattern='': needs at least one mixer"),
        ({"d_model": 32.0}, "config.model.d_model=32.0: needs a value of type int"),
        ({"decay_gate": "hard"}, "config.model.decay_gate='hard': needs one of 'softplus'"),
        ({"compute_dtype": "float16"}, "config.model.compute_dtype='float16'"),
        ({"remat": "half"}, "config.model.remat='half'"),
        ({"kda_state_policy": "drop"}, "config.model.kda_state_policy='drop'"),
        ({"num_repeats": 0}, "config.model.num_repeats=0: needs a number >= 1"),
        ({"conv_kernel_size": 1}, "config.model.conv_kernel_size=1: needs a number >= 2"),
        ({"norm_eps": 0.0}, "config.model.norm_eps=0.0"),
        (
            {"decay_gate": "bounded", "gate_lower_bound": -6.0},
            "config.model.gate_lower_bound=-6.0",
        ),
        ({"attention_kv_heads": 3}, "config.model.attention_kv_heads=3: needs a divisor of"),
    ],
)
def test_an_impossible_model_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(KDA, **changes)


def test_vocabulary_is_padded_to_whole_lanes():
    sizes = [ModelConfig(vocab_size=n).padded_vocab_size for n in (1, 128, 129, 258)]
    assert sizes == [128, 128, 256, 384]
