"""The matrix product that every form of KDA uses."""

import jax
import jax.numpy as jnp


def dot(x: jax.Array, y: jax.Array, contract: str = "ab") -> jax.Array:
    """Batched matrix product over the last two axes, accumulated in float32; float32 operands are
    multiplied at full precision.

    contract names the contracted axis of each operand: "ab" contracts x's last with y's second to
    last (the ordinary product), "bb" both last, "aa" both second to last.
    """
    batch = tuple(range(x.ndim - 2))
    last, other = x.ndim - 1, x.ndim - 2
    axes = {"ab": (last, other), "bb": (last, last), "aa": (other, other)}[contract]
    return jax.lax.dot_general(
        x,
        y,
        (((axes[0],), (axes[1],)), (batch, batch)),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
