"""Low-rank Hadamard products (LoHa) whose large matrices are not kept for the backward pass.

ΔW = scale · (w1a·w1b) ∘ (w2a·w2b) has rank up to r² from four thin factors. Its derivative needs both
products, each as large as the weight; autodiff would keep them from the forward to the backward pass. Here
ΔW is made in blocks, and a block is computed again when its derivative is taken, so that only the thin factors
are kept between the passes.

The compiler must not undo the recomputation: if it sees the same product in both passes, it keeps the first. A
barrier before the second (`jax.checkpoint`'s own) prevents it, but XLA's CPU compiler drops the barrier in some
versions; two loops are never merged. So each recomputation is a loop and has the barrier.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from muonjax._linalg import at_least_float32

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

Factors: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # w1a, w1b, w2a, w2b

# A block is a quarter of the rows: its temporaries, about four, together are as large as one weight, and its
# products are large enough to run at full speed, which products of much fewer than 128 rows are not.
_BLOCKS = 4
_ROWS = 128


def hadamard_weight(
    w1a: Float[Array, "*batch m r"],
    w1b: Float[Array, "*batch r n"],
    w2a: Float[Array, "*batch m r"],
    w2b: Float[Array, "*batch r n"],
    *,
    scale: Float[Array, "*#batch"] | float = 1.0,
    tucker: tuple[Float[Array, "*window r r"], Float[Array, "*window r r"]] | None = None,
) -> Float[Array, "*batch_or_window m n"]:
    """A weight of rank up to r² from four factors of rank r:

        ΔW = scale · (w1a · w1b) ∘ (w2a · w2b)

    The derivative keeps the factors alone: neither product is kept after the forward pass. Forward mode, reverse
    mode, `vmap` and higher orders work.

    The Tucker form, for the kernel of a convolution, gives each side a core t [*window, r, r] in the middle:

        ΔK[window, i, o] = scale · ∏ₛ Σ_jl wₛa[i, j] · tₛ[window, j, l] · wₛb[l, o],  s = 1, 2

    Args:
      w1a: The first pair's left factor, [*batch, m, r].
      w1b: Its right factor, [*batch, r, n].
      w2a: The second pair's left factor, [*batch, m, r].
      w2b: Its right factor, [*batch, r, n].
      scale: Usually alpha / r; a number or an array [*batch]; differentiable.
      tucker: The two cores [*window, r, r]; the factors then have no batch.

    Returns:
      [*batch, m, n], or [*window, m, n] in the Tucker form.

    Raises:
      ValueError: If the factors do not fit each other, have an empty axis or are not floating point.

    Example:
      >>> import jax.numpy as jnp
      >>> a, b = jnp.ones((2, 1)), jnp.array([[1.0, 2.0, 3.0]])
      >>> hadamard_weight(a, b, a, b, scale=0.5)
      Array([[0.5, 2. , 4.5],
             [0.5, 2. , 4.5]], dtype=float32)

    Source: Hyeon-Woo et al., "FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated
    Learning" (2022), proposition 1, and proposition 3 for the Tucker form; Yeh et al., "Navigating
    Text-To-Image Customization: From LyCORIS Fine-Tuning to Model Evaluation" (2024), as LoHa.
    """
    factors = (w1a, w1b, w2a, w2b)
    check_factors("hadamard_weight", factors)
    dtype = common_dtype(*factors)
    if tucker is not None:
        return _tucker_weight(factors, tucker, scale).astype(dtype)
    batch = w1a.shape[:-2]
    if batch:
        scales = jnp.broadcast_to(jnp.asarray(scale, at_least_float32(dtype)), batch)
        return jax.vmap(lambda scale, *one: hadamard_weight(*one, scale=scale))(scales, *factors)

    def rows(start: Int[Array, ""] | int, count: int) -> Float[Array, "count n"]:
        return product(rows_of(factors, start, count), scale).astype(dtype)

    rows = jax.checkpoint(rows, static_argnums=1)
    m, n = w1a.shape[0], w1b.shape[1]
    count = rows_per_block(m)
    _, blocks = lax.scan(lambda _, start: (None, rows(start, count)), None, starts(m, count))
    weight = blocks.reshape(-1, n)
    return weight if len(weight) == m else jnp.concatenate([weight, rows(len(weight), m - len(weight))])


def column_norms(w: Float[Array, "... n"]) -> Float[Array, " n"]:
    """The Euclidean norm of each column of w, over all other axes, in float32 at least."""
    squares = jnp.sum(jnp.square(w.astype(accumulator(w))), axis=tuple(range(w.ndim - 1)))
    return jnp.sqrt(squares)


def common_dtype(*arrays: jax.Array) -> jnp.dtype:
    """The dtype that the arrays promote to, whatever `jax_numpy_dtype_promotion` says.

    A layer in half precision may hold its factors in float32, so promotion is part of what these functions do.
    """
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*arrays)


def accumulator(*arrays: jax.Array) -> jnp.dtype:
    """The dtype to multiply and sum in: at least float32."""
    return at_least_float32(common_dtype(*arrays))


def rows_of(factors: Factors, start: Int[Array, ""] | int, count: int) -> Factors:
    """The factors of `count` rows of ΔW."""
    w1a, w1b, w2a, w2b = factors
    a1, a2 = (lax.dynamic_slice_in_dim(a, start, count) for a in (w1a, w2a))
    return a1, w1b, a2, w2b


def product(
    factors: Factors, scale: Float[Array, ""] | float, precision: lax.PrecisionLike = None
) -> Float[Array, "m n"]:
    """scale · (w1a·w1b) ∘ (w2a·w2b), in float32 at least, with both products in memory."""
    # Half precision: the two products are multiplied with each other, so their rounding would be too.
    dtype = accumulator(*factors)
    first, second = (
        jnp.matmul(a, b, precision=precision, preferred_element_type=dtype)
        for a, b in (factors[:2], factors[2:])
    )
    return jnp.asarray(scale).astype(dtype) * first * second


def _tucker_weight(
    factors: Factors, cores: tuple[jax.Array, jax.Array], scale: Float[Array, ""] | float
) -> Float[Array, "*window m n"]:
    w1a, w1b, w2a, w2b = factors
    t1, t2 = cores
    r, window = w1a.shape[-1], t1.shape[:-2]
    if w1a.ndim != 2 or t1.shape != t2.shape or t1.shape[-2:] != (r, r):
        raise ValueError(
            f"hadamard_weight(…, tucker=…) needs two cores [*window, {r}, {r}] and factors without a batch, got "
            f"{t1.shape}, {t2.shape} and {w1a.shape}."
        )
    # t·b first: [*window, r, n] is thin, and then each position in the window is a plain LoHa weight.
    b1, b2 = (jnp.matmul(t, b).reshape(-1, *b.shape) for t, b in ((t1, w1b), (t2, w2b)))
    if math.prod(window) == 1:
        kernel = hadamard_weight(w1a, b1[0], w2a, b2[0], scale=scale)
    else:
        position = jax.checkpoint(lambda bs: product((w1a, bs[0], w2a, bs[1]), scale))
        kernel = lax.map(position, (b1, b2))
    return kernel.reshape(*window, w1a.shape[0], w1b.shape[1])


def rows_per_block(m: int) -> int:
    """The number of ΔW's m rows that are made at a time."""
    return block_length(m, max(_ROWS, -(-m // _BLOCKS)))


def block_length(length: int, most: int) -> int:
    """The length of equal blocks, each at most `most`; fewer elements than there are blocks remain at the end.

    There are at least two blocks: XLA unrolls a loop of one iteration, and only a loop protects the recomputation.
    """
    return max(1, length // max(2, -(-length // most)))


def starts(length: int, count: int) -> Int[Array, " blocks"]:
    """The first index of each whole block of `count`."""
    return jnp.arange(length // count) * count


def check_factors(call: str, factors: Factors) -> None:
    """Raises ValueError unless the four are factors of one weight, or of a stack of them."""
    shapes = [factor.shape for factor in factors]
    w1a, w1b = shapes[:2]
    fits = all(len(shape) >= 2 and shape[:-2] == w1a[:-2] for shape in shapes)
    if not fits or shapes[2:] != [w1a, w1b] or w1a[-1] != w1b[-2]:
        raise ValueError(
            f"{call} needs w1a and w2a [m, r], w1b and w2b [r, n], got {', '.join(map(str, shapes))}; "
            "are w1a and w1b exchanged?"
        )
    if 0 in w1a + w1b:
        raise ValueError(f"{call}: factors of shape {w1a} and {w1b} are empty; the rank must be > 0.")
    dtype = common_dtype(*factors)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{call} multiplies and differentiates floating-point factors, got {dtype}.")
