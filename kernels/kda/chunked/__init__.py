"""Backend "chunked": the chunked form in plain jax.numpy, for CPU and GPU, and for debugging.

One step of the walk takes a few chunks of a few chains (`layout`). It does the work that needs no
state for all of them at once, as batched matrix products, then passes the state from chunk to chunk
and computes the outputs. In addition to inputs and outputs it needs memory for one state per step
and chain. The backward is the same walk in reverse. Letters are those of `chunk_math`. In addition,
S is a chunk's entry state, P and F are the decay products from its start and to its end, and G is
the product over the whole chunk:

    p = beta k P       w = A p     u = A (beta v - X)     v_new = u - w S      kg = k F
    o = (q P) S + Aqk v_new + O       S' = G S + kg^T v_new + Z

X, O and Z are the contributions of given start states (`states`). Everything is computed in
float32, and results are rounded to the inputs' dtype.
"""

from kernels.kda.chunked.backward_pass import backward
from kernels.kda.chunked.forward_pass import forward

__all__ = ["backward", "forward"]
