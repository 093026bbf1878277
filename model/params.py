"""The table of parameters, collected from the layers that declare them.

One `ParamSpec` a parameter: its shape, what each axis means, how it starts, whether it decays and
whether Muon may take it. Initial values, shardings and the optimizer's masks are all read from this
table, so that none of them can miss a parameter.
"""

import dataclasses
import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model import gathered
from model.axes import TOKENS, Arrays, ParamSpec, Specs, Tree, gain, matrix
from model.config import ModelConfig
from model.ffn.registry import feed_forwards_of
from model.layers import constrain
from model.mixers.registry import mixers_of


def param_specs(cfg: ModelConfig) -> Specs:
    """The table: a tree of `ParamSpec`, of the same structure as the parameters.

    "blocks" is a tuple over positions (`ModelConfig`), leaves stacked over repeats, [R, ...].
    """
    blocks = zip(cfg.repeats, block_specs(cfg), strict=True)
    specs = {
        "embedding": _embedding(cfg),
        "blocks": tuple(_stacked(repeats, specs) for repeats, specs in blocks),
        "final_norm": gain(cfg.d_model),
    }
    if not cfg.tie_embeddings:
        shape = (cfg.d_model, cfg.padded_vocab_size)
        specs["head"] = matrix(shape, ("width", "vocab"), cfg.init_std, muon=False)
    return specs


def init_params(cfg: ModelConfig, key: jax.Array) -> Arrays:
    """Initial parameters, float32; jit it with `param_shardings`.

    The same on every mesh, but for a float32 rounding or two.

    A parameter's key is made from its name: a parameter added elsewhere leaves the others alone.
    """

    def start(path, spec: ParamSpec) -> jax.Array:
        name = zlib.crc32(jax.tree_util.keystr(path).encode())
        return spec.init(jax.random.fold_in(key, name), spec.shape)

    return jax.tree_util.tree_map_with_path(start, param_specs(cfg))


def param_shardings(cfg: ModelConfig, mesh: Mesh) -> Tree:
    """Tree of `NamedSharding`, one per parameter."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec.partition(mesh)), param_specs(cfg))


def use_params(params: Tree, specs: Tree, cfg: ModelConfig, mesh: Mesh) -> Tree:
    """Parameters as layers use them: cast, then gathered over `AT_REST`, experts not over expert.

    The constraint is explicit because the compiler might otherwise divide a product's sum over
    fsdp, whose ranks hold different rows. The gradients are scattered the same way.
    """

    def use(spec: ParamSpec, param: jax.Array) -> jax.Array:
        if spec.cast:
            # Rounded first, which changes nothing: XLA would otherwise cast the matrices of all
            # layers before the loop over layers, and hold both copies throughout.
            kind = jnp.finfo(cfg.compute_dtype)
            param = jax.lax.reduce_precision(param, kind.nexp, kind.nmant)
            param = param.astype(cfg.compute_dtype)
        kept, used = spec.partition(mesh), spec.use_partition
        return _gather(NamedSharding(mesh, kept), NamedSharding(mesh, used), param)

    return jax.tree.map(use, specs, params)


def use_matrices(params: Tree, specs: Tree, cfg: ModelConfig, mesh: Mesh) -> Tree:
    """A layer's matrices as it uses them, those that are `Gathered` already and all small
    parameters as they are."""

    def use(spec: ParamSpec, param: Any) -> Any:
        if not spec.is_matrix or isinstance(param, gathered.Gathered):
            return param
        if gathered.takes(spec):
            return gathered.use(param, spec, cfg.compute_dtype, mesh)
        return use_params(param, spec, cfg, mesh)

    return jax.tree.map(use, specs, params)


def spread_params(params: Tree, specs: Tree, mesh: Mesh) -> Tree:
    """Parameters stacked over repeats [R, ...] with small ones as `copies`, one per token rank."""

    def spread(spec: ParamSpec, param: jax.Array) -> jax.Array:
        return param if spec.is_matrix else copies(param, TOKENS, spec.use_partition, mesh)

    return jax.tree.map(spread, specs, params)


def copies(x: jax.Array, axes: tuple[str, ...], spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """[R, ...] -> [R, ranks of the mesh axes, ...], each rank holding its own copy.

    The gradient of a copy is that rank's share, and all are added at once, where this is called.
    spec: how the dimensions after R are divided.
    """
    ranks = math.prod(mesh.shape[axis] for axis in axes)
    wide = jnp.broadcast_to(x[:, None], (x.shape[0], ranks, *x.shape[1:]))
    return constrain(wide, mesh, PartitionSpec(None, axes, *spec))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(kept: NamedSharding, used: NamedSharding, param: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(param, used)


def _gather_forward(kept, used, param):
    return _gather(kept, used, param), None


def _gather_backward(kept, used, _, gradient):
    """Constrained to its stored sharding, so that the compiler sums it by a reduce-scatter."""
    return (jax.lax.with_sharding_constraint(gradient, kept),)


_gather.defvjp(_gather_forward, _gather_backward)


def decay_mask(cfg: ModelConfig) -> Tree:
    """Tree of bool: whether weight decay applies."""
    return jax.tree.map(lambda spec: spec.decays, param_specs(cfg))


def muon_mask(cfg: ModelConfig) -> Tree:
    """Tree of bool: whether the last two axes are a matrix that Muon may take."""
    return jax.tree.map(lambda spec: spec.muon, param_specs(cfg))


def trained_mask(cfg: ModelConfig) -> Tree:
    """Tree of bool: whether the optimizer changes it."""
    return jax.tree.map(lambda spec: spec.trained, param_specs(cfg))


def param_count(cfg: ModelConfig) -> int:
    """Number of parameters, the vocabulary's padding included."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(cfg)))


def block_specs(cfg: ModelConfig) -> tuple[Specs, ...]:
    """The tables of the blocks, one per position, not stacked."""
    return tuple(
        {
            "mixer_norm": gain(cfg.d_model),
            "mixer": mixer.param_specs(cfg),
            "ffn_norm": gain(cfg.d_model),
            "ffn": ffn.param_specs(cfg),
        }
        for mixer, ffn in zip(mixers_of(cfg), feed_forwards_of(cfg), strict=True)
    )


def _stacked(repeats: int, tree: Specs) -> Specs:
    def stack(spec: ParamSpec) -> ParamSpec:
        shape, axes = (repeats, *spec.shape), ("repeats", *spec.axes)
        return dataclasses.replace(spec, shape=shape, axes=axes)

    return jax.tree.map(stack, tree)


def _embedding(cfg: ModelConfig) -> ParamSpec:
    """Stays float32 where it is read, so that a frequent token's gradients add up in float32."""
    shape = (cfg.padded_vocab_size, cfg.d_model)
    spec = matrix(shape, ("vocab", "width"), cfg.init_std, muon=False)
    return dataclasses.replace(spec, cast=False)
