"""What layers keep for their gradient: the policies of `config.model.remat`. JAX is not imported.

Each policy is a way to run the loop over layers; model/decoder.py has them by these names.
"""

POLICIES = {
    "none": "everything",
    "dots": "its matrix products; the rest is computed again",
    "full": "its input and what messages brought it; the rest is computed again",
    "offload": "the same as full, but in the host's memory",
}


def describe() -> str:
    """All policies in one sentence, for the option's help."""
    return "; ".join(f"{name}: {kept}" for name, kept in POLICIES.items()) + "."
