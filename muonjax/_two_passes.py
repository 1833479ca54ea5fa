"""A function of a matrix that looks at it twice: what lies between is small, and made for many matrices at once."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class TwoPasses:
    """f(x) = second(x, k) with [k] = between([first(x)]).

    Attributes:
      whole: f, with the mesh axes that shard the columns (default: none).
      first: x -> a small tree of arrays.
      between: Of many of these, from matrices of any sizes.
      second: x and its own -> f(x).
    """

    whole: Callable[..., jax.Array]
    first: Callable[[jax.Array], Any]
    between: Callable[[Sequence[Any]], list[Any]]
    second: Callable[[jax.Array, Any], jax.Array]

    def __call__(self, x: jax.Array, axis_name: tuple[str, ...] = ()) -> jax.Array:
        """f(x), alone."""
        return self.whole(x, axis_name)
