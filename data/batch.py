"""What one batch is: the contract between data, model and training.

Axes: W window (consecutive rows of the same stream inside one step), B row, T token.
"""

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Rows of packed documents. A NamedTuple is a pytree, so no JAX is needed to define it.

    The arrays are NumPy inside the pipeline and global `jax.Array`s out of the loader, where every
    field has a leading window axis W.

    Row r of one batch and row r of the next belong to the same stream. Inside a row the segments
    stand one after another, numbered 1, 2, ...; padding (segment 0) only follows the last of them.
    Every document is begin-id, its tokens, end-id.
    """

    # int32 [W, B, T]. 0 at padding.
    tokens: Any
    # int32 [W, B, T]. The token after this one in the same document, shifted before sharding and
    # before rows are cut, so it is right at a rank's and at a row's last token. 0 where there is
    # none: at a document's end-id and at padding.
    targets: Any
    # int32 [W, B, T]. 1, 2, ... in a row; 0 at padding.
    segment_ids: Any
    # int32 [W, B, T]. Place of the token in its document (in "whole" packing, in its piece); in
    # "stream" packing it is counted on in the next row. 0 at padding. None unless the loader was
    # asked for positions: a model that does not read them need not have them on its devices.
    positions: Any | None
    # float32 [W, B, T]. 1 where the target is a token of the same document and the loss counts it,
    # else 0.
    loss_weights: Any
    # int32 [W, B, T]. UTF-8 bytes of the text of the target; 0 for begin and end ids and
    # wherever the weight is 0. Bits per byte = sum of losses in nats / ln 2 / sum(target_bytes).
    target_bytes: Any
    # bool [W, B]. The row's first segment continues the last segment of this row in the window
    # before (or, in window 0, in the batch before).
    continues: Any
