"""Lead XLA to compile less, or to keep less memory: constants that it does not know, results in memory."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax


def unknown_to_xla(numbers: Sequence[int], platform: str) -> Sequence[jax.typing.ArrayLike]:
    """On a CPU the numbers as results of a loop, int32 each; elsewhere as they are.

    XLA compiles equal kernels once, but a slice at a constant of its own is a kernel of its own: with 96 layers of
    one shape, slicing was more than half of the time that their compilation took.
    """
    # Elsewhere each pass of the loop would be a launch; and a single slice is a single kernel either way.
    if platform != "cpu" or len(numbers) < 2:
        return numbers
    table = jnp.asarray(numbers, jnp.int32)
    none = (jnp.int32(0),) * len(numbers)
    return lax.fori_loop(0, len(numbers), lambda i, found: (*found[1:], table[i]), none)


def materialize(f: Callable[[jax.Array], jax.Array], x: jax.Array, platform: str) -> jax.Array:
    """f(x), of the shape and dtype of x, in memory; on a CPU as the result of a branch that is always taken.

    XLA would compute what is elementwise in f once more for each reader of the result, and keep everything that this
    takes until the last of them has run. An `optimization_barrier` is gone by the time that it decides so.
    """
    if platform != "cpu":
        return f(x)
    _, one = unknown_to_xla((0, 1), platform)
    return lax.cond(one == 1, f, lambda x: x, x)
