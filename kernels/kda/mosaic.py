"""The TPU backend: `forward` and `backward` of problem.py by the Pallas kernels.

mosaic_layout.py    heads, channels and segments as the kernels want them, and back
mosaic_forward.py   -> forward.py, forward_steps.py     one kernel, states passed by exchange.py
mosaic_backward.py  -> backward.py, backward_steps.py   the same walk reversed
pair_tiles.py, plan.py, streams.py                      what both share
"""

from kernels.kda.mosaic_backward import backward
from kernels.kda.mosaic_forward import forward

__all__ = ["backward", "forward"]
