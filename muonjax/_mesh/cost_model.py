"""What a function of one matrix costs, read off its jaxpr: owners are assigned by it."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from muonjax._common.platform import flops_a_second


class Work(NamedTuple):
    """Costs on one device.

    Attributes:
      flops: two per multiply-add, of matrix products alone.
      sent: bytes a device sends, in sums and gathers over mesh axes.
      seconds: that the products take, at `flops_a_second`.
    """

    flops: float = 0.0
    sent: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: tuple) -> "Work":
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: int) -> "Work":
        """`count` times as much."""
        return Work(*(a * count for a in self))


def count_work(f: Callable[..., Any], *arrays: Any, axis_sizes: dict[str, int] | None = None) -> Work:
    """The work of f(*arrays), without running it.

    Args:
      f: Any traceable function. Loops must have a static length.
      arrays: Arrays or `jax.ShapeDtypeStruct`s.
      axis_sizes: Mesh axes that f may sum over, and how many devices each has.
    """
    sizes = axis_sizes or {}
    return _count(jax.make_jaxpr(f, axis_env=list(sizes.items()))(*arrays), sizes)


def _count(jaxpr: Jaxpr | ClosedJaxpr, sizes: dict[str, int]) -> Work:
    total = Work()
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        given: list[Any] = [v.aval for v in equation.invars]
        made: list[Any] = [v.aval for v in equation.outvars]
        if name == "dot_general":
            (contracted, _), _ = parameters["dimension_numbers"]
            depth = math.prod(given[0].shape[i] for i in contracted)
            flops = 2.0 * math.prod(made[0].shape) * depth
            total += Work(flops=flops, seconds=flops / flops_a_second(given[0].dtype))
        elif name in ("psum", "psum_invariant", "pmax"):
            devices = math.prod(sizes[axis] for axis in parameters["axes"])
            total += Work(sent=2.0 * _bytes(given) * (devices - 1) / devices)
        elif name == "all_gather":
            total += Work(sent=1.0 * _bytes(given) * (parameters["axis_size"] - 1))
        elif name == "cond":
            total += max((_count(branch, sizes) for branch in parameters["branches"]), default=Work())
        else:
            length = parameters["length"] if name == "scan" else 1
            for inner in jax.tree.leaves(
                list(parameters.values()), is_leaf=lambda x: isinstance(x, (ClosedJaxpr, Jaxpr))
            ):
                if isinstance(inner, (ClosedJaxpr, Jaxpr)):
                    total += _count(inner, sizes).times(length)
    return total


def _bytes(arrays: list[Any]) -> int:
    return sum(x.size * x.dtype.itemsize for x in arrays)
