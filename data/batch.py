"""What one batch is: the contract between data, model and training.

Axes: W window (consecutive rows of the same stream inside one step), B row, T token.
"""

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Rows of packed documents. A NamedTuple is a pytree, so no JAX is needed to define it.

    The arrays are NumPy arrays inside the pipeline. The loader returns global `jax.Array`s. Every
    field has a leading window axis W.

    Row r of one batch and row r of the next belong to the same stream. The segments of a row are
    consecutive and numbered 1, 2, ...; padding (segment 0) can only follow the last segment. Every
    document consists of the begin id, its tokens and the end id.
    """

    # int32 [W, B, T]. 0 at padding.
    tokens: Any
    # int32 [W, B, T]. The next token of the same document. Targets are shifted before rows are cut
    # and sharded, so they are also correct at the last token of a row and of a rank. 0 where there
    # is no next token: at a document's end id and at padding.
    targets: Any
    # int32 [W, B, T]. 1, 2, ... in a row; 0 at padding.
    segment_ids: Any
    # int32 [W, B, T]. Position of the token in its document (in "whole" packing, in its piece); in
    # "stream" packing it continues in the next row. 0 at padding. None unless the loader was asked
    # for positions, so that a model that does not read them does not transfer them.
    positions: Any | None
    # float32 [W, B, T]. 1 where the target is a token of the same document and the loss counts it,
    # else 0.
    loss_weights: Any
    # int32 [W, B, T]. UTF-8 bytes of the target's text; 0 for begin and end ids and wherever the
    # weight is 0. Bits per byte = sum of losses in nats / ln 2 / sum(target_bytes).
    target_bytes: Any
    # bool [W, B]. Whether the row's first segment continues the last segment of the same row in
    # the previous window (in window 0: in the previous batch).
    continues: Any
