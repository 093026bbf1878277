"""Options of feed-forward layers, one record each; `ModelConfig` holds them all."""

import dataclasses

from options import option


@dataclasses.dataclass(frozen=True)
class ExpertOptions:
    """A mixture of experts: each token goes to `experts_per_token` of `num_experts`."""

    num_experts: int = option(
        8,
        "Experts of a layer; a multiple of mesh.expert.",
        minimum=1,
        renamed_from=("n_routed_experts", "num_local_experts"),
        on_resume="model",
    )
    experts_per_token: int = option(
        2,
        "Experts that compute a token, of num_experts.",
        minimum=1,
        renamed_from=("top_k", "num_experts_per_tok", "num_experts_per_token"),
        on_resume="model",
    )
    expert_d_ff: int = option(
        256,
        "Columns of an expert; a multiple of mesh.tensor.",
        minimum=1,
        renamed_from=("moe_intermediate_size",),
        on_resume="model",
    )
    shared_experts: int = option(
        1,
        "Experts that compute every token, together one SwiGLU of so many times expert_d_ff.",
        minimum=0,
        renamed_from=("n_shared_experts", "num_shared_experts"),
        on_resume="model",
    )
    router_scale: float = option(
        1.0,
        "Factor of a token's weights of its experts, which add up to 1 before.",
        above=0,
        renamed_from=("routed_scaling_factor",),
        on_resume="model",
    )
    router_bias_rate: float = option(
        1e-3,
        "Change of an expert's selection bias a step, up where it had fewer tokens than the mean "
        "and down where it had more; 0: biases stay.",
        minimum=0,
    )
