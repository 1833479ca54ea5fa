"""The lower triangle by recursive halves, in plain XLA: fewer multiply-adds on any platform.

```
[ S₁₁  S₂₁ᴴ ]      S₂₁ = alpha·X₂ Y₁ᴴ + beta·C₂₁,
[ S₂₁  S₂₂  ]      S₁₁ and S₂₂ in the same way.
```

One level costs 3/4 of the full product's multiply-adds, two 5/8. A block off the diagonal is
copied twice into the result, the few on the diagonal are mirrored: on a CPU much cheaper than mirroring the
whole matrix, where a transposed pass misses the cache on every element.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _reference
from pallas_kernels._reference import epilogue, product

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
    one = functools.partial(_halves, leaf=leaf, depth=depth)
    if math.prod(batch) <= 1 or m <= leaf or jax.default_backend() != "cpu":
        return one(x, y, c, alpha, beta)
    # One matrix after the other: blocks of a whole batch would be copied through main memory at each level.
    each = x, y, c, jnp.broadcast_to(alpha, batch), jnp.broadcast_to(beta, batch)
    each = jax.tree.map(lambda a: a.reshape(-1, *a.shape[len(batch) :]), each)
    return lax.map(lambda arguments: one(*arguments), each).reshape(*batch, m, m)


def _halves(x, y, c, alpha, beta, *, leaf, depth):
    m = x.shape[-2]
    if m <= leaf or depth == 0:
        return _reference.symmetric_product(x, y, c, alpha, beta)
    first, second = slice(0, m // 2), slice(m // 2, m)

    def diagonal(half):
        rows = x[..., half, :], None if y is None else y[..., half, :]
        addend = None if c is None else c[..., half, half]
        return _halves(*rows, addend, alpha, beta, leaf=leaf, depth=depth - 1)

    p = product(x[..., second, :], (x if y is None else y)[..., first, :])
    low = epilogue(p, None if c is None else c[..., second, first], alpha, beta).astype(x.dtype)
    top = jnp.concatenate([diagonal(first), low.mT.conj()], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([low, diagonal(second)], axis=-1)], axis=-2)
