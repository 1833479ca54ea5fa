"""Lead XLA to compile less, or to keep less memory: constants that it does not know, updates in place."""

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


def over_first(f: Callable[..., jax.Array], x: jax.Array, *others: jax.Array | None) -> jax.Array:
    """f(x, *others) of stacks [count, ...], each matrix on its own, written where x was.

    XLA for GPUs gives the result of an elementwise fusion memory of its own, though x is not read again. It updates
    slices in place; all matrices but the last and the last one are two. If it knew their starts, it would see one
    concatenation.
    """
    sizes = len(x) - 1, 1
    starts = lax.optimization_barrier((jnp.int32(0), jnp.int32(sizes[0])))
    for start, size in zip(starts, sizes, strict=True):
        parts = [a if a is None else lax.dynamic_slice_in_dim(a, start, size) for a in (x, *others)]
        x = lax.dynamic_update_slice_in_dim(x, f(*parts), start, 0)
    return x


def materialize(f: Callable[[jax.Array], jax.Array], x: jax.Array, platform: str) -> jax.Array:
    """f(x), of the shape and dtype of x, in memory; on a CPU as the result of a branch that is always taken.

    XLA would compute what is elementwise in f once more for each reader of the result, and keep everything that this
    takes until the last of them has run. An `optimization_barrier` is gone by the time that it decides so.
    """
    if platform != "cpu":
        return f(x)
    _, one = unknown_to_xla((0, 1), platform)
    return lax.cond(one == 1, f, lambda x: x, x)
