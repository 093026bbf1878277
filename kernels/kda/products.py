"""The matrix product that every form of KDA uses."""

import jax
import jax.numpy as jnp


def dot(x: jax.Array, y: jax.Array, contract: str = "ab") -> jax.Array:
    """Matrix product over the leading axes, accumulated in float32; float32 operands at full
    precision.

    contract names the contracted axis of each operand among its last two: "ab" contracts x's last
    with y's last but one (the plain product), "bb" both last, "aa" both last but one.
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
