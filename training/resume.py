"""Whether a checkpoint's model and state are of this run's kind, and what else has changed since.

Data is not compared here: the loader knows what a position means and refuses one of other data.
"""

import dataclasses
from typing import Any

# What a parameter means, or how many there are. The rest of config.model is how it is computed.
MODEL = (
    "d_model",
    "pattern",
    "num_repeats",
    "ffn",
    "d_ff",
    "kda_heads",
    "key_dim",
    "value_dim",
    "gate_rank",
    "conv_kernel_size",
    "decay_gate",
    "gate_lower_bound",
    "learned_initial_state",
    "carry",
    "attention_heads",
    "attention_kv_heads",
    "attention_head_dim",
    "mla_heads",
    "mla_kv_rank",
    "mla_nope_dim",
    "mla_rope_dim",
    "mla_value_dim",
    "tie_embeddings",
    "norm_eps",
)


# What else the arrays of a training state are made of: moments, the carried inputs of the
# convolutions, carried keys and values, the losses that spikes are told by. Parameters alone can do
# without.
STATE = (
    ("optimizer", "name"),
    ("model", "compute_dtype"),
    ("model", "attention_memory"),
    ("train", "spike_window"),
)


@dataclasses.dataclass(frozen=True)
class Differences:
    """Lines "config.x.y a there, b here", by what they mean for going on."""

    model: list[str]
    state: list[str]
    other: list[str]


def differences(saved: dict[str, Any], current: dict[str, Any]) -> Differences:
    """Compares two configs as nested dicts; options unknown to either count as other."""
    found = Differences([], [], [])
    for group in sorted({*saved, *current}):
        old, new = saved.get(group, {}), current.get(group, {})
        for name in sorted({*old, *new}):
            if old.get(name) == new.get(name):
                continue
            line = f"config.{group}.{name} is {old.get(name)!r} there and {new.get(name)!r} here"
            if group == "model" and name in MODEL:
                found.model.append(line)
            elif (group, name) in STATE:
                found.state.append(line)
            else:
                found.other.append(line)
    return found
