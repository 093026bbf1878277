"""Backend "chunked": the chunked form in plain jnp, for CPU, GPU, and to bisect with.

One step of the walk takes a few chunks of a few chains (`layout`), does what needs no state for all
of them at once as batched matrix products, passes the state from chunk to chunk, and finishes; so
the memory beside inputs and outputs is one state a step and chain. The backward is the same walk
reversed. Letters are those of `chunk_math`, and with S a chunk's entry state, P and F the decay
products from its start and to its end, and G their product over the whole chunk:

    p = beta k P       w = A p     u = A (beta v - X)     v_new = u - w S      kg = k F
    o = (q P) S + Aqk v_new + O       S' = G S + kg^T v_new + Z

X, O, Z is what given start states add (`states`). Everything runs in float32, whatever the inputs'
dtype; results are rounded to it.
"""

from kernels.kda.chunked.backward_pass import backward
from kernels.kda.chunked.forward_pass import forward

__all__ = ["backward", "forward"]
