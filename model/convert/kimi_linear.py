""" "kimi_linear", as Kimi Linear is published and transformers reads it."""

from model.config import ModelConfig
from model.convert.formats import (
    SAME,
    TRANSPOSED,
    ConvertError,
    Format,
    Json,
    Layout,
    Names,
    Part,
    needs,
    repeated,
)
from model.convert.kda_layers import KDA_NAMES, SWIGLU_NAMES, check_kda

_RATES = Layout(lambda x: x.reshape(1, 1, -1, 1), lambda x, shape: x.reshape(shape))
_KDA: Names = {
    **KDA_NAMES,
    "decay_a": ("f_a_proj.weight", TRANSPOSED),
    "decay_b": ("f_b_proj.weight", TRANSPOSED),
    "a_log": ("A_log", _RATES),
    "output_gate_a": ("g_a_proj.weight", TRANSPOSED),
    "output_gate_b": ("g_b_proj.weight", TRANSPOSED),
}
_MLA: Names = {
    "q": ("q_proj.weight", TRANSPOSED),
    "kv_down": ("kv_a_proj_with_mqa.weight", TRANSPOSED),
    "kv_norm": ("kv_a_layernorm.weight", SAME),
    "kv_up": ("kv_b_proj.weight", TRANSPOSED),
    "output": ("o_proj.weight", TRANSPOSED),
}

_KINDS = {"linear_attention": "kda", "full_attention": "mla"}  # of layer_types


def _config(cfg: ModelConfig) -> Json:
    mixers = [cfg.mixers[position] for position, _ in cfg.places]
    if "kda" in mixers:
        check_kda("kimi_linear", cfg, ("key_dim", "value_dim", "gate_rank"))
    numbers = {name: [i + 1 for i, m in enumerate(mixers) if m == name] for name in ("kda", "mla")}
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
            "kda_layers": numbers["kda"],
            "full_attn_layers": numbers["mla"],
            "head_dim": cfg.key_dim,
            "num_heads": cfg.kda_heads,
            "short_conv_kernel_size": cfg.conv_kernel_size,
        },
        "num_attention_heads": cfg.mla_heads,
        "num_key_value_heads": cfg.mla_heads,
        "q_lora_rank": None,
        "kv_lora_rank": cfg.mla_kv_rank,
        "qk_nope_head_dim": cfg.mla_nope_dim,
        "qk_rope_head_dim": cfg.mla_rope_dim,
        "v_head_dim": cfg.mla_value_dim,
        "mla_use_nope": True,
    }


def _options(config: Json) -> Json:
    linear = config.get("linear_attn_config") or {
        "head_dim": config["linear_head_dim"],
        "num_heads": config["linear_num_heads"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
    }
    pattern, repeats = repeated(_mixers(config, linear))
    if set(config.get("mlp_layer_types") or _dense_layers(config)) != {"dense"}:
        raise ConvertError("it has layers with experts; only dense ones are supported")
    return {
        "d_model": config["hidden_size"],
        "d_ff": config["intermediate_size"],
        "pattern": ",".join(pattern),
        "num_repeats": repeats,
        "kda_heads": linear["num_heads"],
        "key_dim": linear["head_dim"],
        "value_dim": linear["head_dim"],
        "gate_rank": linear["head_dim"],
        "conv_kernel_size": linear["short_conv_kernel_size"],
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "init_std": config.get("initializer_range", 0.02),
        "tie_embeddings": config.get("tie_word_embeddings", False),
    } | (_mla_options(config) if "mla" in pattern else {})


def _mixers(config: Json, linear: Json) -> list[str]:
    """The mixer of every layer."""
    kinds = config.get("layer_types")
    if kinds:
        if unknown := set(kinds) - _KINDS.keys():
            raise ConvertError(
                f"config.json has a layer of type {min(unknown)!r}; valid: {', '.join(_KINDS)}"
            )
        return [_KINDS[kind] for kind in kinds]
    latent = set(linear.get("full_attn_layers") or ())
    layers = range(1, config["num_hidden_layers"] + 1)
    return ["mla" if layer in latent else "kda" for layer in layers]


def _mla_options(config: Json) -> Json:
    heads = config["num_attention_heads"]
    needs(config, num_key_value_heads=heads, q_lora_rank=None, mla_use_nope=True)
    needs(config, attention_bias=False)
    return {
        "mla_heads": heads,
        "mla_kv_rank": config["kv_lora_rank"],
        "mla_nope_dim": config["qk_nope_head_dim"],
        "mla_rope_dim": config["qk_rope_head_dim"],
        "mla_value_dim": config["v_head_dim"],
    }


def _dense_layers(config: Json) -> list[str]:
    first = config.get("first_k_dense_replace", 1)
    experts = config.get("num_experts") or config.get("num_local_experts")
    layers = config["num_hidden_layers"]
    return ["dense" if i < first or not experts else "sparse" for i in range(layers)]


KIMI_LINEAR = Format(
    name="kimi_linear",
    mixers={"kda": Part("self_attn", lambda cfg: _KDA), "mla": Part("self_attn", lambda cfg: _MLA)},
    ffns={"swiglu": Part("mlp", lambda cfg: SWIGLU_NAMES)},
    norms={
        "mixer_norm": ("input_layernorm.weight", SAME),
        "ffn_norm": ("post_attention_layernorm.weight", SAME),
    },
    embedding="model.embed_tokens.weight",
    zeros={},
    ties=False,  # transformers 5.24 initialises a missing head at random, whatever the config says
    config=_config,
    options=_options,
)
