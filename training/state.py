"""The training state: everything that the next step depends on, as one pytree."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.config import ModelConfig
from model.decoder import carry_shardings, init_carry
from model.params import init_params, param_shardings


class TrainState(NamedTuple):
    """All arrays are on the mesh; parameters, optimizer and recurrent state are float32."""

    step: jax.Array  # int32 [], steps done, including skipped ones
    params: Any
    opt_state: Any
    carry: Any  # recurrent state from which the next rows of the streams start
    skipped: jax.Array  # int32 [], steps whose update was skipped
    recent: jax.Array  # float32 [spike_window], ring buffer of the last losses
    seen: jax.Array  # int32 [], losses ever written to `recent`


def state_shapes(
    cfg: ModelConfig, mesh: Mesh, optimizer: optax.GradientTransformation, rows: int, window: int
) -> TrainState:
    """The state's shapes, types and shardings as `jax.ShapeDtypeStruct`s; nothing is computed."""
    shapes = jax.eval_shape(_maker(cfg, optimizer, rows, window), 0)
    shardings = _shardings(cfg, mesh, shapes)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def init_state(
    cfg: ModelConfig,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    rows: int,
    window: int,
    seed: int,
) -> TrainState:
    """The state before the first step, created with its sharding; the same on every mesh."""
    shapes = state_shapes(cfg, mesh, optimizer, rows, window)
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    return jax.jit(_maker(cfg, optimizer, rows, window), out_shardings=shardings)(seed)


def empty_carry(cfg: ModelConfig, mesh: Mesh, rows: int) -> Callable[[], Any]:
    """Returns a compiled function that creates the carry before the first token, on the mesh."""
    return jax.jit(lambda: init_carry(cfg, rows), out_shardings=carry_shardings(cfg, mesh))


def flatten(state: Any) -> dict[str, Any]:
    """{"params/blocks/0/mixer/q": array, ...}: arrays by their path, as checkpoints name them."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def unflatten(like: Any, arrays: dict[str, Any]) -> Any:
    """The inverse of `flatten`, for a tree of the structure of `like`."""
    names = flatten(like)
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in names])


def _maker(cfg, optimizer, rows: int, window: int) -> Callable[[Any], TrainState]:
    def make(seed) -> TrainState:
        params = init_params(cfg, jax.random.key(seed))
        return TrainState(
            step=jnp.int32(0),
            params=params,
            opt_state=optimizer.init(params),
            carry=init_carry(cfg, rows),
            skipped=jnp.int32(0),
            recent=jnp.zeros(window, jnp.float32),
            seen=jnp.int32(0),
        )

    return make


def _shardings(cfg, mesh: Mesh, shapes: TrainState) -> TrainState:
    whole = NamedSharding(mesh, PartitionSpec())
    params = param_shardings(cfg, mesh)
    opt_state = _like_params(shapes.opt_state, flatten(shapes.params), flatten(params), whole)
    return jax.tree.map(lambda _: whole, shapes)._replace(
        params=params, opt_state=opt_state, carry=carry_shardings(cfg, mesh)
    )


def _like_params(opt_state, params: dict[str, Any], shardings: dict[str, Any], whole) -> Any:
    """Shardings of the optimizer's arrays: moments like their parameters, counts replicated.

    A moment's path ends with its parameter's path, whatever optax wraps around it.
    """

    def sharding(path: str, leaf) -> NamedSharding:
        parts = path.split("/")
        for begin in range(1, len(parts)):
            name = "/".join(parts[begin:])
            if name in params and params[name].shape == leaf.shape:
                return shardings[name]
        return whole

    found = [sharding(path, leaf) for path, leaf in flatten(opt_state).items()]
    return jax.tree.unflatten(jax.tree.structure(opt_state), found)
