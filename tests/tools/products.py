"""Look through a traced function, which is neither compiled nor run, and count the flops of its matrix products."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """All equations, those of loops, branches and calls included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves([*equation.params.values()]):
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                yield from equations(inner)


def flops_of(f: Callable[..., Any], *shapes) -> float:
    """Flops of all products, two per multiply-add, branches together; loops must have a static length."""
    return _flops(jax.make_jaxpr(f)(*shapes).jaxpr)


def _flops(jaxpr: Jaxpr) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval
            depth = np.prod([left.shape[axis] for axis in contracted])
            total += 2.0 * equation.outvars[0].aval.size * depth
            continue
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jax.tree.leaves([*equation.params.values()]):
            if isinstance(inner, ClosedJaxpr):
                total += times * _flops(inner.jaxpr)
            elif isinstance(inner, Jaxpr):
                total += times * _flops(inner)
    return total
