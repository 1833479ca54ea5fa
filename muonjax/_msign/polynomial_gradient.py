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
    gram: Float[Array, "*batch m m"], row: Float[Array, " 3"], dot: MatrixProduct
) -> AboutMean:
    r"""One polynomial of A = X X^T, in powers of A's distance D from its mean eigenvalue:

    $$aI + bA + cA^2 = \alpha I + \beta D + cD^2, \qquad D = A - \tau I, \quad \tau = \operatorname{tr} A / m.$$

    The closer the singular values are to each other, the smaller D is, and with it the rounding of the products;
    the identity's share needs no product.
    """
    a, b, c = row
    m = gram.shape[-1]
    # The sum is the same about any number, so the mean may be a constant.
    trace = jnp.trace(gram, axis1=-2, axis2=-1)
    tau = lax.stop_gradient(trace[..., None, None] / m)
    # D = A - tau I
    distance = gram - tau * identity_like(gram)
    # alpha = a + b tau + c tau^2,  beta = b + 2 c tau
    slope = b + 2 * c * tau
    share = a + tau * (b + c * tau)
    rest = slope * distance + c * dot(distance, distance)
    return AboutMean(share, rest, slope, distance)


def iterate(
    x: Float[Array, "*batch m n"],
    rows: Float[Array, "steps 3"],
    dot: MatrixProduct,
    gram: Callable[[jax.Array], jax.Array] | None = None,
) -> Float[Array, "*batch m n"]:
    """X <- (a I + b A + c A^2) X with A = X X^T, once for each row of `rows`, as a rolled loop.

    Args:
      x: Wide for speed; singular values inside the rows' interval.
      rows: Each (a, b, c).
      dot: The matrix product.
      gram: Makes A from X; None: A = X X^T.

    Returns:
      U diag(f(s)) V^T, f the composition of the odd quintics.
    """

    def step(x, row):
        # X <- alpha X + (beta D + c D^2) X
        a = dot.with_adjoint(x, x) if gram is None else gram(x)
        polynomial = about_mean(a, row, dot)
        return polynomial.share * x + dot(polynomial.rest, x), None

    return lax.scan(step, x, rows)[0]


def directional_derivative(
    x: Float[Array, "*batch m n"],
    direction: Float[Array, "*batch m n"],
    rows: Float[Array, "steps 3"],
    dot: MatrixProduct,
) -> Float[Array, "*batch m n"]:
    """The derivative of `iterate` at x in `direction`; symmetric as a map of `direction`.

    A rolled loop over segments of one or two steps (`_segment_length`), which keeps nothing. A segment takes five
    products of m^2 n however long it is, and of m^3 two for one step, twelve for two.
    """

    def segment(x, dx, rows):
        """The segment at x as the map X -> share X + R X, and its derivative in the direction dx."""
        # A = X X^T,  dA = dX X^T + X dX^T
        gram = dot.with_adjoint(x, x)
        dgram = plus_transpose(dot.with_adjoint(dx, x))
        # The segment is X -> share X + R X, so dX -> share dX + dR X + R dX: the share is a constant.
        share, rest, drest = _composition(gram, dgram, rows, dot)
        dx = share * dx + dot(drest, x) + dot(rest, dx)
        return share, rest, dx

    def advance(carry, rows):
        x, dx = carry
        share, rest, dx = segment(x, dx, rows)
        return (share * x + dot(rest, x), dx), None

    num_steps = len(rows)
    length = min(_segment_length(x, dot), num_steps)
    # X, and its derivative in `direction`
    carry = (x, direction)
    # An odd step comes first, then segments of equal length.
    odd = num_steps % length
    if odd:
        carry, _ = advance(carry, rows[:odd])
    # [segments, length, 3]: five steps in twos are one odd step, one segment, and the last one below.
    segments = rows[odd:-length].reshape(-1, length, 3)
    (x, dx), _ = lax.scan(advance, carry, segments)
    # The last segment needs no new X.
    _, _, dx = segment(x, dx, rows[-length:])
    return dx


def _segment_length(x: Float[Array, "*batch m n"], dot: MatrixProduct) -> int:
    """How many steps of a derivative share the Gram matrix of x: two where that is less work, else one.

    One in half precision, where the rounding of a Gram matrix that is carried over a step can be far larger than its
    small eigenvalues.
    """
    m, n = x.shape[-2:]
    # The work of two steps, in units of m^2, by the products that `directional_derivative` counts.
    work_together = 5 * n + 12 * m
    work_singly = 2 * (5 * n + 2 * m)
    is_half = jnp.finfo(dot.operands).bits < 32
    return 1 if is_half or work_together >= work_singly else 2


def _composition(
    gram: Float[Array, "*batch m m"],
    dgram: Float[Array, "*batch m m"],
    rows: Float[Array, "steps 3"],
    dot: MatrixProduct,
) -> tuple[
    Float[Array, "*batch 1 1"], Float[Array, "*batch m m"], Float[Array, "*batch m m"]
]:
    """The composition of `rows` as a map of X, X -> share X + R X, made of A = X X^T alone; and dR, the tangent.

    Returns:
      The share, R, and dR.
    """

    def polynomial(gram, dgram, row):
        # d(beta D + c D^2) = beta dA + c (dA D + D dA), as D differs from A by a constant.
        c = row[2]
        share, rest, slope, distance = about_mean(gram, row, dot)
        return share, rest, slope * dgram + c * plus_transpose(dot(dgram, distance))

    # A step maps X to (alpha I + P) X.
    alpha, p, dp = polynomial(gram, dgram, rows[0])
    share, rest, drest = alpha, p, dp
    for row in rows[1:]:
        # With B = alpha I + P: A <- B A B and dA <- T + T^T, where T = (B dA / 2 + dP A) B.
        half = 0.5 * (alpha * dgram + dot(p, dgram)) + dot(dp, gram)
        dgram = plus_transpose(alpha * half + dot(half, p))
        product = alpha * gram + dot(p, gram)
        gram = alpha * product + dot(product, p)
        alpha, p, dp = polynomial(gram, dgram, row)
        # (alpha I + P) (share I + R) = alpha share I + (alpha R + share P + P R)
        drest = alpha * drest + share * dp + dot(dp, rest) + dot(p, drest)
        rest = alpha * rest + share * p + dot(p, rest)
        share = alpha * share
    return share, rest, drest


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
    derivative = functools.partial(directional_derivative, dot=dot)
    tangent = tangent_by_normalization(
        normalized, lambda unit: unit, derivative, primals, tangents
    )
    return polynomial_msign(*primals, dot), tangent


def tangent_by_normalization(
    normalized: Callable[..., tuple[jax.Array, jax.Array]],
    dual: Callable[[jax.Array], jax.Array],
    derivative: Callable[..., jax.Array],
    primals: tuple[jax.Array, jax.Array],
    tangents: tuple[jax.Array, jax.Array],
) -> Float[Array, "*batch m n"]:
    """The tangent of f(u), u = x / r, from `derivative` J of f; it keeps x alone, forward and transposed.

    With r^2 = <x*, x>, where * is the linear `dual`, du = (dx - u <u*, dx>) / r. The transpose of J at u is J at u*; so
    the transpose of v -> J(u) (v - u <u*, v>) / r is w -> (v - u* <u, v>) / r with v = J(u*) w.

    Args:
      normalized: x -> u and 1 / r, wide (a tall x transposed) and in float32 or wider, as `widened` is.
      dual: The identity for the Frobenius norm, the transpose for tr(x^2).
      derivative: (u, v, rows) -> J(u) v.
      primals: x and the rows, which are the coefficients of the steps.
      tangents: dx and none of the rows, which are constants.
    """

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
