r"""Run the Newton-Schulz iteration on accelerators, with the operands of all products in half precision.

    x = g z,    z <- z + Q z,    Q = (b / a) R + (c / a) R^2,    R = g^2 z z^H,    g <- a g

This is a step p(x) = a x + (b R + c R^2) x whose factor a is collected in the number g. z is kept in half precision:
its rounding error is relative to z. The identity, which gives the term a x, is never added to a matrix before that is
rounded, so that a step multiplies errors no more than it multiplies x. Only the last map, after which no step
multiplies the errors, is rounded as 1 + Q. Products are summed in float32 and rounded once. A full product is not
mirrored: its deviation from symmetry is smaller than the rounding of its entries.

For a wide matrix the last steps work on m x m matrices, as one map (1 + Q)(1 + Q').., with the next step's R' =
(1 + Q) R (1 + Q). This is a Gram form without the first steps, whose large factors a would multiply the rounding of R.
In bfloat16 it is too inaccurate even for the last two of three steps: the polar error of "fast" would grow by 0.04
where all singular values are equal. Float16 has three more significant bits, and is enough for the entries of R and Q,
which are of moderate size.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muonjax._common.linalg import (
    MatrixProduct,
    SymmetricProduct,
    in_blocks,
    on_diagonal,
    sizes,
    square_norm,
    sum_over,
)
from muonjax._common.platform import Policy
from muonjax._newton_schulz.coefficients import Coefficients
from muonjax._newton_schulz.iteration import or_one, power_of_two_scale, takes_gram_form, trace_or_one
from muonjax._newton_schulz.settings import NewtonSchulz, Normalization
from muonjax._newton_schulz.thin_deflation import Shrinking, Sketch, shrink, shrinkings, sketch
from pallas_kernels._api import measured_kernel

# R of fused steps is larger by this number in memory. Without the factors a^2 it gets smaller with each step, so that
# its square would be below the least normal float16: an error that grows with m, and a large one where such numbers are
# taken for zero.
_MAGNIFIED = 16.0

# The fourth power of the bound is larger by this number. For a matrix of rank one the bound is the singular value
# itself, rounding does not average out where entries are equal, and the first polynomial multiplies an excess by 24.
ABOVE_ROUNDING = 1.05

# How large the product of the factors a of two or three fused steps, without the last, may be: it multiplies rounding
# errors. With 4.07 (two of three Polar Express steps) the polar error rises by 0.05 where all singular values are
# equal, with 15.9 (three of four) by 0.025; with 11.9 (Jordan's) the largest singular value rises by 0.02 (emulated).
_LARGEST_FACTOR = {2: 4.0, 3: 10.0}


class _Products(NamedTuple):
    """Products in half precision, on one device or over the mesh axes of a `jax.shard_map`.

    Attributes:
      on_small_side: Products of m x m matrices.
      axis_name: Mesh axes over which the columns of x are sharded.
      blocks: Whether symmetric products are made in 2 x 2 blocks, where no kernel makes them.
    """

    on_small_side: SymmetricProduct
    axis_name: tuple[str, ...]
    blocks: bool

    @property
    def dtype(self) -> jnp.dtype:
        return self.on_small_side.dtype

    @property
    def rounded(self) -> MatrixProduct:
        return MatrixProduct(self.dtype.name, None, result=self.dtype.name)

    @property
    def summed(self) -> MatrixProduct:
        """Products of rounded operands whose float32 sums are not rounded."""
        return MatrixProduct(self.dtype.name, None)

    @property
    def by_kernel(self) -> bool:
        """Whether a kernel, named or chosen, makes symmetric products; it multiplies by numbers as well."""
        return self.on_small_side.implementation is not None

    def gram(self, z: jax.Array) -> jax.Array:
        """z z^H."""
        if self.by_kernel:
            return self._gram_by_kernel(z, 1.0)
        return self.sums(z).astype(self.dtype) if self.axis_name else self._plain(self.rounded, z, z)

    def sums(self, z: jax.Array) -> jax.Array:
        """z z^H in float32, without a kernel."""
        return sum_over(self.axis_name, self._plain(self.summed, z, z))

    def scaled_gram(self, z: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
        """`scale` z z^H, rounded once, to `dtype` (a kernel's own)."""
        product = self._gram_by_kernel(z, scale) if self.by_kernel else scale * self.sums(z)
        return product.astype(dtype)

    def _gram_by_kernel(self, z: jax.Array, scale: Any) -> jax.Array:
        return sum_over(self.axis_name, self.on_small_side(z, alpha=scale))

    def symmetric(self, a: jax.Array, y: jax.Array | None = None, c: jax.Array | None = None) -> jax.Array:
        """A Y^H + C, where Y is A, or commutes with it."""
        if self.by_kernel or self.on_small_side.together:
            return self.on_small_side(a, y, c, 1.0, 1.0)
        product = self._plain(self.rounded, a, a if y is None else y)
        return product if c is None else product + c

    def _plain(self, product: MatrixProduct, a: jax.Array, y: jax.Array) -> jax.Array:
        return in_blocks(product, a, y) if self.blocks else product.with_adjoint(a, y)


def first_pass(
    x: jax.Array, settings: NewtonSchulz, policy: Policy, axis_name: tuple[str, ...] = ()
) -> Sketch | None:
    """What the deflation of x [*batch, m, n] begins with; None if it has no deflation."""
    rank = min(settings.deflation, x.shape[-2] // 8)
    return sketch(x.astype(jnp.float32), rank, policy.finer_half, axis_name) if rank else None


def between(sketches: list[Sketch | None], policy: Policy) -> list[Shrinking | None]:
    """What lies between the two passes, from what `first_pass` gave, for any number of arrays."""
    found = iter(shrinkings([s for s in sketches if s is not None], policy.finer_half))
    return [None if s is None else next(found) for s in sketches]


def iterate(
    x: jax.Array,
    settings: NewtonSchulz,
    policy: Policy,
    dtype: jnp.dtype,
    axis_name: tuple[str, ...] = (),
    shrinking: Shrinking | None = None,
) -> jax.Array:
    """x [*batch, m, n] with m <= n, n counted over `axis_name` -> its orthogonalization, in float32; by bfloat16."""
    if any(a == 0 for a, _, _ in settings.coefficients):
        raise ValueError(
            "NewtonSchulz(coefficients=...): in bfloat16 each step needs a linear term; give compute_dtype='float32'."
        )
    m, n = sizes(x, axis_name)
    implementation = settings.implementation
    if implementation is None and not axis_name:
        implementation = measured_kernel(policy.platform, x, dtype)
    product = SymmetricProduct(policy.platform, dtype, implementation)
    product = product.shared_by(axis_name if policy.shares_products(m, dtype) else ())
    products = _Products(product, axis_name, policy.symmetric_in_blocks(m))
    x = x.astype(jnp.float32)
    if shrinking is None:
        (shrinking,) = between([first_pass(x, settings, policy, axis_name)], policy)
    if shrinking is None:
        z, basis = (power_of_two_scale(x, axis_name) * x).astype(dtype), None
    else:
        z, basis = shrink(x, shrinking, dtype), shrinking.v
    q, z = _steps(products, z, settings, basis, fused_steps(settings, policy, m, n, products.by_kernel))
    # A stack's result is cut, and in half precision that moves half as much.
    return products.summed(q, z) if x.ndim == 2 else products.rounded(q, z).astype(jnp.float32)


def fused_steps(
    settings: NewtonSchulz, policy: Policy, m: int, n: int, by_kernel: bool = False
) -> tuple[int, jnp.dtype]:
    """How many of the last steps are made as one map, and in which dtype.

    In bfloat16 two are accurate enough, unless one of them is the second of all steps; in float16 three, or all but the
    first (emulated for the presets: benchmarks/optimizer/half_precision.py). A kernel rounds its sums to bfloat16, so
    float16 afterwards would gain nothing.
    """
    dtype = jnp.dtype(jnp.bfloat16) if by_kernel else policy.finer_half
    most, before = (3, 1) if dtype == jnp.float16 else (2, 2)
    number = min(most, len(settings.coefficients) - before)
    while (
        number > 1 and math.prod(a for a, _, _ in settings.coefficients[-number:-1]) > _LARGEST_FACTOR[number]
    ):
        number -= 1
    return (number if number > 1 and takes_gram_form(settings, m, n) else 1), dtype


def _steps(
    products: _Products,
    z: jax.Array,
    settings: NewtonSchulz,
    basis: jax.Array | None,
    fused: tuple[int, jnp.dtype],
) -> tuple[jax.Array, jax.Array]:
    """The polynomials on z up to the last product: Q and z', the result being Q z'.

    Args:
      basis: Directions that have been shrunk to about the same size.
      fused: As `fused_steps` gives it.
    """
    number, dtype = fused
    steps = settings.coefficients
    apart = len(steps) - number if number > 1 else len(steps)
    r = products.gram(z)
    r2, inverse_bound, root = _bound(products, r, basis, settings.normalization)
    factor = math.prod(a for a, _, _ in steps) * root
    q = _map(products, r, steps[0], 1.0, inverse_bound, r2)
    # The product of the factors a, a number at trace time: on a device each scalar would be a launch.
    gain = steps[0][0]
    for row in steps[1:apart]:
        z = _plus(products, q, z)
        q = _map(products, products.gram(z), row, gain**2, inverse_bound)
        gain = row[0] * gain
    if number > 1:
        z = _plus(products, q, z)
        q = _fused_map(products, z, steps[apart:], gain**2, inverse_bound, dtype)
    q = q.astype(jnp.float32)  # for the one rounding of 1 + Q, which is small where Q is near -1
    return (factor * jnp.where(on_diagonal(q), q + 1, q)).astype(products.dtype), z


def _bound(
    products: _Products, r: jax.Array, basis: jax.Array | None, normalization: Normalization
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """r^2 where it is made, the inverse of an upper bound of R's largest eigenvalue, and its root.

    By interlacing, the k largest eigenvalues of R are at least those of V^H R V, for no combination of V's columns is
    longer than 1. So they sum to s = tr(V^H R V) at least, and if the largest is at most M, the fourth powers of the
    others sum to (s - M)^4 / (k - 1)^3 at least. Each pass lowers the bound, and with it M.
    """
    if normalization == "frobenius":
        bound = ABOVE_ROUNDING**0.25 * trace_or_one(r.astype(jnp.float32))
        return None, 1 / bound, jax.lax.rsqrt(bound)
    r2 = products.symmetric(r)
    trace, others = None, 0 if basis is None else basis.shape[-1] - 1
    if basis is not None and others > 0:
        v = basis.astype(products.dtype)
        trace = jnp.sum(products.summed(r, v) * v.astype(jnp.float32), (-2, -1), keepdims=True)
    fourth = bound = or_one(square_norm(r2))
    if trace is not None:
        s = 0.99 * trace  # the rounding of V can make combinations longer by 1/250
        for _ in range(3):
            bound = fourth - others * (jnp.maximum(s - bound**0.25, 0) / others) ** 4
            bound = jnp.maximum(bound, fourth / r.shape[-1])
    bound = ABOVE_ROUNDING * bound
    return r2, bound**-0.25, bound**-0.125


def _plus(products: _Products, q: jax.Array, z: jax.Array) -> jax.Array:
    """(1 + Q) z, as a product to which z is added: some libraries do both in one operation."""
    return z + products.rounded(q, z)


def _map(
    products: _Products,
    r: jax.Array,
    row: Any,
    square: float,
    inverse_bound: Any,
    r2: jax.Array | None = None,
) -> jax.Array:
    """Q of the step a x + (b R + c R^2) x = a (1 + Q) x, R = `square` `inverse_bound` r; r2 = r^2 where known.

    In float32, but a kernel rounds it.
    """
    a, b, c = row
    if products.by_kernel and r2 is None and c != 0:
        return products.on_small_side(
            r, None, r, c / a * (square * inverse_bound) ** 2, b / a * (square * inverse_bound)
        )
    if c != 0 and r2 is None:
        r2 = products.symmetric(r)
    # Numbers times matrices, not numbers times numbers: on a device each of these would be a launch.
    q = b / a * square * (inverse_bound * r.astype(jnp.float32))
    if c != 0 and r2 is not None:
        q = q + c / a * square**2 * (inverse_bound * (inverse_bound * r2.astype(jnp.float32)))
    return q


def _fused_map(
    products: _Products, z: jax.Array, rows: Coefficients, square: float, inverse_bound: jax.Array, dtype: Any
) -> jax.Array:
    """Q of the steps a a' .. (1 + Q) x, as `_map`, by matrices of `dtype`."""
    r = products.scaled_gram(z, _MAGNIFIED * square * inverse_bound, dtype)
    products = products._replace(on_small_side=products.on_small_side._replace(dtype=dtype))
    square = 1 / _MAGNIFIED
    q = _map(products, r, rows[0], square, 1.0)
    total, square = q, rows[0][0] ** 2 * square
    for row in rows[1:]:
        q, total = q.astype(dtype), total.astype(dtype)
        once = products.symmetric(q, y=r, c=r)  # (1 + Q) R
        r = products.symmetric(once, y=q, c=once)
        q = _map(products, r, row, square, 1.0).astype(dtype)
        # XLA for GPUs would join this product with that of the next step, as both multiply by q, and copy the others.
        apart = jax.lax.optimization_barrier(q)
        total = products.symmetric(apart, y=total, c=total).astype(jnp.float32) + q.astype(jnp.float32)
        square = row[0] ** 2 * square
    return total
