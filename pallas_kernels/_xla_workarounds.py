"""Against what XLA compiles badly: constants that it does not know,
and results that it puts in memory."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax


def numbers_from_loop(
    numbers: Sequence[int], platform: str
) -> Sequence[jax.typing.ArrayLike]:
    """The same numbers, on a CPU as int32 results of a loop, so that XLA does not know them.

    Slices of one size, such as the matrices of a stack or the blocks of a symmetric product, are
    one kernel at numbers that XLA does not know; at constants each is a kernel of its own. With 96
    layers of one shape, to compile such slices took more than half of the time.
    """
    # Elsewhere each pass of the loop would be a launch;
    # and a single slice is a single kernel either way.
    if platform != "cpu" or len(numbers) < 2:
        return numbers
    # XLA does not run loops while compiling, so that their results are unknown to it. But what no
    # pass changes, XLA takes out of the loop, and knows it again. So every pass shifts all numbers
    # by one place, until each is in its own.
    table = jnp.asarray(numbers, jnp.int32)
    zeros = (jnp.int32(0),) * len(numbers)

    def shift_in(i, last):
        """Drop the first of the last numbers, and append number i of the table."""
        return (*last[1:], table[i])

    return lax.fori_loop(0, len(numbers), shift_in, zeros)


def materialize(
    f: Callable[[jax.Array], jax.Array], x: jax.Array, platform: str
) -> jax.Array:
    """f(x), of the shape and dtype of x, as an array that XLA keeps in memory and does not compute
    again.

    On a CPU, XLA computes elementwise operations again for each reader of their result, and keeps
    their operands until the last reader has run. It can't do so with the result of a branch. An
    `optimization_barrier` is no help, because XLA removes it before it fuses. Without this, an
    update of replicated matrices on a mesh takes a third more memory
    (tests/mesh/test_hlo_table.py).
    """
    if platform != "cpu":
        return f(x)
    # This number is 1, so that f is always run, but XLA does not know it. The 0 before it is not
    # used: a single number would be a constant (see `numbers_from_loop`), which XLA knows.
    _, last_number = numbers_from_loop((0, 1), platform)
    return lax.cond(last_number == 1, f, lambda x: x, x)
