"""The identity of a loader's data: what must be equal for a saved position to stay valid."""

import json
from collections.abc import Sequence
from typing import Any

from data.documents import DocumentSource
from data.options import DataConfig, mixture_weights, parts_of
from data.tokenizer import Tokenizer

# JSON values by the option that determines them; several options determine "split".
Identity = dict[str, Any]


def identity_of(
    config: DataConfig, sources: Sequence[DocumentSource], tokenizer: Tokenizer, seed: int
) -> Identity:
    """Returns the identity of a loader's data.

    Documents are identified by content and order, neither by names nor by the folder. In a folder
    of text files, names matter only as far as they determine the order and what is held out.
    """
    identity: Identity = {"source": config.source, "path": sources[0].fingerprint}
    if config.mixture:
        weights, parts = mixture_weights(config), parts_of(config)
        identity = {
            "mixture": [
                [weight, part.source, source.fingerprint, source.split_fingerprint]
                for weight, part, source in zip(weights, parts, sources)
            ]
        }
    if config.mixture or config.source in ("jsonl", "parquet"):
        identity["field"] = config.field
    if config.loss_on != "text":
        identity["loss_on"] = config.loss_on
    identity |= {
        "eval_path": "separate documents" if config.eval_path else "",
        "eval_fraction": 0.0 if config.eval_path else float(config.eval_fraction),
        "split": sources[0].split_fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "packing": config.packing,
        "global_batch_size": config.global_batch_size,
        "seed": seed,
    }
    if config.packing == "whole":
        identity["sequence_length"] = config.sequence_length
        identity["packing_bins"] = config.packing_bins
    return identity


def differences(saved: Identity, given: Identity) -> list[str]:
    """Returns a line for each difference between a saved identity and this run's."""
    lines = []
    for name in dict.fromkeys([*saved, *given]):
        if saved.get(name) != given.get(name):
            was, now = json.dumps(saved.get(name)), json.dumps(given.get(name))
            lines.append(
                f"{option_of(name)}: the saved data position is for {was}, this run has {now}"
            )
    return lines


def other_documents(saved: Identity, given: Identity) -> bool:
    """Returns whether two identities are of different documents."""
    names = ("source", "path", "field", "split", "mixture")
    return any(saved.get(name) != given.get(name) for name in names)


def why_not_continue(saved: Identity, given: Identity) -> str:
    """Returns why no loader can continue from a different saved identity; "" if one can."""
    if saved["tokenizer"] != given["tokenizer"]:
        return "a model cannot continue with other ids"
    if "mixture" in saved and not other_documents(saved, given):
        return "a mixture cannot continue with other rows or another seed"
    if "whole" in (saved["packing"], given["packing"]) and not other_documents(saved, given):
        return "only packing 'stream' can be reassigned"
    return ""


def option_of(name: str) -> str:
    """Returns the option that determines a part of an identity."""
    if name == "seed":
        return "config.train.seed"
    # If the options before it are equal, only file names can have changed what is held out.
    return "config.data.path (its file names)" if name == "split" else f"config.data.{name}"
