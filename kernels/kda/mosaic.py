"""The TPU backend: `forward` and `backward` of problem.py by the Pallas kernels.

mosaic_layout.py    heads, channels and segments as the kernels want them, and back
mosaic_forward.py   -> forward.py, forward_steps.py     one kernel, states passed by exchange.py
mosaic_backward.py  -> backward.py, backward_tiles.py   the same walk reversed
pair_tiles.py, plan.py, streams.py                      what both share
"""

from kernels.kda.mosaic_forward import forward, plan_forward
from kernels.kda.mosaic_layout import (
    flat_heads,
    flat_states,
    gate_rows,
    guarded_beta,
    largest_divisor,
    last_rank,
    rows_states,
    start_states,
    tile_pieces,
    token_columns,
)

# isort: split
from kernels.kda.mosaic_backward import backward

__all__ = [
    "backward",
    "flat_heads",
    "flat_states",
    "forward",
    "gate_rows",
    "guarded_beta",
    "largest_divisor",
    "last_rank",
    "plan_forward",
    "rows_states",
    "start_states",
    "tile_pieces",
    "token_columns",
]
