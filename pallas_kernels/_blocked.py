"""The lower triangle by recursive halves, in plain XLA: fewer multiply-adds on any platform.

```
[ S₁₁  S₂₁ᴴ ]      S₂₁ = alpha·X₂ Y₁ᴴ + beta·C₂₁,
[ S₂₁  S₂₂  ]      S₁₁ and S₂₂ in the same way.
```

One level costs 3/4 of the full product's multiply-adds, two 5/8. A block off the diagonal is
copied twice into the result, the few on the diagonal are mirrored: on a CPU much cheaper than mirroring the
whole matrix, where a transposed pass misses the cache on every element.

A loop over equal blocks would do less work still and compile faster, but runs them one after the other: on two
cores a whole iteration takes longer than with these halves, of which XLA runs several at once.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _reference
from pallas_kernels._reference import epilogue, product
from pallas_kernels._unknown_to_xla import unknown_to_xla

# Rows of the smallest block, and the deepest recursion: benchmarks/symmetric_product.py compares others.
LEAF = 128
DEPTH = 2


def symmetric_product(
    x: jax.Array,
    y: jax.Array | None,
    c: jax.Array | None,
    alpha: jax.Array,
    beta: jax.Array,
    *,
    leaf: int = LEAF,
    depth: int = DEPTH,
) -> jax.Array:
    """``alpha·X Yᴴ + beta·C`` by halves; the arguments are checked by the public op."""
    *batch, m, _ = x.shape
    if m <= leaf or depth == 0:
        return _reference.symmetric_product(x, y, c, alpha, beta)
    one = functools.partial(_by_halves, leaf=leaf, depth=depth)
    if math.prod(batch) <= 1 or jax.default_backend() != "cpu":
        return one(x, y, c, alpha, beta)
    # One matrix after the other: blocks of a whole batch would be copied through main memory at each level.
    each = x, y, c, jnp.broadcast_to(alpha, batch), jnp.broadcast_to(beta, batch)
    each = jax.tree.map(lambda a: a.reshape(-1, *a.shape[len(batch) :]), each)
    return lax.map(lambda arguments: one(*arguments), each).reshape(*batch, m, m)


def _by_halves(x, y, c, alpha, beta, *, leaf, depth):
    y = x if y is None else y
    starts = _starts(0, x.shape[-2], leaf, depth)
    at = dict(zip(starts, unknown_to_xla(starts), strict=True))

    def cut(a, start, size, axis=-2):
        return lax.dynamic_slice_in_dim(a, at[start], size, axis, allow_negative_indices=False)

    def square(start, size, depth):
        """S_ii, whose first row is `start`."""
        if size <= leaf or depth == 0:
            addend = None if c is None else cut(cut(c, start, size), start, size, axis=-1)
            return _reference.symmetric_product(cut(x, start, size), cut(y, start, size), addend, alpha, beta)
        half = size // 2
        second = start + half, size - half
        addend = None if c is None else cut(cut(c, *second), start, half, axis=-1)
        low = epilogue(product(cut(x, *second), cut(y, start, half)), addend, alpha, beta).astype(x.dtype)
        top = jnp.concatenate([square(start, half, depth - 1), low.mT.conj()], axis=-1)
        return jnp.concatenate([top, jnp.concatenate([low, square(*second, depth - 1)], axis=-1)], axis=-2)

    return square(0, x.shape[-2], depth)


def _starts(start, size, leaf, depth):
    """The first rows of all blocks."""
    if size <= leaf or depth == 0:
        return [start]
    half = size // 2
    return _starts(start, half, leaf, depth - 1) + _starts(start + half, size - half, leaf, depth - 1)
