"""What layers keep for their gradient: the policies of `config.model.remat`. Does not import JAX.

Each policy is a way to run the loop over layers; model/decoder.py implements them by name.
"""

POLICIES = {
    "none": "everything",
    "dots": "results of matrix products; the rest is recomputed",
    "full": "its input and received messages; the rest is recomputed",
    "offload": "as full, but in host memory",
}


def describe() -> str:
    """All policies in one sentence, for the help text of the option."""
    return "; ".join(f"{name}: {kept}" for name, kept in POLICIES.items()) + "."
