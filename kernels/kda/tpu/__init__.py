"""The TPU backend: `forward` and `backward` of problem.py with Pallas kernels.

layout.py         converts heads, channels and segments to the kernels' layout and back
forward_call.py   one kernel: forward_kernel.py, forward_steps.py
backward_call.py  the same walk in reverse: backward_kernel.py, backward_steps.py, backward_tiles.py
pair_tiles.py, plan.py, relay.py, streams.py: shared by both
"""

from kernels.kda.tpu.backward_call import backward
from kernels.kda.tpu.forward_call import forward

__all__ = ["backward", "forward"]
