"""The description of a model: one frozen record, checked when it is created, without JAX.

training/ builds a `ModelConfig` from `config.model`; nothing in this package reads the config.
"""

import dataclasses
import math
from typing import NamedTuple

import options
from model import remat
from model.ffn.options import ExpertOptions
from model.mixers.options import AttentionOptions, KdaOptions, MlaOptions
from options import option, wrong

VOCABULARY_MULTIPLE = 128


class Group(NamedTuple):
    """Positions begin to end (exclusive) of `ModelConfig.mixers`, which repeat together."""

    begin: int
    end: int
    repeats: int

    @property
    def positions(self) -> slice:
        return slice(self.begin, self.end)


@dataclasses.dataclass(frozen=True)
class ModelConfig(ExpertOptions, MlaOptions, KdaOptions, AttentionOptions):
    """A decoder's shape and how it is computed; options of its layers are in mixers/options.py and
    ffn/options.py.

    Sizes are in elements. `pattern` names the mixers of one repeat, in order; the decoder is
    `prefix`, then `pattern` `num_repeats` times over, then `suffix`, so "kda,kda,kda,attention" x 2
    has eight layers. A position is a place in prefix, pattern and suffix as one list.

    Raises:
        OptionError: naming the option, what was given and what is needed.
    """

    vocab_size: int = option(
        0, "Number of token ids; 0: the tokenizer's.", unit="ids", minimum=0, on_resume="model"
    )
    d_model: int = option(
        256,
        "Width of the residual stream; a multiple of mesh.fsdp.",
        minimum=1,
        renamed_from=("width", "hidden_size", "n_embd", "dim"),
        on_resume="model",
    )
    pattern: str = option(
        "kda",
        "Mixers of one repeat, in order, separated by commas or spaces: kda, attention, mla.",
        try_value="kda",
        on_resume="model",
    )
    prefix: str = option("", "Mixers of layers before the repeated pattern.", on_resume="model")
    suffix: str = option("", "Mixers of layers after the repeated pattern.", on_resume="model")
    num_repeats: int = option(
        2,
        "Repeats of the pattern. The number of layers is num_repeats * length of the pattern + "
        "length of prefix + length of suffix.",
        minimum=1,
        renamed_from=("repeats", "layers", "n_layers", "num_layers"),
        on_resume="model",
    )
    ffn: str = option(
        "swiglu",
        "Feed-forward layers, swiglu or experts: one name for all, or one for each mixer of "
        "prefix, pattern and suffix, in order.",
        on_resume="model",
    )
    d_ff: int = option(
        768,
        "Columns of a feed-forward layer; a multiple of mesh.tensor.",
        minimum=1,
        renamed_from=("ffn_dim", "intermediate_size"),
        on_resume="model",
    )
    carry: bool = option(
        True,
        "Start a continued row from the state at the end of the previous row. False: from an empty "
        "state.",
        on_resume="state",
    )
    tie_embeddings: bool = option(
        False, "Use the embedding's transpose as the output layer.", on_resume="model"
    )
    norm_eps: float = option(1e-5, "Added to the mean square in norms.", above=0, on_resume="model")
    init_std: float = option(0.02, "Standard deviation of initial matrices.", above=0)
    compute_dtype: str = option(
        "bfloat16",
        "Type in which layers compute. Parameters, optimizer and recurrent state are float32.",
        choices=("bfloat16", "float32"),
        on_resume="state",
        renamed_from=("dtype", "precision"),
    )
    remat: str = option(
        "full",
        f"What a layer keeps for its gradient. {remat.describe()}",
        choices=tuple(remat.POLICIES),
    )
    scan_layers: bool = option(
        True,
        "Compile one repeat of the pattern and loop over it, instead of compiling all repeats.",
    )
    loss_chunk: int = option(
        1024, "Tokens per device whose logits are in memory at a time.", unit="tokens", minimum=1
    )

    def __post_init__(self) -> None:
        options.check(self, "model")
        if self.vocab_size < 1:
            raise wrong("config.model.vocab_size", self.vocab_size, "a number >= 1", 32768)
        if not _names(self.pattern):
            raise wrong("config.model.pattern", self.pattern, "at least one mixer", "kda")
        if self.attention_heads % self.attention_kv_heads:
            raise wrong(
                "config.model.attention_kv_heads",
                self.attention_kv_heads,
                f"a divisor of config.model.attention_heads ({self.attention_heads})",
                divisors_text(self.attention_heads),
            )
        if self.experts_per_token > self.num_experts:
            needed = f"at most config.model.num_experts ({self.num_experts})"
            given = self.experts_per_token
            raise wrong("config.model.experts_per_token", given, needed, self.num_experts)
        if self.value_heads % self.kda_heads:
            raise wrong(
                "config.model.kda_value_heads",
                self.kda_value_heads,
                f"0 or a multiple of config.model.kda_heads ({self.kda_heads})",
                2 * self.kda_heads,
            )
        most = self.mla_nope_dim + self.mla_rope_dim
        if self.mla_value_dim > most:
            needed = f"at most config.model.mla_nope_dim + config.model.mla_rope_dim ({most})"
            raise wrong("config.model.mla_value_dim", self.mla_value_dim, needed, most)
        if 0 < self.mla_rotation_base < 1:
            needed = "0 (no rotation) or a number >= 1"
            raise wrong("config.model.mla_rotation_base", self.mla_rotation_base, needed, 10000.0)
        if self.mla_rotation_base and self.mla_rope_dim % 2:
            needed = "an even number if config.model.mla_rotation_base is not 0"
            even = self.mla_rope_dim + 1
            raise wrong("config.model.mla_rope_dim", self.mla_rope_dim, needed, even)
        if self.attention_memory and not self.carry:
            needed = "0 if config.model.carry is False"
            raise wrong("config.model.attention_memory", self.attention_memory, needed, 0)

    @property
    def mixers(self) -> tuple[str, ...]:
        """The names in `prefix`, `pattern` and `suffix`, one per position."""
        return _names(self.prefix) + _names(self.pattern) + _names(self.suffix)

    @property
    def ffns(self) -> tuple[str, ...]:
        """The names in `ffn`; a single name is repeated for every mixer."""
        names = _names(self.ffn)
        return names * len(self.mixers) if len(names) == 1 else names

    @property
    def groups(self) -> tuple[Group, ...]:
        """Prefix, pattern and suffix, those that have layers."""
        counts = (1, self.num_repeats, 1)
        groups, begin = [], 0
        for text, repeats in zip((self.prefix, self.pattern, self.suffix), counts, strict=True):
            end = begin + len(_names(text))
            groups.append(Group(begin, end, repeats))
            begin = end
        return tuple(group for group in groups if group.end > group.begin)

    @property
    def repeats(self) -> tuple[int, ...]:
        """How often each position occurs."""
        return tuple(g.repeats for g in self.groups for _ in range(g.begin, g.end))

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(position, repeat) of every layer, in order."""
        return tuple(
            (position, repeat)
            for group in self.groups
            for repeat in range(group.repeats)
            for position in range(group.begin, group.end)
        )

    @property
    def layer_names(self) -> tuple[tuple[str, str], ...]:
        """(mixer, feed-forward layer) of every layer, in order."""
        return tuple((self.mixers[position], self.ffns[position]) for position, _ in self.places)

    @property
    def layers(self) -> int:
        return len(self.places)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: a multiple of 128, for full lanes on any common mesh."""
        return math.ceil(self.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def residual_std(self) -> float:
        """Output projections start smaller, so the residual stream does not grow with depth."""
        return self.init_std / math.sqrt(2 * self.layers)

    @property
    def implementation(self) -> str | None:
        """`kda_implementation` as the kernels take it; None: chosen by kernels.select."""
        return None if self.kda_implementation == "auto" else self.kda_implementation


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


def divisors_text(size: int) -> str:
    """The divisors of size as text, the first eight of them."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return ", ".join(map(str, divisors[:8])) + (", ..." if len(divisors) > 8 else "")
