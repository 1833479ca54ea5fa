"""x · ΔW and x · (W + ΔW) for LoHa's ΔW, without a matrix as large as W besides W itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from jax import lax

from muonjax._adapters.hadamard import Factors, check_factors, common_dtype
from muonjax._adapters.hadamard_forms import dot_by_kronecker, dot_by_rows

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def hadamard_dot(
    x: Float[Array, "*tokens m"],
    w1a: Float[Array, "m r"],
    w1b: Float[Array, "r n"],
    w2a: Float[Array, "m r"],
    w2b: Float[Array, "r n"],
    *,
    scale: Float[Array, ""] | float = 1.0,
    form: Literal["auto", "rows", "kronecker"] = "auto",
    precision: lax.PrecisionLike = None,
) -> Float[Array, "*tokens n"]:
    """x · ΔW for the ΔW of `hadamard_weight`, without any m × n matrix.

    "rows" forms ΔW a quarter of its rows at a time: (2r + t)·m·n multiply-adds for t tokens. "kronecker" uses

        (A·B) ∘ (C·D) = (A ⊙ C) · (B ⊛ D)

    where A ⊙ C [m, r²] holds the Kronecker products of the rows of A and C, and B ⊛ D [r², n] those of the
    columns of B and D: t·r²·(m + n) multiply-adds, with no m × n in it, a few columns of r² at a time.

    "auto" takes "kronecker" where its multiply-adds are at most those of "rows" in the forward pass. It counts
    tokens, so training and generation may take different forms.

    Args:
      x: Tokens, [..., m].
      w1a: As in `hadamard_weight`, [m, r].
      w1b: As in `hadamard_weight`, [r, n].
      w2a: As in `hadamard_weight`, [m, r].
      w2b: As in `hadamard_weight`, [r, n].
      scale: Usually alpha / r; differentiable.
      form: "auto", "rows" or "kronecker"; see above.
      precision: Of the products, as in `jax.lax.dot_general`.

    Returns:
      [..., n].

    Raises:
      ValueError: If the factors or x do not fit, or `form` is another.

    Example:
      >>> import jax.numpy as jnp
      >>> a, b = jnp.ones((2, 1)), jnp.array([[1.0, 2.0, 3.0]])
      >>> hadamard_dot(jnp.ones((1, 2)), a, b, a, b)
      Array([[ 2.,  8., 18.]], dtype=float32)

    Source: Khatri and Rao (1968) for the identity; Hyeon-Woo et al. (2022) for the weight.
    """
    factors = (w1a, w1b, w2a, w2b)
    return _linear("hadamard_dot", x, None, factors, scale, None, form, precision)


def hadamard_linear(
    x: Float[Array, "*tokens m"],
    w: Float[Array, "m n"],
    w1a: Float[Array, "m r"],
    w1b: Float[Array, "r n"],
    w2a: Float[Array, "m r"],
    w2b: Float[Array, "r n"],
    *,
    scale: Float[Array, ""] | float = 1.0,
    magnitude: Float[Array, " n"] | None = None,
    form: Literal["auto", "rows", "kronecker"] = "auto",
    precision: lax.PrecisionLike = None,
) -> Float[Array, "*tokens n"]:
    """The adapted linear map as a whole, x · (W + ΔW), or with a magnitude, DoRA's

        y = x · (W + ΔW) · diag(magnitude / ‖columns of W + ΔW‖)

    W + ΔW is not kept either: the derivative keeps the arguments. The norm is differentiated with the rest.

    "rows" adds 2r·m·n multiply-adds to those of x·W, and "kronecker" adds t·r²·(m + n) for t tokens; "auto"
    takes "kronecker" where that is no more: up to t = 2·m·n / (r·(m + n)) tokens, 64 of them for 1024 × 1024
    and rank 16. A magnitude needs the norms of the whole weight, and so "rows".

    Args:
      x: Tokens, [..., m].
      w: The weight, [m, n], usually frozen: its gradient would be an m × n matrix.
      w1a: As in `hadamard_weight`, [m, r].
      w1b: As in `hadamard_weight`, [r, n].
      w2a: As in `hadamard_weight`, [m, r].
      w2b: As in `hadamard_weight`, [r, n].
      scale: Usually alpha / r; differentiable.
      magnitude: DoRA's, [n], or None. The norms of w's columns change nothing at the start, where ΔW = 0.
      form: "auto", "rows" or "kronecker"; see above.
      precision: Of the products, as in `jax.lax.dot_general`.

    Returns:
      [..., n].

    Raises:
      ValueError: If a shape does not fit, `form` is another, or it is "kronecker" with a magnitude.

    Example:
      >>> import jax.numpy as jnp
      >>> a, b = jnp.ones((2, 1)), jnp.array([[1.0, 2.0, 3.0]])
      >>> hadamard_linear(jnp.ones((1, 2)), jnp.ones((2, 3)), a, b, a, b)
      Array([[ 4., 10., 20.]], dtype=float32)

    Source: as `hadamard_dot`; Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation" (2024), equation 5.
    """
    factors = (w1a, w1b, w2a, w2b)
    return _linear("hadamard_linear", x, w, factors, scale, magnitude, form, precision)


def _linear(
    call: str,
    x: Float[Array, "*tokens m"],
    w: Float[Array, "m n"] | None,
    factors: Factors,
    scale: Float[Array, ""] | float,
    magnitude: Float[Array, " n"] | None,
    form: str,
    precision: lax.PrecisionLike,
) -> Float[Array, "*tokens n"]:
    """What both compute, x · ΔW where w is None, in the form that is asked for or that costs less."""
    check_factors(call, factors)
    (m, r), n = factors[0].shape[-2:], factors[1].shape[-1]
    if factors[0].ndim != 2:
        raise ValueError(
            f"{call} takes factors of one matrix, got {factors[0].shape}; use jax.vmap for a stack."
        )
    if x.ndim < 1 or x.shape[-1] != m:
        raise ValueError(f"{call}: x of shape {x.shape} does not end in {m}, the rows of w1a.")
    if form not in ("auto", "rows", "kronecker"):
        raise ValueError(f"{call}(form={form!r}) is unknown; use 'auto', 'rows' or 'kronecker'.")
    if w is not None and w.shape != (m, n):
        raise ValueError(f"{call}(x, w, …): w has shape {w.shape}, the factors make {(m, n)}.")
    if magnitude is not None and magnitude.shape != (n,):
        raise ValueError(f"{call}(…, magnitude=…) needs one for each of {n} columns, got {magnitude.shape}.")
    if magnitude is not None and form == "kronecker":
        raise ValueError(
            f"{call}(…, magnitude=…, form='kronecker'): the norms need W + ΔW; use 'rows' or 'auto'."
        )
    tokens = x.size // m
    if form == "auto":
        by_rows = (2 * r + (tokens if w is None else 0)) * m * n  # multiply-adds besides those of x·W
        form = "kronecker" if magnitude is None and tokens * r**2 * (m + n) <= by_rows else "rows"
    # Multiplied in the precision of x and w: a layer in half precision may hold its factors in float32.
    rows = x.reshape(-1, m).astype(common_dtype(x, *(factors if w is None else (w,))))
    if form == "kronecker":
        y = dot_by_kronecker(rows, w, factors, scale, precision)
    else:
        y = dot_by_rows(rows, w, factors, scale, precision, magnitude)
    return y.astype(common_dtype(rows, *factors)).reshape(*x.shape[:-1], n)
