"""Values as a training step returns them, for tests of the meter and the loop."""

import jax
import jax.numpy as jnp


def numbers(loss=2.0, finite=True, tokens=900, attended=0.0, **others) -> dict[str, jax.Array]:
    """Scalars as `make_train_step` returns them."""
    names = ("bits_per_byte", "grad_norm", "learning_rate", "steps_skipped", "stop")
    values = dict.fromkeys(names, 0.0) | {"loss": loss, "finite": finite, "tokens": tokens}
    return {k: jnp.asarray(v) for k, v in (values | {"attended": attended} | others).items()}
