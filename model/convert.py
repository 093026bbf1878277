"""Names and layouts of Hugging Face checkpoints: which tensor is which part of which parameter.

Two formats: "kimi_linear", as Kimi Linear is published and transformers reads it, and "kda",
flash-linear-attention's. A tensor belongs to one layer and holds matrices as (output, input); here
a parameter stacks the layers of one position of the pattern, matrices as (input, output). Nothing
in this module touches a file or a device: see export.py and training/restore.py.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from errors import UserError
from model.config import ModelConfig

Json = dict[str, Any]  # a config.json


class ConvertError(UserError):
    """One line: what the format or the model cannot express."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """theirs: our array of one layer -> theirs. ours: theirs and our shape -> our array."""

    theirs: Callable[[np.ndarray], np.ndarray]
    ours: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]


SAME = Layout(lambda x: x, lambda x, shape: x)
TRANSPOSED = Layout(lambda x: x.T, lambda x, shape: x.T)
TAPS = Layout(lambda x: x.T[:, None], lambda x, shape: x[:, 0].T)  # [W, D] <-> [D, 1, W]
FLAT = Layout(lambda x: x.reshape(-1), lambda x, shape: x.reshape(shape))
RATES = Layout(lambda x: x.reshape(1, 1, -1, 1), lambda x, shape: x.reshape(shape))


def _vocabulary(transposed: bool) -> Callable[[int], Layout]:
    """The embedding or the head, without the padding of the vocabulary, which never counts."""

    def of(size: int) -> Layout:
        def theirs(x: np.ndarray) -> np.ndarray:
            return (x.T if transposed else x)[:size]

        def ours(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
            rows = shape[-1] if transposed else shape[0]
            x = np.pad(x, ((0, rows - size), (0, 0)))
            return x.T if transposed else x

        return Layout(theirs, ours)

    return of


Names = Mapping[str, tuple[str, Layout]]  # our name -> theirs and the layout

_PROJECTIONS = {name: (f"{name}_proj.weight", TRANSPOSED) for name in ("q", "k", "v")}
_TAPS = {f"{name}_conv": (f"{name}_conv1d.weight", TAPS) for name in ("q", "k", "v")}
_KDA_SHARED = {
    **_PROJECTIONS,
    **_TAPS,
    "dt_bias": ("dt_bias", FLAT),
    "beta": ("b_proj.weight", TRANSPOSED),
    "output_norm": ("o_norm.weight", SAME),
    "output": ("o_proj.weight", TRANSPOSED),
}
_SWIGLU = {name: (f"{name}_proj.weight", TRANSPOSED) for name in ("gate", "up", "down")}


@dataclasses.dataclass(frozen=True)
class Format:
    """One published layout.

    Attributes:
        mixers, ffns: prefix inside a layer and names, by our name of the layer.
        norms: of a layer. top: parameters outside layers.
        zeros: tensors of a layer that we do not have, with their shape: written as zeros, and
            refused where they are anything else.
        ties: whether readers of the format share the embedding with the head; where not, the head
            is written as a copy, and read back as a head that is no longer tied.
        config, options: config.json of a model, and the model options of a config.json.
    """

    name: str
    mixers: Mapping[str, tuple[str, Names]]
    ffns: Mapping[str, tuple[str, Names]]
    norms: Names
    embedding: str
    zeros: Mapping[str, Callable[[ModelConfig], tuple[int, ...]]]
    ties: bool
    config: Callable[[ModelConfig], Json]
    options: Callable[[Json], Json]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a folder.

    Attributes:
        name: in the folder. path: of our parameter, as in checkpoints ("blocks/0/mixer/q").
        repeat: index of the parameter's leading axis, None outside layers.
        layout: how one becomes the other. float32: kept in float32 in every export.
    """

    name: str
    path: str
    repeat: int | None
    layout: Layout
    float32: bool = False


# These stay float32 in an export: logarithms of rates and biases lose too much in bfloat16.
_FLOAT32 = ("a_log", "dt_bias")


def tensors(fmt: Format, cfg: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of a model in this format, in the order of its layers.

    Raises:
        ConvertError: the format has no such layer.
    """
    vocabulary = _vocabulary(transposed=False)(cfg.vocab_size)
    yield Tensor(fmt.embedding, "embedding", None, vocabulary)
    for layer, (position, repeat) in enumerate(cfg.places):
        path = f"blocks/{position}"
        for ours, (theirs, layout) in fmt.norms.items():
            yield Tensor(f"model.layers.{layer}.{theirs}", f"{path}/{ours}", repeat, layout)
        parts = [("mixer", _entry(fmt, fmt.mixers, cfg.mixers[position]))]
        parts += [("ffn", _entry(fmt, fmt.ffns, cfg.ffns[position]))]
        for kind, (prefix, names) in parts:
            for ours, (theirs, layout) in names.items():
                name, full = f"model.layers.{layer}.{prefix}.{theirs}", f"{path}/{kind}/{ours}"
                yield Tensor(name, full, repeat, layout, ours in _FLOAT32)
    yield Tensor("model.norm.weight", "final_norm", None, SAME)
    if not cfg.tie_embeddings:
        head = _vocabulary(transposed=True)(cfg.vocab_size)
        yield Tensor("lm_head.weight", "head", None, head)
    elif not fmt.ties:
        yield Tensor("lm_head.weight", "embedding", None, vocabulary)


def zero_tensors(fmt: Format, cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of the format, by name, that this model has only as zeros, and their shapes."""
    return {
        f"model.layers.{layer}.{name}": shape(cfg)
        for layer in range(cfg.layers)
        for name, shape in fmt.zeros.items()
    }


def _entry(fmt: Format, table: Mapping[str, tuple[str, Names]], name: str) -> tuple[str, Names]:
    if name not in table:
        raise ConvertError(
            f"format {fmt.name!r} has no layer like {name!r}; it has {', '.join(table)}"
        )
    return table[name]


def _check_kda(fmt: str, cfg: ModelConfig, sizes: tuple[str, ...]) -> None:
    """Refuses KDA options that the formats lack."""
    if cfg.decay_gate != "softplus":
        raise ConvertError(
            f"format {fmt!r} has no config.model.decay_gate={cfg.decay_gate!r}; only 'softplus'"
        )
    if cfg.learned_initial_state:
        raise ConvertError(f"format {fmt!r} has no learned initial state of KDA layers")
    given = {name: getattr(cfg, name) for name in sizes}
    if len(set(given.values())) > 1:
        text = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ConvertError(f"format {fmt!r} has one head size; config.model has {text}")


def _kimi_config(cfg: ModelConfig) -> Json:
    _check_kda("kimi_linear", cfg, ("key_dim", "value_dim", "gate_rank"))
    numbers = range(1, cfg.layers + 1)
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff,
        "num_hidden_layers": cfg.layers,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": False,
        "initializer_range": cfg.init_std,
        "mlp_layer_types": ["dense"] * cfg.layers,
        "linear_attn_config": {
            "kda_layers": list(numbers),
            "full_attn_layers": [],
            "head_dim": cfg.key_dim,
            "num_heads": cfg.kda_heads,
            "short_conv_kernel_size": cfg.conv_kernel_size,
        },
    }


def _kimi_options(config: Json) -> Json:
    linear = config.get("linear_attn_config") or {
        "head_dim": config["linear_head_dim"],
        "num_heads": config["linear_num_heads"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
    }
    layers = config["num_hidden_layers"]
    attention = linear.get("full_attn_layers") or [
        i + 1 for i, kind in enumerate(config.get("layer_types") or []) if kind == "full_attention"
    ]
    if attention:
        raise ConvertError(f"layer {attention[0] - 1} is multi-head latent attention, not KDA")
    if set(config.get("mlp_layer_types") or _dense_layers(config)) != {"dense"}:
        raise ConvertError("it has layers with experts; only dense ones are supported")
    return {
        "d_model": config["hidden_size"],
        "d_ff": config["intermediate_size"],
        "pattern": "kda",
        "num_repeats": layers,
        "kda_heads": linear["num_heads"],
        "key_dim": linear["head_dim"],
        "value_dim": linear["head_dim"],
        "gate_rank": linear["head_dim"],
        "conv_kernel_size": linear["short_conv_kernel_size"],
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "init_std": config.get("initializer_range", 0.02),
        "tie_embeddings": config.get("tie_word_embeddings", False),
    }


def _dense_layers(config: Json) -> list[str]:
    first = config.get("first_k_dense_replace", 1)
    experts = config.get("num_experts") or config.get("num_local_experts")
    layers = config["num_hidden_layers"]
    return ["dense" if i < first or not experts else "sparse" for i in range(layers)]


def _fla_config(cfg: ModelConfig) -> Json:
    _check_kda("kda", cfg, ("value_dim", "gate_rank"))
    return {
        "architectures": ["KDAForCausalLM"],
        "model_type": "kda",
        "attn_mode": "chunk",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff,
        "num_hidden_layers": cfg.layers,
        "num_heads": cfg.kda_heads,
        "head_dim": cfg.key_dim,
        "expand_v": cfg.value_dim / cfg.key_dim,
        "use_short_conv": True,
        "conv_size": cfg.conv_kernel_size,
        "hidden_act": "swish",
        "norm_eps": cfg.norm_eps,
        "initializer_range": cfg.init_std,
        "tie_word_embeddings": cfg.tie_embeddings,
    }


def _fla_options(config: Json) -> Json:
    for name, needed in (("attn", None), ("allow_neg_eigval", False), ("safe_gate", False)):
        if config.get(name, needed) not in (needed, None):
            raise ConvertError(f"config.json has {name}={config[name]!r}; only {needed} works")
    heads = config["num_heads"]
    if config.get("num_v_heads") not in (None, heads):
        raise ConvertError(f"num_v_heads={config['num_v_heads']}; only {heads}, as key heads")
    if not config.get("use_short_conv", True):
        raise ConvertError("use_short_conv=False; KDA has a short convolution here")
    head_dim, hidden = config["head_dim"], config["hidden_size"]
    value_dim = int(head_dim * config.get("expand_v", 1.0))
    wanted = int(hidden * (config.get("hidden_ratio") or 4) * 2 / 3)
    d_ff = config.get("intermediate_size") or -(-wanted // 256) * 256
    return {
        "d_model": hidden,
        "d_ff": d_ff,
        "pattern": "kda",
        "num_repeats": config["num_hidden_layers"],
        "kda_heads": heads,
        "key_dim": head_dim,
        "value_dim": value_dim,
        "gate_rank": value_dim,
        "conv_kernel_size": config.get("conv_size", 4),
        "norm_eps": config.get("norm_eps", 1e-6),
        "init_std": config.get("initializer_range", 0.02),
        "tie_embeddings": config.get("tie_word_embeddings", False),
    }


KIMI_LINEAR = Format(
    name="kimi_linear",
    mixers={
        "kda": (
            "self_attn",
            {
                **_KDA_SHARED,
                "decay_a": ("f_a_proj.weight", TRANSPOSED),
                "decay_b": ("f_b_proj.weight", TRANSPOSED),
                "a_log": ("A_log", RATES),
                "output_gate_a": ("g_a_proj.weight", TRANSPOSED),
                "output_gate_b": ("g_b_proj.weight", TRANSPOSED),
            },
        )
    },
    ffns={"swiglu": ("mlp", _SWIGLU)},
    norms={
        "mixer_norm": ("input_layernorm.weight", SAME),
        "ffn_norm": ("post_attention_layernorm.weight", SAME),
    },
    embedding="model.embed_tokens.weight",
    zeros={},
    ties=False,  # transformers 5.24 initialises a missing head at random, whatever the config says
    config=_kimi_config,
    options=_kimi_options,
)

FLA_KDA = Format(
    name="kda",
    mixers={
        "kda": (
            "attn",
            {
                **_KDA_SHARED,
                "decay_a": ("f_proj.0.weight", TRANSPOSED),
                "decay_b": ("f_proj.1.weight", TRANSPOSED),
                "a_log": ("A_log", SAME),
                "output_gate_a": ("g_proj.0.weight", TRANSPOSED),
                "output_gate_b": ("g_proj.1.weight", TRANSPOSED),
            },
        )
    },
    ffns={"swiglu": ("mlp", _SWIGLU)},
    norms={"mixer_norm": ("attn_norm.weight", SAME), "ffn_norm": ("mlp_norm.weight", SAME)},
    embedding="model.embeddings.weight",
    # The output gate has a bias there.
    zeros={"attn.g_proj.1.bias": lambda cfg: (cfg.kda_heads * cfg.value_dim,)},
    ties=True,
    config=_fla_config,
    options=_fla_options,
)

FORMATS = {fmt.name: fmt for fmt in (KIMI_LINEAR, FLA_KDA)}


def read_config(config: Json, **options: Any) -> tuple[Format, ModelConfig]:
    """The format and the model of a config.json.

    Args:
        options: of `ModelConfig`, beside or instead of what the file says (such as compute_dtype).

    Raises:
        ConvertError: another model, a missing field, or something that the model lacks.
    """
    kind = config.get("model_type")
    if kind not in FORMATS:
        raise ConvertError(f"model_type is {kind!r}; supported: {', '.join(FORMATS)}")
    try:
        found = FORMATS[kind].options(config) | {"vocab_size": config["vocab_size"]}
    except KeyError as error:
        raise ConvertError(f"config.json has no {error.args[0]!r}") from None
    try:
        return FORMATS[kind], ModelConfig(**{**found, **options})
    except ValueError as error:
        raise ConvertError(str(error)) from None
