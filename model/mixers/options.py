"""Options of the mixers, one record each; `ModelConfig` holds them all.

Axes: K key channel, V value channel, both of a head.
"""

import dataclasses

from options import option


@dataclasses.dataclass(frozen=True)
class KdaOptions:
    """Kimi Delta Attention: `kda_heads` heads of K = key_dim, `value_heads` of V = value_dim."""

    kda_heads: int = option(
        2,
        "KDA heads; a multiple of mesh.tensor.",
        minimum=1,
        renamed_from=("heads",),
        on_resume="model",
    )
    kda_value_heads: int = option(
        0,
        "Value heads of KDA, each with its own state and gates; a multiple of kda_heads. "
        "Neighbouring value heads share the queries and keys of one KDA head. 0: as many as "
        "kda_heads.",
        minimum=0,
        on_resume="model",
    )
    key_dim: int = option(
        128, "K of a KDA head; the TPU kernels need 128.", minimum=1, on_resume="model"
    )
    value_dim: int = option(
        128, "V of a KDA head; the TPU kernels need 128.", minimum=1, on_resume="model"
    )
    gate_rank: int = option(
        128,
        "Inner size of the low-rank decay and output gates (Kimi Linear uses the head size); a "
        "multiple of mesh.fsdp. 0: gates of full rank, one matrix each.",
        minimum=0,
        on_resume="model",
    )
    conv_kernel_size: int = option(
        4,
        "Tokens that the causal convolution covers.",
        unit="tokens",
        minimum=2,
        renamed_from=("conv_width", "conv_size"),
        on_resume="model",
    )
    decay_gate: str = option(
        "softplus",
        "softplus: log decay = -exp(a_log) * softplus(x). bounded: gate_lower_bound * sigmoid(x).",
        choices=("softplus", "bounded"),
        renamed_from=("gate",),
        on_resume="model",
    )
    gate_lower_bound: float = option(
        -5.0,
        "Smallest log decay of the bounded gate; softplus does not use it.",
        unit="nepers/token",
        minimum=-5.0,
        below=0.0,
        on_resume="model",
    )
    negative_eigenvalues: bool = option(
        False,
        "Beta ranges over (0, 2) instead of (0, 1), so a token can reverse the sign of what the "
        "state holds for its key.",
        on_resume="model",
    )
    learned_initial_state: bool = option(
        False,
        "Start each document from a learned state instead of zeros.",
        renamed_from=("learned_start_state",),
        on_resume="model",
    )
    kda_implementation: str = option(
        "auto",
        "Implementation of KDA and its convolution. auto: chosen for the device. A named "
        "implementation is used, or the run fails.",
        choices=("auto", "mosaic_tpu", "chunked", "recurrent"),
    )
    kda_state_policy: str = option(
        "remat",
        "What KDA keeps for its gradient. remat: inputs and chunk states. save: more, which takes "
        "more memory and less time.",
        choices=("remat", "save"),
    )

    @property
    def value_heads(self) -> int:
        """`kda_value_heads`, where 0 means `kda_heads`."""
        return self.kda_value_heads or self.kda_heads


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Full attention: `attention_heads` query heads share `attention_kv_heads` keys and values."""

    attention_heads: int = option(
        2,
        "Query heads of an attention layer; a multiple of mesh.tensor.",
        minimum=1,
        on_resume="model",
    )
    attention_kv_heads: int = option(
        2,
        "Heads of keys and values; divides attention_heads, and is a multiple of mesh.tensor.",
        minimum=1,
        on_resume="model",
    )
    attention_head_dim: int = option(
        128, "Size of an attention head.", minimum=1, on_resume="model"
    )
    attention_block: int = option(
        512, "Tokens in a block of the online softmax.", unit="tokens", minimum=1
    )
    attention_memory: int = option(
        0,
        "Tokens whose keys and values are carried to the next row, for the document that "
        "continues there. A multiple of mesh.context. 0: attention sees only the current row.",
        unit="tokens",
        minimum=0,
        on_resume="state",
    )


@dataclasses.dataclass(frozen=True)
class MlaOptions:
    """Multi-head latent attention; attention_block and attention_memory apply to it, too."""

    mla_heads: int = option(
        2, "Heads of an MLA layer; a multiple of mesh.tensor.", minimum=1, on_resume="model"
    )
    mla_kv_rank: int = option(
        512,
        "Size of the latent from which a token's keys and values are computed.",
        minimum=1,
        on_resume="model",
    )
    mla_nope_dim: int = option(
        128, "Channels of a head's queries and of its own keys.", minimum=1, on_resume="model"
    )
    mla_rope_dim: int = option(
        64,
        "Additional query channels, whose keys all heads share; an even number if "
        "mla_rotation_base is not 0.",
        minimum=1,
        on_resume="model",
    )
    mla_value_dim: int = option(
        128,
        "Channels of a head's values; at most mla_nope_dim + mla_rope_dim.",
        minimum=1,
        on_resume="model",
    )
    mla_rotation_base: float = option(
        0.0,
        "Base of the rotary position encoding on the mla_rope_dim channels, at least 1, such as "
        "10000. 0: no rotation, as in Kimi Linear.",
        minimum=0,
        on_resume="model",
    )
    mla_output_gate: bool = option(
        False,
        "Multiply each head's result by a sigmoid, computed for each head and token from the "
        "layer's input.",
        on_resume="model",
    )
