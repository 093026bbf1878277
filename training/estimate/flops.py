"""Floating-point operations of a traced program: all matrix products, as often as they run.

The count covers the whole mesh and includes the repetitions of rematerialisation and the products
inside Pallas kernels; a multiply-add counts as two. Elementwise work is not counted. Products of
groups of rows (experts) count the rows that there would be if all experts had equally many.
"""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend import core

from model.axes import EXPERT


def program_flops(jaxpr: core.Jaxpr, filled: float = 1.0) -> float:
    """FLOPs of all products of a jaxpr. A loop without a constant trip count counts once.

    filled: share of the rows of grouped products that hold tokens: a rank has room for those of all
    ranks of its expert axis.
    """
    return sum(_flops(equation, filled) for equation in jaxpr.eqns)


def _flops(equation: Any, filled: float) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _product(equation)
    if name == "ragged_dot_general":
        return _grouped(equation) * filled
    if name == "shard_map":
        filled /= params["mesh"].shape.get(EXPERT, 1)
    inner = [program_flops(jaxpr, filled) for jaxpr in _jaxprs(params)]
    if not inner:
        return 0.0
    if name == "cond":
        return max(inner)
    return sum(inner) * _times(name, params)


def _product(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)


def _grouped(equation: Any) -> float:
    """Rows by two of the three: rows, inputs and outputs, whichever of the products it is."""
    (contracted, _), _ = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    left = equation.invars[0].aval.shape
    inner = math.prod(left[axis] for axis in contracted)
    return 2.0 * math.prod(equation.outvars[0].aval.shape[-2:]) * inner


def _times(name: str, params: dict[str, Any]) -> int:
    """How often an equation's inner program runs, over the whole mesh."""
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        return params["mesh"].size
    if name == "pallas_call":
        return math.prod(n for n in params["grid_mapping"].grid if isinstance(n, int))
    return 1


def _jaxprs(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    for value in params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, core.ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, core.Jaxpr):
                yield each
