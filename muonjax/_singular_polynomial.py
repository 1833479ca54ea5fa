"""Beside the way, for models that orthogonalize: Newton-Schulz with the derivative of the polynomial that
ran.

The iteration maps X = U diag(s) V^T to U diag(f(s)) V^T for an odd polynomial f. That map is the gradient of
the spectral function sum_i F(s_i), F' = f, so its Jacobian is a Hessian: symmetric. The vector-Jacobian
product is therefore the Jacobian-vector product in the direction of the cotangent, which needs X and no
intermediate.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from muonjax._coefficients import Coefficients
from muonjax._power_of_two import power_of_two_scale


class Arithmetic(NamedTuple):
    """How products are taken: hashable, so that it can ride along as a static argument."""

    operands: str
    """Dtype that the factors are rounded to; sums stay in the dtype of the arrays."""
    precision: str | None
    """`precision` of `jax.lax.dot_general`."""

    @classmethod
    def of(cls, x: jax.Array, precision: str | None) -> "Arithmetic":
        """That of x's own dtype; but float32 for float16, whose range can't hold the derivative's 1 / s."""
        return cls("float32" if x.dtype == jnp.float16 else x.dtype.name, precision)

    def __call__(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """a @ b over leading batch axes."""
        return self._contract("...ik,...kj->...ij", a, b)

    def with_transpose(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """a @ b^T, contracting last axes: XLA would materialise a swapped copy of a batch."""
        return self._contract("...ik,...jk->...ij", a, b)

    def _contract(self, subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        rounded = a.astype(self.operands), b.astype(self.operands)
        return jnp.einsum(subscripts, *rounded, precision=self.precision, preferred_element_type=a.dtype)


def transpose(x: jax.Array) -> jax.Array:
    """Swaps the last two axes."""
    return jnp.swapaxes(x, -1, -2)


def twice_symmetric(x: jax.Array) -> jax.Array:
    """x + x^T."""
    return x + transpose(x)


def add_identity(x: jax.Array, a: jax.Array) -> jax.Array:
    """x + a I."""
    return x + a * jnp.eye(x.shape[-1], dtype=x.dtype)


def inner(x: jax.Array, y: jax.Array) -> jax.Array:
    """Frobenius inner product of each matrix, as [*batch, 1, 1]."""
    return jnp.sum(x * y, axis=(-2, -1), keepdims=True)


@jax.custom_jvp
def unit_norm(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x / |x|_F and 1 / |x|_F, both 0 where x is 0, so that value and gradient are 0 there."""
    square = inner(x, x)
    # Not `square > 0`: a NaN must take the branch that keeps it.
    inverse = jnp.where(square == 0, jnp.zeros_like(square), lax.rsqrt(jnp.where(square == 0, 1.0, square)))
    return x * inverse, inverse


@unit_norm.defjvp
def _unit_norm_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    unit, inverse = unit_norm(x)
    radial = inner(unit, dx)
    # In terms of `unit` alone, so that x itself is no residual.
    return (unit, inverse), (inverse * (dx - unit * radial), -inverse * inverse * radial)


def linear_map_with_known_transpose(
    apply: Callable[[jax.Array, jax.Array], jax.Array],
    apply_transpose: Callable[[jax.Array, jax.Array], jax.Array],
    at: jax.Array,
    direction: jax.Array,
) -> jax.Array:
    r"""The linear map `direction -> apply(at, direction)`, whose transpose is `apply_transpose(at, .)` as
    told.

    `jax.custom_derivatives.linear_call` would say this, but has no batching rule and no derivative in `at`;
    `jax.custom_vjp` loses forward mode. A linear solve has all of them, and with J the map,

    $$\begin{bmatrix} 0 & I \\ I & -J \end{bmatrix}^{-1} \binom{v}{0} = \binom{J v}{v}$$

    is one whose "solver" is `apply`, always invertible whatever J is. Differentiating the solve in `at` gives
    J' v + J v', the product rule.

    Args:
      apply: (at, v) -> J v, differentiable in `at`; the same shape in and out.
      apply_transpose: (at, v) -> J^T v.
      at: Where the map is taken.
      direction: v.
    """

    # Packed in one array: transposing the solve asserts that every leaf of its right-hand side is linear, and
    # the zero block of a pair is not.
    def system(packed):
        return jnp.stack([packed[1], packed[0] - apply(at, packed[1])])

    def solver(f):
        def solve(_, packed):
            # Where layers are unrolled, XLA would merge this recomputation with the forward pass and keep the
            # intermediates alive. The barrier stops it on accelerators, rolled loops do on every backend.
            point, v = lax.optimization_barrier((at, packed[0]))
            return jnp.stack([f(point, v) + packed[1], v])

        return solve

    right_hand_side = jnp.stack([direction, jnp.zeros_like(direction)])
    solution = lax.custom_linear_solve(
        system, right_hand_side, solver(apply), transpose_solve=solver(apply_transpose)
    )
    return solution[0]


def about_mean(
    gram: jax.Array, row: jax.Array, arithmetic: Arithmetic
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    r"""One polynomial of A = X X^T, in powers of A's distance D from its mean eigenvalue:

    $$aI + bA + cA^2 = \alpha I + \beta D + cD^2, \qquad D = A - \tau I, \quad \tau = \operatorname{tr} A / m.$$

    The closer the singular values are to each other, the smaller is D, and with it what the products round
    away: the identity's share needs no product.

    Returns:
      The share alpha of the identity, [*batch, 1, 1]; the rest, beta D + c D^2; the slope beta; D.
    """
    a, b, c = row
    # The sum is the same about any number, so that the mean may be a constant.
    mean = lax.stop_gradient(jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None] / gram.shape[-1])
    distance = add_identity(gram, -mean)
    slope = b + 2 * c * mean
    return a + mean * (b + c * mean), slope * distance + c * arithmetic(distance, distance), slope, distance


def iterate(x: jax.Array, coefficients: Coefficients, arithmetic: Arithmetic) -> jax.Array:
    """X <- (a I + b A + c A^2) X with A = X X^T, once a row of `coefficients`, as a rolled loop.

    Args:
      x: [*batch, m, n], m <= n for speed; singular values inside the coefficients' interval.
      coefficients: Rows (a, b, c).
      arithmetic: How products are taken.

    Returns:
      [*batch, m, n]: U diag(f(s)) V^T, f the composition of the odd quintics.
    """

    def step(x, row):
        share, rest, _, _ = about_mean(arithmetic.with_transpose(x, x), row, arithmetic)
        return share * x + arithmetic(rest, x), None

    return lax.scan(step, x, jnp.asarray(coefficients, x.dtype))[0]


def directional_derivative(
    x: jax.Array, direction: jax.Array, coefficients: Coefficients, arithmetic: Arithmetic
) -> jax.Array:
    """The derivative of `iterate` at x in `direction`; symmetric as a map of `direction`.

    A rolled loop over segments of `_segment_length` steps, which keeps nothing. A segment takes five products
    of m^2 n however long it is, and of m^3 two for one step, twelve for two.
    """

    def segment(x, dx, rows):
        gram = arithmetic.with_transpose(x, x)
        dgram = twice_symmetric(arithmetic.with_transpose(dx, x))
        share, rest, drest = _composition(gram, dgram, rows, arithmetic)
        return share, rest, share * dx + arithmetic(drest, x) + arithmetic(rest, dx)

    def step(carry, rows):
        x, dx = carry
        share, rest, dx = segment(x, dx, rows)
        return (share * x + arithmetic(rest, x), dx), None

    rows = jnp.asarray(coefficients, x.dtype)
    length = min(_segment_length(x, arithmetic), len(rows))
    carry, odd = (x, direction), len(rows) % length
    if odd:
        carry, _ = step(carry, rows[:odd])
    (x, dx), _ = lax.scan(step, carry, rows[odd:-length].reshape(-1, length, 3))
    return segment(x, dx, rows[-length:])[2]  # nobody needs the last x


def _segment_length(x: jax.Array, arithmetic: Arithmetic) -> int:
    """Two steps where that is less work; but one in half precision, where the rounding of a Gram matrix that is
    carried over a step can exceed its small eigenvalues by far."""
    m, n = x.shape[-2:]
    less_work = 5 * n + 12 * m < 2 * (5 * n + 2 * m)  # in units of m^2
    exact_enough = jnp.finfo(arithmetic.operands).eps <= jnp.finfo(jnp.float32).eps
    return 2 if less_work and exact_enough else 1


def _composition(
    gram: jax.Array, dgram: jax.Array, rows: jax.Array, arithmetic: Arithmetic
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The composition of `rows` as a map of X, X -> share X + rest X, made of A = X X^T alone; and the tangent
    of `rest`.

    A step P = share I + rest takes A to P A P, whose tangent is T + T^T with T = (P dA / 2 + dP A) P.
    """

    def polynomial(gram, dgram, row):
        share, rest, slope, distance = about_mean(gram, row, arithmetic)
        return share, rest, slope * dgram + row[2] * twice_symmetric(arithmetic(dgram, distance))

    a, p, dp = polynomial(gram, dgram, rows[0])
    share, rest, drest = a, p, dp
    for row in rows[1:]:
        left = 0.5 * (a * dgram + arithmetic(p, dgram)) + arithmetic(dp, gram)
        dgram = twice_symmetric(a * left + arithmetic(left, p))
        left = a * gram + arithmetic(p, gram)
        gram = a * left + arithmetic(left, p)
        a, p, dp = polynomial(gram, dgram, row)
        drest = a * drest + share * dp + arithmetic(dp, rest) + arithmetic(p, drest)
        rest = a * rest + share * p + arithmetic(p, rest)
        share = a * share
    return share, rest, drest


def widened(x: jax.Array) -> jax.Array:
    """x as wide matrices, in float32 or wider."""
    wide = transpose(x) if x.shape[-2] > x.shape[-1] else x
    return wide.astype(jnp.promote_types(x.dtype, jnp.float32))


def normalized(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`widened` x over its Frobenius norm, and the inverse of that norm."""
    wide = widened(x)
    scale = power_of_two_scale(wide)
    unit, inverse = unit_norm(wide * scale)
    return unit, scale * inverse


def oriented_like(wide: jax.Array, x: jax.Array) -> jax.Array:
    """Undoes `widened`: `wide` in the orientation and dtype of x."""
    return (wide if wide.shape == x.shape else transpose(wide)).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def polynomial_msign(x: jax.Array, coefficients: Coefficients, arithmetic: Arithmetic) -> jax.Array:
    """msign whose derivative is that of the polynomial on x / |x|_F; the only residual is x.

    With u = x / |x|_F and J the symmetric Jacobian of the iteration at u, the derivative is J (I - u u^T) /
    |x|_F and its transpose (I - u u^T) J / |x|_F, u as a vector.
    """
    return oriented_like(iterate(normalized(x)[0], coefficients, arithmetic), x)


@polynomial_msign.defjvp
def _polynomial_msign_jvp(coefficients, arithmetic, primals, tangents):
    (x,), (dx,) = primals, tangents

    def tangential(unit, v):
        return v - unit * inner(unit, v)

    def jacobian(x, v):
        unit, inverse = normalized(x)
        v = inverse * tangential(unit, widened(v))
        return oriented_like(directional_derivative(unit, v, coefficients, arithmetic), x)

    def jacobian_transpose(x, v):
        unit, inverse = normalized(x)
        v = directional_derivative(unit, widened(v), coefficients, arithmetic)
        return oriented_like(inverse * tangential(unit, v), x)

    value = polynomial_msign(x, coefficients, arithmetic)
    return value, linear_map_with_known_transpose(jacobian, jacobian_transpose, x, dx)
