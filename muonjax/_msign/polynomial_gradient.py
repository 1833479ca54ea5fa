"""Newton-Schulz iteration whose derivative is that of the polynomial that ran,
and which keeps its input alone.

The iteration maps X = U diag(s) V^T to U diag(f(s)) V^T for an odd polynomial f. That map is the
gradient of the spectral function sum_i F(s_i), F' = f, so its Jacobian is a Hessian: symmetric. The
vector-Jacobian product is therefore the Jacobian-vector product in the direction of the cotangent,
which needs X and no intermediate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from muonjax._common.linalg import MatrixProduct, adjoint, identity_like
from muonjax._msign.inputs import normalized
from muonjax._newton_schulz.coefficients import Coefficients

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _gram(
    x: Float[Array, "*batch m n"], dot: MatrixProduct
) -> Float[Array, "*batch m m"]:
    """X X^T. Its derivative dX X^T + X dX^T takes one product, where JAX's own would take two."""
    return dot.with_adjoint(x)


@_gram.defjvp
def _gram_jvp(dot, primals, tangents):
    (x,), (dx,) = primals, tangents
    product = dot.with_adjoint(dx, x)
    return _gram(x, dot), product + adjoint(product)


def iterate(
    x: Float[Array, "*batch m n"],
    rows: Float[Array, "steps 3"],
    dot: MatrixProduct,
) -> Float[Array, "*batch m n"]:
    """X after X <- (a I + b A + c A^2) X with A = X X^T for each row (a, b, c), as a rolled loop.

    Args:
      x: Wide for speed; singular values inside the rows' interval.
      rows: Each (a, b, c).
      dot: The matrix product.

    Returns:
      U diag(f(s)) V^T, f the composition of the odd quintics.
    """

    def step(x, row):
        a, b, c = row
        # With any number tau, and D = A - tau I,
        #   a I + b A + c A^2 = alpha I + beta D + c D^2,  alpha = a + b tau + c tau^2,
        #    beta = b + 2 c tau.
        # Here tau is the mean eigenvalue of A. The closer the singular values are to each other,
        # the smaller D is, and with it the rounding of the products;
        # the identity's share needs no product.
        gram = _gram(x, dot)
        # The sum is the same for any tau, so derivatives may take tau for a constant.
        trace = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
        tau = lax.stop_gradient(trace / gram.shape[-1])
        distance = gram - tau * identity_like(gram)
        alpha = a + tau * (b + c * tau)
        beta = b + 2 * c * tau
        # X <- alpha X + (beta D + c D^2) X, where D D^T is D^2, as D is symmetric
        rest = beta * distance + c * _gram(distance, dot)
        return alpha * x + dot(rest, x), None

    return lax.scan(step, x, rows)[0]


@functools.partial(jax.checkpoint, static_argnums=(1, 2))
def polynomial_msign(
    x: Float[Array, "*batch m n"], coefficients: Coefficients, dot: MatrixProduct
) -> Float[Array, "*batch m n"]:
    """msign whose derivative is that of the polynomial on x / |x|_F; the backward pass keeps
    x alone."""
    # The polar factor of X^T is the transpose of that of X,
    # and the Gram matrix of wide X is the smaller one.
    is_tall = x.shape[-2] > x.shape[-1]
    # The backward pass of `iterate_keeping_input` runs the steps again from its input, `unit`, and
    # keeps that alone. The checkpoint around this function keeps x instead, of half the size in
    # bfloat16, and normalizes it again.
    unit = normalized(x.mT if is_tall else x)
    # Inside of `jax.shard_map` the rows must vary over the same mesh axes as x. The derivative of
    # the iteration is written as a `lax.custom_linear_solve`, so that it is its own transpose. JAX
    # traces the functions of the solve with the rows as they are, and later passes them rows that
    # vary as x does: the types would differ from those that were traced. So a zero that varies as x
    # does is added here.
    varying_zero = jnp.zeros_like(unit, shape=())
    rows = jnp.asarray(coefficients, unit.dtype) + varying_zero
    y = iterate_keeping_input(unit, rows, dot).astype(x.dtype)
    return y.mT if is_tall else y


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def iterate_keeping_input(
    x: Float[Array, "*batch m n"], rows: Float[Array, "steps 3"], dot: MatrixProduct
) -> Float[Array, "*batch m n"]:
    """`iterate`, whose derivative keeps x alone, forward and transposed. `rows` are constants."""
    return iterate(x, rows, dot)


@iterate_keeping_input.defjvp
def _iterate_keeping_input_jvp(dot, primals, tangents):
    x, rows = primals
    # The rows are constants.
    dx, _ = tangents

    def jacobian(v):
        """J v, where J is the Jacobian of the iteration at x = U diag(s) V^T.

        The iteration maps x to U diag(f(s)) V^T, the gradient of sum_i F(s_i) with F' = f. So J is
        a Hessian, and symmetric.
        """
        # A rolled loop, which keeps nothing of its steps
        _, tangent = jax.jvp(lambda x: iterate(x, rows, dot), (x,), (v,))
        return tangent

    # J dx. Reverse mode applies J^T = J, which is `jacobian` again, and keeps x alone for it.
    return iterate_keeping_input(x, rows, dot), symmetric_linear_map(jacobian, dx)


def symmetric_linear_map(
    apply: Callable[[jax.Array], jax.Array], direction: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    r"""`apply(direction)`, where `apply` is a linear map J that is its own transpose.

    So its derivative in reverse mode is `apply` again, and keeps only what `apply` closes over.

    `jax.custom_derivatives.linear_call` would say this, but has no batching rule and no derivative
    in what `apply` closes over; `jax.custom_vjp` loses forward mode.
    A linear solve has all of them, and

    $$\begin{bmatrix} 0 & I \\ I & -J \end{bmatrix}^{-1} \binom{v}{0} = \binom{J v}{v}$$

    is one whose "solver" is `apply`, always invertible whatever J is, and symmetric as J is.
    If J depends on x, differentiating the solve gives J' v + J v', the product rule.

    Args:
      apply: v -> J v, differentiable in the arrays that it closes over; the same shape in and out.
        Inside of `jax.shard_map` these arrays must vary over the same mesh axes as `direction`
        (`polynomial_msign` says why).
      direction: v.
    """

    # The unknowns are (p, u), the right-hand side is (v, w), here with w = 0: the first row of the
    # system says u = v, the second p - J u = w. The two blocks are one array. As a pair, the block
    # of zeros would be a constant, and JAX transposes a solve only if every leaf of its right-hand
    # side is linear.
    def system(packed):
        # [[0, I], [I, -J]] (p, u) = (u, p - J u)
        p, u = packed
        return jnp.stack([u, p - apply(u)])

    def solve(_, packed):
        # The inverse maps (v, w) to (J v + w, v).
        v, w = packed
        return jnp.stack([apply(v) + w, v])

    right_hand_side = jnp.stack([direction, jnp.zeros_like(direction)])
    solution = lax.custom_linear_solve(system, right_hand_side, solve, symmetric=True)
    # p = J v
    return solution[0]
