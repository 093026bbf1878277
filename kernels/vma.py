"""Helpers for `shard_map`'s varying-axes types (check_vma=True); no-ops without them."""

import jax
import jax.numpy as jnp


def varying_axes(tree) -> frozenset:
    """Mesh axes over which any array of the tree is typed as varying."""
    kinds = (jax.typeof(x).mat.varying for x in jax.tree.leaves(tree))
    return frozenset().union(*kinds)


def vary(tree, axes):
    """The same values, additionally typed as varying over `axes` (a name or names)."""
    axes = {axes} if isinstance(axes, str) else set(axes)

    def one(x):
        missing = tuple(sorted(axes - jax.typeof(x).mat.varying))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, tree)


def zeros_like_varying(like: jax.Array, shape, dtype=jnp.float32) -> jax.Array:
    """Zeros typed as varying over the axes that `like` varies over."""
    return vary(jnp.zeros(shape, dtype), jax.typeof(like).mat.varying)
