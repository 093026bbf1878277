"""Which matrices the loop over layers gathers a repeat ahead, and the steps to do so.

A gather or a sum over ranks ends only after the last rank has started it, so a rank can be ahead of
another by at most the work between its start and its end. Ranks are apart because recurrent states
pass through them in turn: by about 2 % of a layer per rank, at 2,048 tokens per rank. The rule, by
the number of context ranks:

    below 16    The mixer's matrices are gathered one repeat before their use, and their gradients
                reduced one repeat after it. Those of the feed-forward layer are gathered while the
                mixer before it runs, and reduced while the mixer's gradient is computed, which
                takes less memory.
    from 16     All matrices, one repeat before and after.
    from 32     The same; if the pattern is one layer and the number of repeats is even, a repeat
                of the loop is two layers.

A matrix that is gathered ahead takes memory for two copies in the compute dtype, and in the
backward for two shares of its gradient in float32.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from model import gathered
from model.axes import CONTEXT, ParamSpec, Specs, Tree
from model.config import ModelConfig
from model.layers import constrain

_ALL_FROM, _PAIRS_FROM = 16, 32  # ranks of the context axis


@dataclasses.dataclass(frozen=True)
class Ahead:
    """The matrices that the loop over layers gathers a repeat ahead; see layer_loop.py.

    specs: of a repeat's positions, not stacked. Trees of these matrices have None in place of all
    other parameters, and the reverse. repeats: of the loop; with one, nothing is gathered ahead.
    """

    specs: tuple[Specs, ...]
    cfg: ModelConfig
    mesh: Mesh
    repeats: int

    @property
    def in_pairs(self) -> bool:
        """Whether two repeats run as one, by the rule above."""
        many = self.mesh.shape[CONTEXT] >= _PAIRS_FROM
        return many and len(self.specs) == 1 and self.repeats % 2 == 0

    def paired(self) -> "Ahead":
        """The same for two repeats as one."""
        return dataclasses.replace(self, specs=self.specs * 2, repeats=self.repeats // 2)

    def split(self, params: Tree) -> tuple[Tree, Tree]:
        """(the matrices, the other parameters); stacked or not."""
        return self._map(lambda _, x: x, params), self._others(params)

    def gather(self, matrices: Tree) -> Tree:
        """Matrices at rest -> copies."""
        leaves, structure = jax.tree.flatten(matrices)
        copies = gathered.gather(leaves, self._of_matrices(), self.cfg.compute_dtype, self.mesh)
        return jax.tree.unflatten(structure, copies)

    def join(self, copies: Tree, others: Tree) -> Tree:
        """Parameters as layers take them."""

        def one(spec: ParamSpec, copies: Any, other: Any) -> Any:
            return other if copies is None else gathered.hold(copies, spec, self.mesh)

        return jax.tree.map(one, self.specs, copies, others)

    def split_gradient(self, gradient: Tree) -> tuple[Tree, Tree]:
        """Of what `join` returned: (shares of the matrices, gradients of the others)."""
        return self._map(lambda _, x: x.shares, gradient), self._others(gradient)

    def no_shares(self) -> Tree:
        """Shares of gradients that are zero."""
        return self._map(lambda spec, _: gathered.no_shares(spec, self.mesh), self.specs)

    def no_gradient(self, matrices: Tree) -> Tree:
        """Zeros of the shape and placement of stacked matrices at rest."""

        def zeros(spec: ParamSpec, x: jax.Array) -> jax.Array:
            where = PartitionSpec(None, *spec.partition(self.mesh))
            return constrain(jnp.zeros_like(x), self.mesh, where)

        return self._map(zeros, matrices)

    def reduce(self, shares: Tree) -> Tree:
        """Shares -> gradients at rest."""
        leaves, structure = jax.tree.flatten(shares)
        return jax.tree.unflatten(
            structure, gathered.reduce(leaves, self._of_matrices(), self.mesh)
        )

    def _of_matrices(self) -> list[ParamSpec]:
        return jax.tree.leaves(self._map(lambda spec, _: spec, self.specs))

    def _map(self, function: Callable[[ParamSpec, Any], Any], tree: Tree) -> Tree:
        return jax.tree.map(
            lambda ahead, spec, x: function(spec, x) if ahead else None,
            self._chosen(), self.specs, tree,
        )  # fmt: skip

    def _others(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda ahead, x: None if ahead else x, self._chosen(), tree)

    def _chosen(self) -> Tree:
        """Tree of bool, by the rule above."""
        everything = self.mesh.shape[CONTEXT] >= _ALL_FROM

        def choose(name: str, specs: Tree) -> Tree:
            part = self.repeats > 1 and (everything or name == "mixer")
            return jax.tree.map(lambda spec: part and gathered.takes(spec), specs)

        return tuple({name: choose(name, s) for name, s in specs.items()} for specs in self.specs)
