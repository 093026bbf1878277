"""The table of parameters, and where every array of the model lies on the mesh.

One `ParamSpec` a parameter: its shape, what each axis means, how it starts, whether it decays and
whether Muon may take it. Initial values, shardings and the optimizer's masks are all read from this
table, so that none of them can miss a parameter.

Mesh axes: "data" and "fsdp" share out rows, "context" tokens, "tensor" heads, FFN columns and the
vocabulary. Parameters are cut over "tensor" along heads, FFN and vocabulary, and matrices over
"fsdp" and "context" along the first axis that divides. They are whole on every "data" rank.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.config import ModelConfig

MESH_AXES = ("data", "fsdp", "context", "tensor")
ROWS = ("data", "fsdp")
CONTEXT = "context"
TOKEN_SPEC = PartitionSpec(ROWS, "context")  # [B, T] and [B, T, D]

_TENSOR_AXES = ("vocab", "heads", "ffn")  # cut over "tensor", the first that a parameter has
_INNER_AXES = ("width", "gate_rank")  # a parameter with one is a matrix, cut over these as well:
_AT_REST = ("fsdp", "context")

Init = Callable[[jax.Array, tuple[int, ...]], jax.Array]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter. All are float32; they are cast where they are used.

    shape: elements along each axis. axes: what each axis is, a key of `_MESH_AXIS`.
    init: (key, shape) -> float32 array. decays: weight decay applies.
    cast: layers use it in the compute dtype; the others stay float32.
    muon: the last two axes are a matrix (input, output) that Muon may orthogonalise; a leading
    "repeats" axis stacks such matrices.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    decays: bool
    cast: bool
    muon: bool

    @property
    def use_partition(self) -> PartitionSpec:
        """Where it is used: cut over tensor only."""
        named = [axis for axis in self.axes if axis in _TENSOR_AXES][:1]
        return PartitionSpec(*("tensor" if axis in named else None for axis in self.axes))

    def partition(self, mesh: Mesh) -> PartitionSpec:
        """Where it is kept: a matrix is cut over fsdp and context, too.

        Along one axis where one divides by both, the residual width before the others; else along
        one axis each; over a mesh axis that divides none it is whole. Small parameters stay whole.
        """
        cut: list[tuple[str, ...]] = [(axis,) if axis else () for axis in self.use_partition]
        if not any(axis in _INNER_AXES for axis in self.axes):
            return self.use_partition
        places = [n for n, axis in enumerate(self.axes) if axis != "repeats"]
        places.sort(key=lambda n: self.axes[n] not in _INNER_AXES)
        if not self._cut(cut, places, _AT_REST, mesh):
            for axis in _AT_REST:
                self._cut(cut, places, (axis,), mesh)
        return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in cut))

    def _cut(self, cut, places, axes: tuple[str, ...], mesh: Mesh) -> bool:
        """Adds mesh axes to the first of the places that divides by them."""
        for n in places:
            if self.shape[n] % math.prod(mesh.shape[axis] for axis in (*cut[n], *axes)) == 0:
                cut[n] += axes
                return True
        return False


def param_specs(cfg: ModelConfig) -> dict[str, Any]:
    """The table: a tree of `ParamSpec`, of the same structure as the parameters.

    "blocks" is a tuple over the pattern's positions; its leaves are stacked over repeats, [R, ...].
    """
    specs: dict[str, Any] = {
        "embedding": _embedding(cfg),
        "blocks": tuple(
            _stacked(cfg.num_repeats, block_specs(cfg, mixer)) for mixer in cfg.pattern
        ),
        "final_norm": _gain(cfg.d_model),
    }
    if not cfg.tie_embeddings:
        shape = (cfg.d_model, cfg.padded_vocab_size)
        specs["head"] = _matrix(shape, ("width", "vocab"), cfg.init_std, muon=False)
    return specs


def init_params(cfg: ModelConfig, key: jax.Array) -> dict[str, Any]:
    """Initial parameters, float32; jit it with `param_shardings`.

    The same on every mesh, but for a float32 rounding or two.

    A parameter's key is made from its name: a parameter added elsewhere leaves the others alone.
    """

    def start(path, spec: ParamSpec) -> jax.Array:
        name = zlib.crc32(jax.tree_util.keystr(path).encode())
        return spec.init(jax.random.fold_in(key, name), spec.shape)

    return jax.tree_util.tree_map_with_path(start, param_specs(cfg))


def param_shardings(cfg: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Tree of `NamedSharding`, one a parameter."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec.partition(mesh)), param_specs(cfg))


def use_params(params: Any, specs: Any, cfg: ModelConfig, mesh: Mesh) -> Any:
    """Parameters as layers use them: cast, then gathered over fsdp and context.

    Said explicitly, because the compiler might else share out a product's sum over fsdp, whose
    ranks hold different rows. The gradients are scattered the same way.
    """

    def use(spec: ParamSpec, param: jax.Array) -> jax.Array:
        param = param.astype(cfg.compute_dtype) if spec.cast else param
        kept, used = spec.partition(mesh), spec.use_partition
        return _gather(NamedSharding(mesh, kept), NamedSharding(mesh, used), param)

    return jax.tree.map(use, specs, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(kept: NamedSharding, used: NamedSharding, param: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(param, used)


def _gather_forward(kept, used, param):
    return _gather(kept, used, param), None


def _gather_backward(kept, used, _, gradient):
    """Constrained as it is kept, so that the compiler sums it by a reduce-scatter."""
    return (jax.lax.with_sharding_constraint(gradient, kept),)


_gather.defvjp(_gather_forward, _gather_backward)


def decay_mask(cfg: ModelConfig) -> dict[str, Any]:
    """Tree of bool: whether weight decay applies."""
    return jax.tree.map(lambda spec: spec.decays, param_specs(cfg))


def muon_mask(cfg: ModelConfig) -> dict[str, Any]:
    """Tree of bool: whether the last two axes are a matrix that Muon may take."""
    return jax.tree.map(lambda spec: spec.muon, param_specs(cfg))


def param_count(cfg: ModelConfig) -> int:
    """Number of parameters, the vocabulary's padding included."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(cfg)))


def block_specs(cfg: ModelConfig, mixer: str) -> dict[str, Any]:
    """The table of one block, not stacked."""
    return {
        "mixer_norm": _gain(cfg.d_model),
        "mixer": _kda(cfg) if mixer == "kda" else _attention(cfg),
        "ffn_norm": _gain(cfg.d_model),
        "ffn": {
            "gate": _matrix((cfg.d_model, cfg.d_ff), ("width", "ffn"), cfg.init_std),
            "up": _matrix((cfg.d_model, cfg.d_ff), ("width", "ffn"), cfg.init_std),
            "down": _matrix((cfg.d_ff, cfg.d_model), ("ffn", "width"), _residual_std(cfg)),
        },
    }


def _kda(cfg: ModelConfig) -> dict[str, Any]:
    """Kimi Delta Attention's parameters, after flash-linear-attention's initialisation.

    Projections are normal with init_std; a_log = log U(1, 16); dt_bias is the inverse softplus of a
    time step log-uniform in [1e-3, 0.1], so that exp(a_log) softplus(dt_bias) forgets over one to a
    thousand tokens; convolutions are torch's default, uniform in +-W^-1/2.
    """
    width, rank = cfg.d_model, cfg.gate_rank
    keys, values = cfg.kda_heads * cfg.key_dim, cfg.kda_heads * cfg.value_dim
    std = cfg.init_std
    specs = {
        "q": _matrix((width, keys), ("width", "heads"), std),
        "k": _matrix((width, keys), ("width", "heads"), std),
        "v": _matrix((width, values), ("width", "heads"), std),
        "q_conv": _conv(cfg.conv_kernel_size, keys),
        "k_conv": _conv(cfg.conv_kernel_size, keys),
        "v_conv": _conv(cfg.conv_kernel_size, values),
        "decay_a": _matrix((width, rank), ("width", "gate_rank"), std),
        "decay_b": _matrix((rank, keys), ("gate_rank", "heads"), std),
        "a_log": _vector((cfg.kda_heads,), ("heads",), _log_uniform_rate),
        "dt_bias": _vector(
            (cfg.kda_heads, cfg.key_dim), ("heads", "whole"), _inverse_softplus_step
        ),
        "beta": _matrix((width, cfg.kda_heads), ("width", "heads"), std),
        "output_gate_a": _matrix((width, rank), ("width", "gate_rank"), std),
        "output_gate_b": _matrix((rank, values), ("gate_rank", "heads"), std),
        "output_norm": _gain(cfg.value_dim),
        "output": _matrix((values, width), ("heads", "width"), _residual_std(cfg)),
    }
    if cfg.learned_initial_state:
        shape = (cfg.kda_heads, cfg.key_dim, cfg.value_dim)
        specs["start_state"] = _vector(shape, ("heads", "whole", "whole"), _zeros)
    return specs


def _attention(cfg: ModelConfig) -> dict[str, Any]:
    width, std = cfg.d_model, cfg.init_std
    queries = cfg.attention_heads * cfg.attention_head_dim
    keys = cfg.attention_kv_heads * cfg.attention_head_dim
    return {
        "q": _matrix((width, queries), ("width", "heads"), std),
        "k": _matrix((width, keys), ("width", "heads"), std),
        "v": _matrix((width, keys), ("width", "heads"), std),
        "output": _matrix((queries, width), ("heads", "width"), _residual_std(cfg)),
    }


def _residual_std(cfg: ModelConfig) -> float:
    """Output projections start smaller: the residual stream's size does not grow with depth."""
    return cfg.init_std / math.sqrt(2 * cfg.layers)


def _stacked(repeats: int, tree: dict[str, Any]) -> dict[str, Any]:
    def stack(spec: ParamSpec) -> ParamSpec:
        shape, axes = (repeats, *spec.shape), ("repeats", *spec.axes)
        return dataclasses.replace(spec, shape=shape, axes=axes)

    return jax.tree.map(stack, tree)


def _matrix(shape, axes, std: float, *, muon: bool = True) -> ParamSpec:
    def init(key, shape):
        return std * jax.random.normal(key, shape, jnp.float32)

    return ParamSpec(shape, axes, init, decays=True, cast=True, muon=muon)


def _embedding(cfg: ModelConfig) -> ParamSpec:
    """Stays float32 where it is read, so that a frequent token's gradients add up in float32."""
    shape = (cfg.padded_vocab_size, cfg.d_model)
    spec = _matrix(shape, ("vocab", "width"), cfg.init_std, muon=False)
    return dataclasses.replace(spec, cast=False)


def _conv(width: int, channels: int) -> ParamSpec:
    def init(key, shape):
        bound = width**-0.5
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

    return ParamSpec(
        (width, channels), ("whole", "heads"), init, decays=True, cast=False, muon=False
    )


def _vector(shape, axes, init: Init) -> ParamSpec:
    return ParamSpec(shape, axes, init, decays=False, cast=False, muon=False)


def _gain(size: int) -> ParamSpec:
    return _vector((size,), ("whole",), lambda key, shape: jnp.ones(shape, jnp.float32))


def _zeros(key, shape):
    return jnp.zeros(shape, jnp.float32)


def _log_uniform_rate(key, shape):
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0))


def _inverse_softplus_step(key, shape):
    low, high = math.log(1e-3), math.log(0.1)
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
    return step + jnp.log(-jnp.expm1(-step))
