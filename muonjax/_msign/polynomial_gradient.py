"""Newton-Schulz iteration whose derivative is that of the polynomial that ran, and which keeps its input alone.

The iteration maps X = U diag(s) V^T to U diag(f(s)) V^T for an odd polynomial f. That map is the gradient of
the spectral function sum_i F(s_i), F' = f, so its Jacobian is a Hessian: symmetric. The vector-Jacobian
product is therefore the Jacobian-vector product in the direction of the cotangent, which needs X and no
intermediate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from muonjax._common.linalg import MatrixProduct, adjoint, identity_like
from muonjax._msign.inputs import inner, normalized, oriented_like, widened

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def plus_transpose(x: Float[Array, "*batch m m"]) -> Float[Array, "*batch m m"]:
    """x + x^T."""
    return x + adjoint(x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def gram(
    x: Float[Array, "*batch m n"], dot: MatrixProduct
) -> Float[Array, "*batch m m"]:
    """X X^T. Its derivative dX X^T + X dX^T takes one product, where JAX's own would take two."""
    return dot.with_adjoint(x, x)


@gram.defjvp
def _gram_jvp(dot, primals, tangents):
    (x,), (dx,) = primals, tangents
    return gram(x, dot), plus_transpose(dot.with_adjoint(dx, x))


Square = Callable[[jax.Array, MatrixProduct], jax.Array]
"""Makes a square of a matrix with these products, such as `gram`."""


class AboutMean(NamedTuple):
    """A quintic step's polynomial of A = X X^T, in powers of D, A's distance from its mean eigenvalue tau.

    Attributes:
      share: alpha, [*batch, 1, 1], the share of the identity.
      rest: beta D + c D^2, [*batch, m, m].
      slope: beta, [*batch, 1, 1].
      distance: D = A - tau I, [*batch, m, m].
    """

    share: jax.Array
    rest: jax.Array
    slope: jax.Array
    distance: jax.Array


def about_mean(
    a: Float[Array, "*batch m m"],
    row: Float[Array, " 3"],
    dot: MatrixProduct,
    square: Square = gram,
) -> AboutMean:
    r"""One polynomial of A = X X^T, in powers of A's distance D from its mean eigenvalue:

    $$aI + bA + cA^2 = \alpha I + \beta D + cD^2, \qquad D = A - \tau I, \quad \tau = \operatorname{tr} A / m.$$

    The closer the singular values are to each other, the smaller D is, and with it the rounding of the products;
    the identity's share needs no product.
    """
    constant, linear, quadratic = row
    # The sum is the same about any number, so the mean may be a constant.
    trace = jnp.trace(a, axis1=-2, axis2=-1)
    tau = lax.stop_gradient(trace[..., None, None] / a.shape[-1])
    # D = A - tau I
    distance = a - tau * identity_like(a)
    # alpha = a + b tau + c tau^2,  beta = b + 2 c tau
    slope = linear + 2 * quadratic * tau
    share = constant + tau * (linear + quadratic * tau)
    # beta D + c D^2
    rest = slope * distance + quadratic * square(distance, dot)
    return AboutMean(share, rest, slope, distance)


def iterate(
    x: Float[Array, "*batch m n"],
    rows: Float[Array, "steps 3"],
    dot: MatrixProduct,
    square: Square = gram,
) -> Float[Array, "*batch m n"]:
    """X <- (a I + b A + c A^2) X with A = X X^T, once for each row of `rows`, as a rolled loop.

    Args:
      x: Wide for speed; singular values inside the rows' interval.
      rows: Each (a, b, c).
      dot: The matrix product.
      square: Makes A of X, and D^2 of A's distance D from its mean; by default A = X X^T.

    Returns:
      U diag(f(s)) V^T, f the composition of the odd quintics.
    """

    def step(x, row):
        # X <- alpha X + (beta D + c D^2) X
        a = square(x, dot)
        polynomial = about_mean(a, row, dot, square)
        return polynomial.share * x + dot(polynomial.rest, x), None

    return lax.scan(step, x, rows)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def polynomial_msign(
    x: Float[Array, "*batch m n"], rows: Float[Array, "steps 3"], dot: MatrixProduct
) -> Float[Array, "*batch m n"]:
    """msign whose derivative is that of the polynomial on x / |x|_F; it keeps x alone. `rows` are constants.

    With u = x / |x|_F and J the symmetric Jacobian of the iteration at u, the derivative is J (I - u u^T) /
    |x|_F and its transpose (I - u u^T) J / |x|_F, u as a vector.
    """
    unit, _ = normalized(x)
    return oriented_like(iterate(unit, rows, dot), x)


@polynomial_msign.defjvp
def _polynomial_msign_jvp(dot, primals, tangents):
    tangent = tangent_by_normalization(
        normalized,
        lambda unit: unit,
        functools.partial(iterate, dot=dot),
        primals,
        tangents,
    )
    return polynomial_msign(*primals, dot), tangent


def tangent_by_normalization(
    normalized: Callable[..., tuple[jax.Array, jax.Array]],
    dual: Callable[[jax.Array], jax.Array],
    f: Callable[..., jax.Array],
    primals: tuple[jax.Array, jax.Array],
    tangents: tuple[jax.Array, jax.Array],
) -> Float[Array, "*batch m n"]:
    """The tangent of f(u), u = x / r, where J is the derivative of f; it keeps x alone, forward and transposed.

    With r^2 = <x*, x>, where * is the linear `dual`, du = (dx - u <u*, dx>) / r. The transpose of J at u is J at u*; so
    the transpose of v -> J(u) (v - u <u*, v>) / r is w -> (v - u* <u, v>) / r with v = J(u*) w.

    Args:
      normalized: x -> u and 1 / r, wide (a tall x transposed) and in float32 or wider, as `widened` is.
      dual: The identity for the Frobenius norm, the transpose for tr(x^2).
      f: (u, rows) -> f(u), as a rolled loop: its derivative keeps nothing.
      primals: x and the rows, which are the coefficients of the steps.
      tangents: dx and none of the rows, which are constants.
    """

    def derivative(u, v, rows):
        # J(u) v
        _, tangent = jax.jvp(lambda u: f(u, rows), (u,), (v,))
        return tangent

    def jacobian(at, dx):
        # `at` is the point, which is `primals`. u and dx are wide, and `oriented_like` undoes that for a tall x.
        x, rows = at
        u, inverse = normalized(x)
        dx = widened(dx)
        # J(u) (dx - u <u*, dx>) / r
        du = inverse * (dx - u * inner(dual(u), dx))
        return oriented_like(derivative(u, du, rows), x)

    def jacobian_transpose(at, w):
        x, rows = at
        u, inverse = normalized(x)
        u_dual = dual(u)
        # (v - u* <u, v>) / r with v = J(u*) w
        v = derivative(u_dual, widened(w), rows)
        return oriented_like(inverse * (v - u_dual * inner(u, v)), x)

    return linear_map_with_known_transpose(
        jacobian, jacobian_transpose, primals, tangents[0]
    )


def linear_map_with_known_transpose(
    apply: Callable[[Any, jax.Array], jax.Array],
    apply_transpose: Callable[[Any, jax.Array], jax.Array],
    at: Any,
    direction: Float[Array, "*shape"],
) -> Float[Array, "*shape"]:
    r"""Applies the linear map `direction -> apply(at, direction)`, whose transpose is `apply_transpose(at, .)`.

    `jax.custom_derivatives.linear_call` would say this, but has no batching rule and no derivative in `at`;
    `jax.custom_vjp` loses forward mode. A linear solve has all of them, and with J the map,

    $$\begin{bmatrix} 0 & I \\ I & -J \end{bmatrix}^{-1} \binom{v}{0} = \binom{J v}{v}$$

    is one whose "solver" is `apply`, always invertible whatever J is. Differentiating the solve in `at` and v
    gives J' v + J v', the product rule.

    Args:
      apply: (at, v) -> J v, differentiable in `at`; the same shape in and out. It may close over Python values, but
        not over arrays: inside `jax.shard_map` those would not get the varying mesh axes of the others.
      apply_transpose: (at, v) -> J^T v, the same.
      at: The point, a tree of arrays. Inside `jax.shard_map` they vary over the same mesh axes as `direction`.
      direction: v.
    """

    # The two blocks are packed in one array: transposing the solve asserts that every leaf of its right-hand side is
    # linear, and the zero block of a pair is not.
    def system(packed):
        # [[0, I], [I, -J]] (p, v) = (v, p - J v)
        p, v = packed
        return jnp.stack([v, p - apply(at, v)])

    def solver(f):
        def solve(_, packed):
            # Where layers are unrolled, XLA would merge this recomputation with the forward pass and keep the
            # intermediates alive. The barrier prevents it on accelerators, rolled loops do on every backend.
            point, v = lax.optimization_barrier((at, packed[0]))
            # The inverse maps (v, w) to (J v + w, v).
            return jnp.stack([f(point, v) + packed[1], v])

        return solve

    right_hand_side = jnp.stack([direction, jnp.zeros_like(direction)])
    solution = lax.custom_linear_solve(
        system, right_hand_side, solver(apply), transpose_solve=solver(apply_transpose)
    )
    return solution[0]
