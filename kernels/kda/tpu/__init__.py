"""The TPU backend: `forward` and `backward` of problem.py by the Pallas kernels.

layout.py         heads, channels and segments as the kernels want them, and back
forward_call.py   -> forward.py, forward_steps.py                       one kernel
backward_call.py  -> backward.py, backward_steps.py, backward_tiles.py  the same walk reversed
pair_tiles.py, plan.py, relay.py, streams.py                            what both share
"""

from kernels.kda.tpu.backward_call import backward
from kernels.kda.tpu.forward_call import forward

__all__ = ["backward", "forward"]
