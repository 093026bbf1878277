"""Refuses options that do not fit the documents or the mesh, before anything is read."""

import math
from collections.abc import Mapping

import numpy as np

from data.documents import DocumentSource
from data.options import DataConfig
from errors import UserError

ROWS = ("data", "fsdp", "expert")  # mesh axes over which rows are split


def check_mesh(config: DataConfig, mesh: Mapping[str, int]) -> None:
    """Refuses a batch size or row length that the mesh axes do not divide."""
    shards = math.prod(mesh[axis] for axis in ROWS)
    for name, given, parts, axes in (
        ("global_batch_size", config.global_batch_size, shards, "mesh.data * fsdp * expert"),
        ("sequence_length", config.sequence_length, mesh["context"], "mesh.context"),
    ):
        if given % parts:
            near = sorted({max(given // parts, 1) * parts, (given // parts + 1) * parts})
            raise UserError(
                f"config.data.{name}={given}: needs a multiple of {axes} = {parts}, such as "
                + " or ".join(str(value) for value in near)
            )


def check_documents(config: DataConfig, source: DocumentSource, mesh: Mapping[str, int]) -> None:
    """Refuses endless training with fewer documents than streams.

    Streams without documents would continue with the next epoch immediately, so all streams would
    soon read the same texts in lockstep. With a number of epochs they end, and are padded.
    """
    found = int(np.count_nonzero(source.sizes))
    if config.epochs or found >= config.global_batch_size:
        return
    shards = math.prod(mesh[axis] for axis in ROWS)
    fewer = found // shards * shards
    raise UserError(
        f"config.data.global_batch_size={config.global_batch_size}: needs at least as many "
        "training documents, or rows would read the same text at the same steps; there "
        f"{'is' if found == 1 else 'are'} {found}; "
        + (f"try --config.data.global_batch_size={fewer}, or cut" if fewer else "cut")
        + f" {'it' if found == 1 else 'them'} into more documents"
    )
