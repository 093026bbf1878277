"""The TPU backend: `forward` and `backward` of problem.py by the Pallas kernels.

layout.py         heads, channels and segments as the kernels want them, and back
forward_call.py   one kernel: forward_kernel.py, forward_steps.py
backward_call.py  the same walk reversed: backward_kernel.py, backward_steps.py, backward_tiles.py
pair_tiles.py, plan.py, relay.py, streams.py: what both share
"""

from kernels.kda.tpu.backward_call import backward
from kernels.kda.tpu.forward_call import forward

__all__ = ["backward", "forward"]
