"""Define a linear map together with its transpose, with derivatives of every order and a batching rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jaxtyping import Array, Float


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

    is one whose "solver" is `apply`, always invertible whatever J is. Differentiating the solve in `at` gives
    J' v + J v', the product rule.

    Args:
      apply: (at, v) -> J v, differentiable in `at`; the same shape in and out. It may close over Python values, but
        not over arrays: inside `jax.shard_map` those would not get the varying mesh axes of the others.
      apply_transpose: (at, v) -> J^T v, the same.
      at: The point, a tree of arrays. Inside `jax.shard_map` they vary over the same mesh axes as `direction`.
      direction: v.
    """

    # Packed in one array: transposing the solve asserts that every leaf of its right-hand side is linear, and
    # the zero block of a pair is not.
    def system(packed):
        return jnp.stack([packed[1], packed[0] - apply(at, packed[1])])

    def solver(f):
        def solve(_, packed):
            # Where layers are unrolled, XLA would merge this recomputation with the forward pass and keep the
            # intermediates alive. The barrier prevents it on accelerators, rolled loops do on every backend.
            point, v = lax.optimization_barrier((at, packed[0]))
            return jnp.stack([f(point, v) + packed[1], v])

        return solve

    right_hand_side = jnp.stack([direction, jnp.zeros_like(direction)])
    solution = lax.custom_linear_solve(
        system, right_hand_side, solver(apply), transpose_solve=solver(apply_transpose)
    )
    return solution[0]
