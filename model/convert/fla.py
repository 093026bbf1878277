"""The format "kda": flash-linear-attention's layout."""

from model.config import ModelConfig
from model.convert.formats import (
    SAME,
    TRANSPOSED,
    Format,
    Json,
    Names,
    Part,
    needs,
)
from model.convert.kda_layers import KDA_NAMES, SWIGLU_NAMES, check_kda

_KDA: Names = {
    **KDA_NAMES,
    "decay_a": ("f_proj.0.weight", TRANSPOSED),
    "decay_b": ("f_proj.1.weight", TRANSPOSED),
    "a_log": ("A_log", SAME),
    "output_gate_a": ("g_proj.0.weight", TRANSPOSED),
    "output_gate_b": ("g_proj.1.weight", TRANSPOSED),
}


def _config(cfg: ModelConfig) -> Json:
    check_kda("kda", cfg, ("value_dim", "gate_rank"))
    return {
        "architectures": ["KDAForCausalLM"],
        "model_type": "kda",
        "attn_mode": "chunk",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff,
        "num_hidden_layers": cfg.layers,
        "num_heads": cfg.kda_heads,
        "num_v_heads": cfg.value_heads,
        "allow_neg_eigval": cfg.negative_eigenvalues,
        "lower_bound": cfg.gate_lower_bound if cfg.decay_gate == "bounded" else None,
        "head_dim": cfg.key_dim,
        "expand_v": cfg.value_dim / cfg.key_dim,
        "use_short_conv": True,
        "conv_size": cfg.conv_kernel_size,
        "hidden_act": "swish",
        "norm_eps": cfg.norm_eps,
        "initializer_range": cfg.init_std,
        "tie_word_embeddings": cfg.tie_embeddings,
    }


def _options(config: Json) -> Json:
    needs(config, attn=None, use_short_conv=True)
    bound = config.get("lower_bound", -5.0 if config.get("safe_gate") else None)
    head_dim, hidden = config["head_dim"], config["hidden_size"]
    value_dim = int(head_dim * config.get("expand_v", 1.0))
    wanted = int(hidden * (config.get("hidden_ratio") or 4) * 2 / 3)
    d_ff = config.get("intermediate_size") or -(-wanted // 256) * 256
    return {
        "d_model": hidden,
        "d_ff": d_ff,
        "pattern": "kda",
        "num_repeats": config["num_hidden_layers"],
        "kda_heads": config["num_heads"],
        "kda_value_heads": config.get("num_v_heads") or 0,
        "negative_eigenvalues": config.get("allow_neg_eigval") or False,
        "decay_gate": "softplus" if bound is None else "bounded",
        "gate_lower_bound": -5.0 if bound is None else bound,
        "key_dim": head_dim,
        "value_dim": value_dim,
        "gate_rank": value_dim,
        "conv_kernel_size": config.get("conv_size", 4),
        "norm_eps": config.get("norm_eps", 1e-6),
        "init_std": config.get("initializer_range", 0.02),
        "tie_embeddings": config.get("tie_word_embeddings", False),
    }


FLA_KDA = Format(
    name="kda",
    mixers={"kda": Part("attn", lambda cfg: _KDA)},
    ffns={"swiglu": Part("mlp", lambda cfg: SWIGLU_NAMES)},
    norms={"mixer_norm": ("attn_norm.weight", SAME), "ffn_norm": ("mlp_norm.weight", SAME)},
    embedding="model.embeddings.weight",
    # The output gate has a bias there.
    zeros={"attn.g_proj.1.bias": lambda cfg: (cfg.value_heads * cfg.value_dim,)},
    ties=True,
    config=_config,
    options=_options,
)
