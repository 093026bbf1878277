"""The format "kimi_linear": the layout in which Kimi Linear is published and transformers reads."""

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

_EXPERTS: Names = {
    "router": ("gate.weight", TRANSPOSED),
    "router_bias": ("gate.e_score_correction_bias", SAME),
    **{
        f"shared/{ours}": (f"shared_experts.{theirs}", layout)
        for ours, (theirs, layout) in SWIGLU_NAMES.items()
    },
}
_OF_EXPERT: Names = {
    "gate": ("experts.{expert}.w1.weight", TRANSPOSED),
    "up": ("experts.{expert}.w3.weight", TRANSPOSED),
    "down": ("experts.{expert}.w2.weight", TRANSPOSED),
}

_KINDS = {"linear_attention": "kda", "full_attention": "mla"}  # of layer_types
_FFNS = {"dense": "swiglu", "sparse": "experts"}  # of mlp_layer_types


def _config(cfg: ModelConfig) -> Json:
    mixers, ffns = zip(*cfg.layer_names, strict=True)
    if "kda" in mixers:
        check_kda(
            "kimi_linear", cfg, ("key_dim", "value_dim", "gate_rank"), decay_gate="softplus",
            value_heads=cfg.kda_heads, negative_eigenvalues=False,
        )  # fmt: skip
    if "mla" in mixers:
        _check_mla(cfg)
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
        "mlp_layer_types": ["sparse" if ffn == "experts" else "dense" for ffn in ffns],
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
    } | (_expert_config(cfg) if "experts" in ffns else {})


def _check_mla(cfg: ModelConfig) -> None:
    for name, needed in (("mla_rotation_base", 0.0), ("mla_output_gate", False)):
        if (value := getattr(cfg, name)) != needed:
            raise ConvertError(
                f"format 'kimi_linear' has no config.model.{name}={value!r}; only {needed!r}"
            )


def _expert_config(cfg: ModelConfig) -> Json:
    if not cfg.shared_experts:
        raise ConvertError("format 'kimi_linear' has at least one shared expert")
    return {
        "num_experts": cfg.num_experts,
        "num_experts_per_token": cfg.experts_per_token,
        "num_shared_experts": cfg.shared_experts,
        "moe_intermediate_size": cfg.expert_d_ff,
        "routed_scaling_factor": cfg.router_scale,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "num_expert_group": 1,
        "topk_group": 1,
    }


def _options(config: Json) -> Json:
    linear = config.get("linear_attn_config") or {
        "head_dim": config["linear_head_dim"],
        "num_heads": config["linear_num_heads"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
    }
    layers = list(zip(_mixers(config, linear), _ffns(config), strict=True))
    experts = any(ffn == "experts" for _, ffn in layers)
    latent = any(mixer == "mla" for mixer, _ in layers)
    return {
        "d_model": config["hidden_size"],
        "d_ff": config["intermediate_size"],
        "kda_heads": linear["num_heads"],
        "key_dim": linear["head_dim"],
        "value_dim": linear["head_dim"],
        "gate_rank": linear["head_dim"],
        "conv_kernel_size": linear["short_conv_kernel_size"],
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "init_std": config.get("initializer_range", 0.02),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        **repeated(layers).options,
        **(_mla_options(config) if latent else {}),
        **(_expert_options(config) if experts else {}),
    }


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


def _ffns(config: Json) -> list[str]:
    """The feed-forward layer of every layer."""
    kinds = config.get("mlp_layer_types")
    if not kinds:
        first = config.get("first_k_dense_replace", 1)
        experts = config.get("num_experts") or config.get("num_local_experts")
        layers = range(config["num_hidden_layers"])
        kinds = ["dense" if i < first or not experts else "sparse" for i in layers]
    if unknown := set(kinds) - _FFNS.keys():
        raise ConvertError(
            f"config.json has mlp_layer_types with {min(unknown)!r}; valid: {', '.join(_FFNS)}"
        )
    return [_FFNS[kind] for kind in kinds]


def _expert_options(config: Json) -> Json:
    """Each field under its name in published files, or in transformers' own class."""
    needs(config, moe_renormalize=True, norm_topk_prob=True, moe_router_activation_func="sigmoid")
    needs(config, num_expert_group=1, n_group=1, topk_group=1, moe_layer_freq=1)

    def either(*names: str) -> int:
        if found := [config[name] for name in names if name in config]:
            return found[0]
        raise KeyError(names[0])  # `read_config` makes it one line

    return {
        "num_experts": either("num_experts", "num_local_experts"),
        "experts_per_token": either("num_experts_per_token", "num_experts_per_tok"),
        "shared_experts": either("num_shared_experts", "n_shared_experts"),
        "expert_d_ff": config["moe_intermediate_size"],
        "router_scale": config["routed_scaling_factor"],
    }


KIMI_LINEAR = Format(
    name="kimi_linear",
    mixers={"kda": Part("self_attn", lambda cfg: _KDA), "mla": Part("self_attn", lambda cfg: _MLA)},
    ffns={
        "swiglu": Part("mlp", lambda cfg: SWIGLU_NAMES),
        "experts": Part("block_sparse_moe", lambda cfg: _EXPERTS, _OF_EXPERT),
    },
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
