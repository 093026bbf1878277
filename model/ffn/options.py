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
        "Experts to which each token is sent.",
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
        "Experts that process every token, stored as one SwiGLU of shared_experts * expert_d_ff "
        "columns.",
        minimum=0,
        renamed_from=("n_shared_experts", "num_shared_experts"),
        on_resume="model",
    )
    router_scale: float = option(
        1.0,
        "Sum of the weights with which a token's experts are added.",
        above=0,
        renamed_from=("routed_scaling_factor",),
        on_resume="model",
    )
    router_bias_rate: float = option(
        1e-3,
        "Change of an expert's selection bias per step: up if the expert had fewer tokens than the "
        "mean, down if it had more. 0: biases do not change.",
        minimum=0,
    )
