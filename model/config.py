"""What a model is: one frozen record, checked when it is made.

`train.py` builds a `ModelConfig` from `config.model`; nothing in this package sees the config.
"""

import dataclasses
import math
from collections.abc import Mapping

MIXERS = ("kda", "attention")
GATES = ("softplus", "bounded")
COMPUTE_DTYPES = ("bfloat16", "float32")
REMAT_POLICIES = ("none", "dots", "full")
STATE_POLICIES = ("remat", "save")
VOCABULARY_MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape and how it is computed.

    Sizes are in elements. `pattern` names the mixers of one repeat, in order; the decoder is
    `pattern` `num_repeats` times over, so ("kda", "kda", "kda", "attention") x 2 has eight layers.

    Raises:
        ValueError: naming the option, what was given and what is needed.
    """

    vocab_size: int
    d_model: int = 256
    pattern: tuple[str, ...] = ("kda",)
    num_repeats: int = 2
    d_ff: int = 768
    # KDA: `kda_heads` heads of K = key_dim and V = value_dim; `gate_rank` is the inner size of the
    # two low-rank gates (Kimi Linear takes the head size).
    kda_heads: int = 2
    key_dim: int = 128
    value_dim: int = 128
    gate_rank: int = 128
    conv_kernel_size: int = 4
    decay_gate: str = "softplus"
    gate_lower_bound: float = -5.0  # nepers a token; the bounded gate's floor, unused by softplus
    learned_initial_state: bool = False
    carry: bool = True
    # Attention: `attention_heads` query heads share `attention_kv_heads` keys and values.
    attention_heads: int = 2
    attention_kv_heads: int = 2
    attention_head_dim: int = 128
    attention_block: int = 512  # keys (and queries) a block of the online softmax
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    init_std: float = 0.02
    compute_dtype: str = "bfloat16"
    remat: str = "full"
    scan_layers: bool = True
    loss_chunk: int = 1024  # tokens of one rank whose logits exist at one time
    kda_implementation: str | None = None  # None: what kernels.select chooses for the device
    kda_state_policy: str = "remat"

    def __post_init__(self):
        if not self.pattern:
            raise ValueError("config.model.pattern is empty; it needs at least one layer")
        for mixer in self.pattern:
            _one_of("pattern", mixer, MIXERS)
        _one_of("decay_gate", self.decay_gate, GATES)
        _one_of("compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        _one_of("remat", self.remat, REMAT_POLICIES)
        _one_of("kda_state_policy", self.kda_state_policy, STATE_POLICIES)
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"config.model.{name} = {getattr(self, name)}; it must be >= 1")
        if self.conv_kernel_size < 2:
            raise ValueError(
                f"config.model.conv_kernel_size = {self.conv_kernel_size}; it must be >= 2"
            )
        for name in ("norm_eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"config.model.{name} = {getattr(self, name)}; it must be > 0")
        if self.decay_gate == "bounded" and not -5.0 <= self.gate_lower_bound < 0.0:
            raise ValueError(
                f"config.model.gate_lower_bound = {self.gate_lower_bound}; it must be in [-5, 0)"
            )
        if self.attention_heads % self.attention_kv_heads:
            raise ValueError(
                f"config.model.attention_kv_heads = {self.attention_kv_heads} must divide "
                f"config.model.attention_heads = {self.attention_heads}; "
                f"{divisors_text(self.attention_heads)} work"
            )

    @property
    def layers(self) -> int:
        return len(self.pattern) * self.num_repeats

    @property
    def padded_vocab_size(self) -> int:
        """The embedding table's rows: a multiple of 128, so whole lanes on any usual mesh."""
        return math.ceil(self.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


_SIZES = (
    "vocab_size",
    "d_model",
    "num_repeats",
    "d_ff",
    "kda_heads",
    "key_dim",
    "value_dim",
    "gate_rank",
    "attention_heads",
    "attention_kv_heads",
    "attention_head_dim",
    "attention_block",
    "loss_chunk",
)


def check_mesh(cfg: ModelConfig, mesh_shape: Mapping[str, int]) -> None:
    """Refuses a mesh that cannot hold the model, before anything is compiled.

    Args:
        mesh_shape: ranks of each mesh axis, e.g. `mesh.shape`.

    Raises:
        ValueError: naming config.mesh.X, the size that it must divide, and values that do.
    """
    needs = [("fsdp", "d_model", cfg.d_model), ("tensor", "d_ff", cfg.d_ff)]
    if "kda" in cfg.pattern:
        needs += [("fsdp", "gate_rank", cfg.gate_rank), ("tensor", "kda_heads", cfg.kda_heads)]
    if "attention" in cfg.pattern:
        needs += [
            ("tensor", "attention_heads", cfg.attention_heads),
            ("tensor", "attention_kv_heads", cfg.attention_kv_heads),
        ]
    needs.append(("tensor", "vocab_size (padded)", cfg.padded_vocab_size))
    for axis, name, size in needs:
        ranks = mesh_shape[axis]
        if size % ranks:
            raise ValueError(
                f"config.mesh.{axis} = {ranks} must divide config.model.{name} = {size}; "
                f"{divisors_text(size)} work"
            )


def divisors_text(size: int) -> str:
    """The divisors of size as text, the first eight of them."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return ", ".join(map(str, divisors[:8])) + (", ..." if len(divisors) > 8 else "")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"config.model.{name} = {value!r}; it must be one of {', '.join(allowed)}")
