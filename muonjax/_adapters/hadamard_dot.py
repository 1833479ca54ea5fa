"""Beside the way of the gradient: x · ΔW and x · (W + ΔW) for LoHa's ΔW, with no matrix of its size but W.

Two forms: "rows" makes ΔW a few rows at a time, "kronecker" never makes it. Both are loops whose every block is
computed again when its derivative is due, so that the arguments are all that lives between the passes.

The cotangent of a loop's constant is gathered from zeros on, and XLA's CPU compiler writes these zeros, as large as
x, for every layer before the first layer runs. So x enters a loop twice: as a constant, which the derivative keeps,
and carried from turn to turn, which it differentiates. A carried cotangent starts from what comes after the loop,
and `_starts_here` makes that wait for the cotangent of y.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from muonjax._adapters.hadamard import (
    accumulator,
    block_length,
    check_factors,
    product,
    rows_per_block,
    starts,
)

_KRONECKER_COLUMNS = 128  # of the m × r² factor, at a time


def hadamard_dot(
    x: jax.Array,
    w1a: jax.Array,
    w1b: jax.Array,
    w2a: jax.Array,
    w2b: jax.Array,
    *,
    scale: jax.Array | float = 1.0,
    form: Literal["auto", "rows", "kronecker"] = "auto",
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """x · ΔW for the ΔW of `hadamard_weight`, without any m × n matrix.

    "rows" forms ΔW a quarter of its rows at a time: (2r + t)·m·n multiply-adds for t tokens. "kronecker" uses

        (A·B) ∘ (C·D) = (A ⊙ C) · (B ⊛ D)

    where A ⊙ C [m, r²] holds the Kronecker products of the rows of A and C, and B ⊛ D [r², n] those of the
    columns of B and D: t·r²·(m + n) multiply-adds, with no m × n in it, a few columns of r² at a time.

    "auto" takes "kronecker" where its multiply-adds are at most those of "rows" in the forward pass. It counts
    tokens, so one function may take different forms for training and for generation.

    Args:
      x: [..., m].
      w1a: [m, r], as in `hadamard_weight`.
      w1b: [r, n], as in `hadamard_weight`.
      w2a: [m, r], as in `hadamard_weight`.
      w2b: [r, n], as in `hadamard_weight`.
      scale: usually alpha / r; differentiable.
      form: "auto", "rows" or "kronecker".
      precision: of the products, as in `jax.lax.dot_general`.

    Returns:
      [..., n].

    Raises:
      ValueError: factors that do not fit, or not x; another `form`.

    Example:
      >>> import jax.numpy as jnp
      >>> a, b = jnp.ones((2, 1)), jnp.array([[1.0, 2.0, 3.0]])
      >>> hadamard_dot(jnp.ones((1, 2)), a, b, a, b)
      Array([[ 2.,  8., 18.]], dtype=float32)

    Source: Khatri and Rao (1968) for the identity; Hyeon-Woo et al. (2022) for the weight.
    """
    factors = (w1a, w1b, w2a, w2b)
    _check_dot("hadamard_dot", x, *factors)
    _check_form("hadamard_dot", form)
    if form == "auto":
        m, n, r, tokens = w1a.shape[0], w1b.shape[1], w1a.shape[1], x.size // x.shape[-1]
        form = "kronecker" if tokens * r**2 * (m + n) <= (2 * r + tokens) * m * n else "rows"
    dtype = jnp.result_type(x, *factors)
    dot = _dot_by_kronecker if form == "kronecker" else _dot_by_rows
    y = dot(x.reshape(-1, x.shape[-1]).astype(dtype), None, factors, scale, precision)
    return y.astype(dtype).reshape(*x.shape[:-1], w1b.shape[1])


def hadamard_linear(
    x: jax.Array,
    w: jax.Array,
    w1a: jax.Array,
    w1b: jax.Array,
    w2a: jax.Array,
    w2b: jax.Array,
    *,
    scale: jax.Array | float = 1.0,
    magnitude: jax.Array | None = None,
    form: Literal["auto", "rows", "kronecker"] = "auto",
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """The adapted linear map as a whole, x · (W + ΔW), or with a magnitude, DoRA's

        y = x · (W + ΔW) · diag(magnitude / ‖columns of W + ΔW‖)

    W + ΔW, the third matrix as large as the weight, is not kept either: the derivative keeps the arguments.
    The norm is differentiated with the rest.

    "rows" adds 2r·m·n multiply-adds to those of x·W, and "kronecker" adds t·r²·(m + n) for t tokens; "auto"
    takes "kronecker" where that is no more: up to t = 2·m·n / (r·(m + n)) tokens, 64 of them for 1024 × 1024
    and rank 16. A magnitude needs the norms of the whole weight, and so "rows".

    Args:
      x: [..., m].
      w: [m, n], usually frozen; if it is differentiated, its gradient is an m × n matrix of course.
      w1a: [m, r], as in `hadamard_weight`.
      w1b: [r, n], as in `hadamard_weight`.
      w2a: [m, r], as in `hadamard_weight`.
      w2b: [r, n], as in `hadamard_weight`.
      scale: usually alpha / r; differentiable.
      magnitude: [n] or None; see `column_norms` for the value that changes nothing at the start.
      form: "auto", "rows" or "kronecker".
      precision: of the products, as in `jax.lax.dot_general`.

    Returns:
      [..., n].

    Raises:
      ValueError: factors that do not fit; another `form`; "kronecker" with a magnitude.

    Example:
      >>> import jax.numpy as jnp
      >>> a, b = jnp.ones((2, 1)), jnp.array([[1.0, 2.0, 3.0]])
      >>> hadamard_linear(jnp.ones((1, 2)), jnp.ones((2, 3)), a, b, a, b)
      Array([[ 4., 10., 20.]], dtype=float32)

    Source: as `hadamard_dot`; Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation" (2024), equation 5.
    """
    factors = (w1a, w1b, w2a, w2b)
    _check_dot("hadamard_linear", x, *factors)
    _check_form("hadamard_linear", form)
    m, n, r, tokens = w1a.shape[0], w1b.shape[1], w1a.shape[1], x.size // x.shape[-1]
    if w.shape != (m, n):
        raise ValueError(f"hadamard_linear(x, w, …): w has shape {w.shape}, the factors make {(m, n)}.")
    if magnitude is not None and magnitude.shape != (n,):
        raise ValueError(
            f"hadamard_linear(…, magnitude=…) needs one for each of {n} columns, got {magnitude.shape}."
        )
    if magnitude is not None and form == "kronecker":
        raise ValueError(
            "hadamard_linear(…, magnitude=…, form='kronecker'): the norms need W + ΔW; use 'rows' or 'auto'."
        )
    if form == "auto":
        form = "kronecker" if magnitude is None and tokens * r * (m + n) <= 2 * m * n else "rows"
    # Multiplied in the precision of x and w: a layer in half precision may hold its factors in float32.
    rows = x.reshape(-1, m).astype(jnp.result_type(x, w))
    if form == "kronecker":
        y = _dot_by_kronecker(rows, w, factors, scale, precision)
    else:
        y = _dot_by_rows(rows, w, factors, scale, precision, magnitude)
    return y.astype(jnp.result_type(x, w, *factors)).reshape(*x.shape[:-1], n)


def _dot_by_rows(
    x: jax.Array,
    w: jax.Array | None,
    factors: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    scale: jax.Array | float,
    precision: lax.PrecisionLike,
    magnitude: jax.Array | None = None,
) -> jax.Array:
    """x [tokens, m] · (W + ΔW), as a sum over blocks of rows."""
    w1a, w1b, w2a, w2b = factors
    m, n = w1a.shape[0], w1b.shape[1]
    dtype = accumulator(x, *factors)

    def add(total: tuple[jax.Array, jax.Array, jax.Array], start: jax.Array | int, count: int):
        y, squares, carried = total
        a1, a2 = (lax.dynamic_slice_in_dim(a, start, count) for a in (w1a, w2a))
        block = product(a1, w1b, a2, w2b, scale, precision)
        if w is not None:
            block += lax.dynamic_slice_in_dim(w, start, count)
        if magnitude is not None:
            squares += jnp.sum(jnp.square(block), axis=0).astype(dtype)
        columns = [lax.dynamic_slice_in_dim(each, start, count, axis=1) for each in (x, carried)]
        return y + _multiply_kept(*columns, block, dtype, precision), squares, carried

    add = jax.checkpoint(add, static_argnums=2)
    count = rows_per_block(m)
    total = (jnp.zeros((x.shape[0], n), dtype), jnp.zeros(n, dtype), x)
    total, _ = lax.scan(lambda total, start: (add(total, start, count), None), total, starts(m, count))
    rest = m % count
    y, squares, carried = add(total, m - rest, rest) if rest else total
    y = _starts_here(y, carried)
    # A column of zeros has no direction: LyCORIS's epsilon keeps it finite.
    return y if magnitude is None else y * (magnitude / (jnp.sqrt(squares) + jnp.finfo(dtype).eps))


def _dot_by_kronecker(
    x: jax.Array,
    w: jax.Array | None,
    factors: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    scale: jax.Array | float,
    precision: lax.PrecisionLike,
) -> jax.Array:
    """x · W + scale · (x · (w1a ⊙ w2a)) · (w1b ⊛ w2b), a few ranks of the first pair at a time."""
    w1a, w1b, w2a, w2b = factors
    r = w1a.shape[1]
    dtype = accumulator(x, *factors)

    def add(total: tuple[jax.Array, jax.Array], start: jax.Array | int, count: int):
        y, carried = total
        a = lax.dynamic_slice_in_dim(w1a, start, count, axis=1)
        b = lax.dynamic_slice_in_dim(w1b, start, count)
        left = (a[:, :, None] * w2a[:, None, :]).reshape(len(a), -1)
        right = (b[:, None, :] * w2b[None, :, :]).reshape(-1, b.shape[1])
        inner = _multiply_kept(x, carried, left, dtype, precision).astype(x.dtype)
        return y + _multiply(inner, right, dtype, precision), carried

    add = jax.checkpoint(add, static_argnums=2)
    count = block_length(r, max(1, _KRONECKER_COLUMNS // r))
    total = (jnp.zeros((x.shape[0], w1b.shape[1]), dtype), x)
    total, _ = lax.scan(lambda total, start: (add(total, start, count), None), total, starts(r, count))
    rest = r % count
    y, carried = add(total, r - rest, rest) if rest else total
    y = scale * _starts_here(y, carried)
    return y if w is None else y + _multiply(x, w, dtype, precision)


def _multiply(x: jax.Array, w: jax.Array, dtype: Any, precision: lax.PrecisionLike) -> jax.Array:
    """x · w in the precision of x, summed in that of `dtype`."""
    y = jnp.matmul(x, w.astype(x.dtype), precision=precision, preferred_element_type=dtype)
    return y.astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _multiply_kept(
    x: jax.Array, carried: jax.Array, w: jax.Array, dtype: Any, precision: lax.PrecisionLike
) -> jax.Array:
    """`_multiply(x, w, …)`, whose derivative keeps x, and gives its cotangent to `carried`, which equals x."""
    return _multiply(x, w, dtype, precision)


@functools.partial(_multiply_kept.defjvp, symbolic_zeros=True)
def _(dtype: Any, precision: lax.PrecisionLike, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    x, _, w = primals
    _, dx, dw = tangents
    dy = jnp.zeros((x.shape[0], w.shape[1]), dtype)
    if not isinstance(dx, SymbolicZero):
        dy += _multiply(dx, w, dtype, precision)
    if not isinstance(dw, SymbolicZero):
        dy += _multiply(x, dw, dtype, precision)
    return _multiply_kept(*primals, dtype, precision), dy


@jax.custom_jvp
def _starts_here(y: jax.Array, carried: jax.Array) -> jax.Array:
    """y; the cotangent of `carried` becomes a zero, but one computed from the cotangent of y."""
    return y


@_starts_here.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    dy, dx = tangents
    return primals[0], dy.at[:1, :1].add(0 * dx[:1, :1].astype(dy.dtype))


def _check_form(call: str, form: str) -> None:
    if form not in ("auto", "rows", "kronecker"):
        raise ValueError(f"{call}(form={form!r}) is unknown; use 'auto', 'rows' or 'kronecker'.")


def _check_dot(
    call: str, x: jax.Array, w1a: jax.Array, w1b: jax.Array, w2a: jax.Array, w2b: jax.Array
) -> None:
    check_factors(call, w1a, w1b, w2a, w2b)
    if w1a.ndim != 2:
        raise ValueError(f"{call} takes factors of one matrix, got {w1a.shape}; use jax.vmap for a stack.")
    if x.ndim < 1 or x.shape[-1] != w1a.shape[0]:
        raise ValueError(f"{call}: x of shape {x.shape} does not end in {w1a.shape[0]}, the rows of w1a.")
