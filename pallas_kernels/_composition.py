"""Compose odd polynomials of a matrix X on its Gram matrix R = X Xᵀ alone.

```
p_k(..p_1(X)) = a (1 + T) X,    a: the product of all factors a

Q = (b / a) R + (c / a) R²,    T <- T + Q + T Q,    R <- a² (1 + Q) R (1 + Q)
```

A step keeps R positive, whatever the rounding of Q, if its two products with R are exact: they are of float32, or of
two float16 numbers for each, and the others of float16. The identity is never added to a matrix before that is
rounded: a multiplies its rounding errors.
"""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels._kernel_batch import folded, refusal
from pallas_kernels._mosaic_gpu import require

Rows = tuple[tuple[float, float, float], ...]

# The kernel's matrices: one CTA's shared memory holds no larger ones.
LARGEST = 128
_MULTIPLE = 64


def composition(
    r: jax.Array, rows: Rows, alpha: float, beta: float, implementation: str | None = None
) -> jax.Array:
    """alpha T + beta I in float16, from R [*batch, m, m] in float32, whose eigenvalues are in [0, 1].

    Args:
      r: R.
      rows: (a, b, c) of each polynomial a x + b x^3 + c x^5, with a and b not 0.
      alpha: A number.
      beta: A number.
      implementation: "hopper" for one launch of a kernel, m at most `LARGEST`; None for XLA's products.
    """
    if implementation == "hopper":
        return _by_kernel(r, rows, alpha, beta)
    total = None
    for number, (a, b, c) in enumerate(rows, 1):
        q = jax.lax.optimization_barrier(b / a * r + (c / a * _coarse(r, r) if c else 0))
        # Q on the right here and on the left below: XLA would join products that share an operand, and copy the others.
        total = q if total is None else total + q + _coarse(total, q)
        if number < len(rows):
            once = r + _exact(q, r)
            r = a**2 * (once + _exact(once, q))
    assert total is not None
    identity = jnp.broadcast_to(jnp.eye(r.shape[-1], dtype=r.dtype), r.shape)
    return (alpha * total + beta * identity).astype(jnp.float16)


def _coarse(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a.astype(jnp.float16), b.astype(jnp.float16), preferred_element_type=jnp.float32)


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")


def _by_kernel(r: jax.Array, rows: Rows, alpha: float, beta: float) -> jax.Array:
    require(jnp.dtype(jnp.float16))
    *batch, m, _ = r.shape
    if m > LARGEST:
        raise NotImplementedError(
            refusal("hopper", f"keeps matrices up to {LARGEST} x {LARGEST}, got {r.shape}")
        )
    launch = functools.partial(_launched, rows, alpha, beta)
    return folded("hopper", launch, r.reshape(math.prod(batch), m, m)).reshape(r.shape)


def _launched(rows: Rows, alpha: float, beta: float, r: jax.Array) -> jax.Array:
    """The launch on one device, for its part of the batch: padded with zeros, and cut again."""
    from pallas_kernels import _composition_sm90  # only here: JAX 0.10 can't run it

    m = r.shape[-1]
    after = (0, -m % _MULTIPLE)
    padded = jnp.pad(r, ((0, 0), after, after)) if after[1] else r
    return _composition_sm90.launch(padded, rows, alpha, beta)[:, :m, :m]
