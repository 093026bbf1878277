"""Folders of weights: exact round trips, and a one-line error for each that does not fit."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest

from checkpoints.safetensors_io import Reader, Spec, WeightsError, Writer
from model.config import ModelConfig
from model.convert.formats import ConvertError, repeated
from model.convert.registry import FORMATS
from model.params import param_shardings
from tests.model_cases import KDA, MIXED, make_mesh, make_params
from training.state import flatten
from training.weights import SpecialTokens, read_folder, write_folder

SQUARE = dataclasses.replace(KDA, key_dim=8, value_dim=8, gate_rank=8, num_repeats=3)
HYBRID = dataclasses.replace(
    SQUARE,
    pattern="kda, kda, mla, kda, mla",  # as irregular as Kimi Linear's last layers
    num_repeats=1,
    mla_heads=4,
    mla_kv_rank=20,
    mla_nope_dim=12,
    mla_rope_dim=6,
    mla_value_dim=10,
)
EXPERTS = dataclasses.replace(
    HYBRID,
    ffn="swiglu" + 4 * ", experts",
    num_experts=4,
    experts_per_token=2,
    expert_d_ff=12,
    shared_experts=2,
    router_scale=1.7,
)
REPEATED = dataclasses.replace(HYBRID, pattern="kda, mla", num_repeats=2)
TALL = dataclasses.replace(KDA, gate_rank=16, tie_embeddings=True)  # V 16, K 8: fla's alone
# What flash-linear-attention's KDA has beyond Kimi Linear's: grouped values, beta up to 2, a bound.
WIDER = dataclasses.replace(
    TALL, kda_value_heads=4, negative_eigenvalues=True, decay_gate="bounded", gate_lower_bound=-2.0
)
SHARED_OPTIONS = (
    "d_model", "d_ff", "kda_heads", "key_dim", "value_dim", "gate_rank", "vocab_size",
    "tie_embeddings", "norm_eps", "conv_kernel_size", "value_heads", "negative_eigenvalues",
    "decay_gate", "gate_lower_bound",
)  # fmt: skip
MLA_OPTIONS = tuple(name for name in ModelConfig.__dataclass_fields__ if name.startswith("mla_"))
EXPERT_OPTIONS = (
    "num_experts", "experts_per_token", "expert_d_ff", "shared_experts", "router_scale",
)  # fmt: skip
SPECIAL = SpecialTokens(bos_id=59, eos_id=60)
CASES = [("kimi_linear", cfg) for cfg in (SQUARE, HYBRID, REPEATED, EXPERTS)]
CASES += [("kda", SQUARE), ("kda", TALL), ("kda", WIDER)]


def write(folder, kind="kimi_linear", cfg=SQUARE, dtype=np.float32, mesh=None):
    params = make_params(cfg)
    if mesh is not None:
        params = jax.device_put(params, param_shardings(cfg, mesh))
    write_folder(
        str(folder), flatten(params).__getitem__, cfg, FORMATS[kind], SPECIAL, np.dtype(dtype)
    )
    return params


def read(folder, mesh=None, like=None, **options):
    options = {"compute_dtype": "float32", **options}
    return read_folder(str(folder), mesh or make_mesh(), options, like)


def compare(found, params, cfg, convert=lambda x: x):
    found, wanted = flatten(found), flatten(params)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        got, x = np.asarray(found[name]), np.asarray(x)
        if name == "embedding":
            got, x = got[: cfg.vocab_size], x[: cfg.vocab_size]
        if name == "head":
            got, x = got[:, : cfg.vocab_size], x[:, : cfg.vocab_size]
        exact = x if name.endswith(("a_log", "dt_bias")) else convert(x)
        np.testing.assert_array_equal(got, exact, err_msg=name)


@pytest.mark.parametrize(("kind", "cfg"), CASES)
@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2, "expert": 2, "tensor": 2}])
def test_a_round_trip_is_exact_on_any_mesh(tmp_path, kind, cfg, sizes):
    mesh = make_mesh(**sizes)
    params = write(tmp_path, kind, cfg, mesh=mesh)
    found, model = read(tmp_path, mesh, like=cfg)
    compare(found, params, cfg)
    shape = ("d_model", "d_ff", "kda_heads", "key_dim", "value_dim", "gate_rank", "layers")
    mla = tuple(f"mla_{name}" for name in ("heads", "kv_rank", "nope_dim", "rope_dim", "value_dim"))
    for name in (
        *shape,
        *(mla if "mla" in cfg.mixers else ()),
        *(EXPERT_OPTIONS if "experts" in cfg.ffns else ()),
        "layer_names",
        "vocab_size",
        "tie_embeddings",
        "norm_eps",
        "conv_kernel_size",
    ):
        assert getattr(model, name) == getattr(cfg, name), name
    for name, sharding in flatten(param_shardings(cfg, mesh)).items():
        assert flatten(found)[name].sharding.is_equivalent_to(sharding, flatten(found)[name].ndim)


def test_bfloat16_rounds_all_but_rates_and_biases(tmp_path):
    params = write(tmp_path, dtype=ml_dtypes.bfloat16)
    found, _ = read(tmp_path)
    compare(found, params, SQUARE, lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32))
    types = {n: e.dtype.name for n, e in Reader(str(tmp_path)).entries.items()}
    assert types["model.layers.0.self_attn.A_log"] == "float32"
    assert types["model.layers.0.self_attn.q_proj.weight"] == "bfloat16"


def test_a_tied_head_is_written_as_a_copy_where_readers_do_not_tie(tmp_path):
    cfg = dataclasses.replace(SQUARE, tie_embeddings=True)
    params = write(tmp_path, cfg=cfg)
    found, model = read(tmp_path)
    assert not model.tie_embeddings
    size = cfg.vocab_size
    np.testing.assert_array_equal(found["head"].T[:size], np.asarray(params["embedding"])[:size])


def test_special_tokens_are_written(tmp_path):
    write(tmp_path)
    found = json.loads((tmp_path / "generation_config.json").read_text())
    assert found == {"bos_token_id": 59, "eos_token_id": 60}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"decay_gate": "bounded"}, "no config.model.decay_gate='bounded'"),
        ({"learned_initial_state": True}, "no config.model.learned_initial_state=True"),
        ({"kda_value_heads": 4}, "no config.model.value_heads=4; only 2"),
        ({"negative_eigenvalues": True}, "no config.model.negative_eigenvalues=True"),
        ({"gate_rank": 0}, "has one head size; .* gate_rank=0"),
        ({"value_dim": 16}, "one head size; config.model has key_dim=8, value_dim=16"),
        ({"pattern": MIXED.pattern}, "no layer like 'attention'"),
        (
            {"pattern": "mla", "mla_rotation_base": 10000.0},
            "no config.model.mla_rotation_base=10000.0; only 0.0",
        ),
        ({"pattern": "mla", "mla_output_gate": True}, "no config.model.mla_output_gate=True"),
        ({"ffn": "experts", "shared_experts": 0}, "at least one shared expert"),
    ],
)
def test_a_model_that_the_format_lacks_is_refused(tmp_path, change, text):
    with pytest.raises(ConvertError, match=text):
        write(tmp_path, cfg=dataclasses.replace(SQUARE, **change))
    assert not list(tmp_path.iterdir())


def rewrite(folder, change) -> None:
    """A copy of the folder with changed tensors: change(dict of arrays)."""
    reader = Reader(str(folder))
    arrays = {name: reader.read(name) for name in reader.entries}
    change(arrays)
    specs = [Spec(name, x.shape, x.dtype) for name, x in arrays.items()]
    with Writer(str(folder), specs) as writer:
        for name, x in arrays.items():
            writer.add(name, x)


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda arrays: arrays.pop(Q), f"has no tensor {Q}"),
        (lambda arrays: arrays.update({"extra": arrays[Q]}), "has a tensor extra"),
        (lambda arrays: arrays.update({Q: arrays[Q][:, 1:]}), r"q_proj.*\[16, 31\].*\[16, 32\]"),
    ],
)
def test_tensors_that_do_not_fit_are_one_line(tmp_path, change, text):
    write(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(WeightsError, match=text):
        read(tmp_path)


def test_a_bias_that_we_lack_must_be_zero(tmp_path):
    write(tmp_path, "kda")
    name = "model.layers.2.attn.g_proj.1.bias"
    assert not Reader(str(tmp_path)).read(name).any()
    rewrite(tmp_path, lambda arrays: arrays.update({name: arrays[name] + 1}))
    with pytest.raises(WeightsError, match=f"{name} is not zero"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        ("kimi_linear", {"model_type": "llama"}, "model_type is 'llama'"),
        ("kimi_linear", {"hidden_size": None}, "has no 'hidden_size'"),
        ("kimi_linear", {"mlp_layer_types": ["dense", "sparse", "sparse"]}, "no 'num_experts'"),
        (
            "kimi_linear",
            {"mlp_layer_types": ["dense", "conv", "dense"]},
            "mlp_layer_types with 'conv'",
        ),
        ("kimi_linear", {"layer_types": ["linear_attention", "sliding", "x"]}, "type 'sliding'"),
        ("mla", {"q_lora_rank": 8}, "q_lora_rank=8; only None"),
        ("mla", {"num_key_value_heads": 2}, "num_key_value_heads=2; only 4"),
        ("mla", {"mla_use_nope": False}, "mla_use_nope=False; only True"),
        ("mla", {"attention_bias": True}, "attention_bias=True; only False"),
        ("kda", {"attn": {"layers": [1]}}, "config.json has attn"),
        ("kda", {"num_v_heads": 3}, "kda_value_heads=3: needs 0 or a multiple"),
        ("kda", {"use_short_conv": False}, "use_short_conv=False; only True"),
    ],
)
def test_a_config_of_another_model_is_one_line(tmp_path, kind, change, text):
    if kind == "mla":
        write(tmp_path, cfg=REPEATED)
    else:
        write(tmp_path, kind)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | change
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(ConvertError, match=text):
        read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_config_that_is_none_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=r"config\.json"):
        read(tmp_path)


def test_layers_are_divided_into_the_fewest_positions():
    """Kimi Linear's 27: the first is dense; every fourth and the last have latent attention."""
    latent, dense = {4, 8, 12, 16, 20, 24, 27}, {1}
    layers = [
        ("mla" if n in latent else "kda", "swiglu" if n in dense else "experts")
        for n in range(1, 28)
    ]
    way = repeated(layers)
    assert [len(way.prefix), len(way.pattern), way.repeats, len(way.suffix)] == [1, 4, 6, 2]
    assert [*way.prefix, *way.pattern * way.repeats, *way.suffix] == layers
    assert way.options["ffn"] == "swiglu" + ",experts" * 6
    assert repeated(layers[1:3] * 3).options == {
        "prefix": "", "pattern": "kda", "num_repeats": 6, "suffix": "", "ffn": "experts",
    }  # fmt: skip
