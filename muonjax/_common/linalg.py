"""Matrix products, symmetric ones at half the work; adjoints, norms, Hermitian parts;
entries of a stack in a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._symmetric_product import SymmetricProduct as SymmetricProduct

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Inexact, Shaped


_LARGEST_CONSTANT = 64  # rows of an identity whose numbers a program contains


class MatrixProduct(NamedTuple):
    """A matrix product at a stated precision, over leading batch axes. Hashable:
    it can be a static argument.

    Attributes:
      operands: Dtype that the factors are rounded to; sums are taken and returned in float32 or
        wider. None: the factors' own dtype, for factors and sums.
      precision: `precision` of `jax.lax.dot_general`.
      result: Dtype that the sums are rounded to; None: not at all.
    """

    operands: str | None = None
    precision: str | None = "highest"
    result: str | None = None

    def __call__(
        self, a: Inexact[Array, "*batch m k"], b: Inexact[Array, "*batch k n"]
    ) -> Inexact[Array, "*batch m n"]:
        """A B."""
        return self._contracted("...ik,...kj->...ij", a, b)

    def with_adjoint(
        self,
        a: Inexact[Array, "*batch m k"],
        b: Inexact[Array, "*batch n k"] | None = None,
    ) -> Inexact[Array, "*batch m n"]:
        """A B^H, or A A^H, by contracting the last axes: a product with an adjoint would first copy
        a batch transposed."""
        b = a if b is None else b
        return self._contracted("...ik,...jk->...ij", a, b.conj())

    def _contracted(self, axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """The product of the rounded factors along these axes."""
        sums = None
        if self.operands is not None:
            a = a.astype(self.operands)
            b = b.astype(self.operands)
            # XLA multiplies half types and sums in float32, if it is asked for the sums.
            sums = self.result or at_least_float32(self.operands)
        return jnp.einsum(
            axes, a, b, precision=self.precision, preferred_element_type=sums
        )


def common_dtype(*arrays: Any) -> jnp.dtype:
    """The dtype that holds all of these arrays or dtypes,
    also where `jax_numpy_dtype_promotion` is "strict"."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*arrays)


def at_least_float32(*arrays: Any) -> jnp.dtype:
    """The dtype that holds all of these arrays or dtypes and float32.

    bfloat16 gives float32, bfloat16 and complex64 give complex64, float64 stays.
    """
    return common_dtype(jnp.float32, *arrays)


def scaled(a: jax.Array, number: jax.Array | float) -> jax.Array:
    """A times a real number, or one for each matrix or row,
    without a promotion that JAX's strict mode forbids.

    In float32 or wider; a Python number keeps A's dtype.
    """
    # A Python number has no dtype to promote to.
    if not isinstance(number, jax.Array):
        return number * a
    dtype = at_least_float32(a.dtype)
    return a.astype(dtype) * number.astype(dtype)


def entry(stack: jax.Array, number: jax.typing.ArrayLike) -> jax.Array:
    """stack[number] inside of a loop, where XLA need not test whether the number is negative."""
    return jax.lax.dynamic_index_in_dim(
        stack, number, keepdims=False, allow_negative_indices=False
    )


def with_entry(
    stack: jax.Array, number: jax.typing.ArrayLike, value: jax.Array
) -> jax.Array:
    """The stack with `value` in the place of `entry(stack, number)`."""
    return jax.lax.dynamic_update_index_in_dim(
        stack, value, number, axis=0, allow_negative_indices=False
    )


# Products in the arrays' own dtype, where float32 means true float32.
dot = MatrixProduct()


def adjoint(a: Inexact[Array, "*batch m n"]) -> Inexact[Array, "*batch n m"]:
    """A^H."""
    return a.conj().mT


def hermitian_part(a: Inexact[Array, "*batch m m"]) -> Inexact[Array, "*batch m m"]:
    """(A + A^H) / 2."""
    return (a + adjoint(a)) / 2


def identity_like(
    a: Shaped[Array, "*batch k k"], as_constant: bool = False
) -> Shaped[Array, "*#batch k k"]:
    """I in the dtype of A: [1, 1, k, k] for an A [8, 3, k, k].

    With `as_constant` the program contains the numbers of a small I, of up to 64 rows. Otherwise it
    compares the numbers of rows and columns, and XLA's CPU compiler unrolls this, which takes
    longer to compile than all else in a small iteration. Leave it False where `jax.jvp` goes
    through a `shard_map`, which refuses such a constant.
    """
    k = a.shape[-1]
    # NumPy's matrix is a constant of the program, and `jnp.eye` compares.
    library = np if as_constant and k <= _LARGEST_CONSTANT else jnp
    identity = library.eye(k, dtype=a.dtype)
    # As many axes as A has, since `jax_numpy_rank_promotion="raise"` refuses to combine two ranks
    batch_axes = tuple(range(a.ndim - 2))
    return jnp.expand_dims(identity, batch_axes)


def on_diagonal(a: Inexact[Array, "*batch k k"]) -> Bool[Array, "*batch k k"]:
    """The mask of the diagonal of A, with A's sharding."""
    # `eye` alone would be on no mesh.
    mask = jnp.zeros_like(a, bool)
    return mask | identity_like(mask)


def square_norm(a: Inexact[Array, "*batch m n"]) -> Float[Array, "*batch 1 1"]:
    """|A|_F^2 of each matrix, in float32 or wider."""
    a = a.astype(at_least_float32(a.dtype))
    return jnp.sum(jnp.abs(a) ** 2, axis=(-2, -1), keepdims=True)


def square_of_any_size(
    x: jax.Array, sum_of_squares: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """A power of two c for each matrix x, and `sum_of_squares(c x)`,
    which neither overflows nor underflows.

    c is 1 where the sum for x itself is between 2^-84 and 2^84, 2^84 where it is smaller and 2^-84
    where it is larger. A float32 entry that is not subnormal is between 2^-126 and 2^128, so for up
    to 2^26 of them the sum that is returned is between 2^-84 and 2^114. Zeros give 0, and inf and
    NaN stay. The sums at all three scales take one pass over x, and one all-reduce.

    Args:
      x: Matrices [*batch, m, n] in float32 or wider.
      sum_of_squares: The sum, or the mean, of the squares of the entries:
        [*batch, m, n] -> [*batch, 1, 1].
    """
    # The barrier hides that these are constants: XLA would make c^2 sum(x^2) of sum((c x)^2), and
    # c^2 = 2^168 is too large for float32.
    scales = jnp.float32(2.0**-84), jnp.float32(2.0**84)
    lowering, lifting = jax.lax.optimization_barrier(scales)
    square = sum_of_squares(x)
    square_of_lowered = sum_of_squares(scaled(x, lowering))
    square_of_lifted = sum_of_squares(scaled(x, lifting))
    # The sum of x itself is below this after an underflow, and infinite after an overflow.
    is_small = square < 2.0**-84
    is_large = square > 2.0**84
    c = jnp.where(is_small, lifting, jnp.where(is_large, lowering, 1.0))
    square = jnp.where(
        is_small, square_of_lifted, jnp.where(is_large, square_of_lowered, square)
    )
    return c.astype(square.dtype), square


def inverse_norm(a: Inexact[Array, "*batch m n"]) -> Float[Array, "*batch 1 1"]:
    """1 / |A|_F; of a zero matrix a large number whose square and cube are finite."""
    square = square_norm(a)
    # This is too small to count, unless the matrix is zero.
    return jax.lax.rsqrt(square + jnp.finfo(square.dtype).eps ** 3)


def or_one(number: jax.Array | float) -> jax.Array:
    """1 instead of 0: for the zero matrix, and before a root, which has no derivative at zero."""
    return jnp.where(number == 0, 1, number)
