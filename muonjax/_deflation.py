r"""Before Newton-Schulz: shrink the few dominant directions, so that the long tail starts closer to 1.

The momentum of a transformer has a few dominant directions and a long tail (median sigma/sigma_1 about 1e-2).
Dividing by the largest singular value therefore leaves nearly all of them tiny, and Newton-Schulz spends its
first steps on lifting them. With A = X X^H in hand, a thin basis V of the dominant subspace costs one or two
products with A, and

    W = I - V D V^H,    D = I - g(V^H A V),    g(h) ~ shrink * h^(-1/2)

flattens the top k singular values of W X. Where V spans an invariant subspace of A, W is a positive definite
function of A; it commutes with A, and W X has exactly X's polar factor. Where V does not, the polar factor
moves by about ||sin(theta) D||, theta being the angles between V and the true subspace; that is estimated
from the residual A V - V (V^H A V), and D is shrunk until the estimate is below `_TOLERANCE`.
"""

import math

import jax
import jax.numpy as jnp

from muonjax._coefficients import polar_express

# g comes from the Gram iteration on the k x k matrix, in float32. Six steps reach all ratios sigma_k/sigma_1
# >= 1e-3 within 0.5 %, and g needs no more: any positive g keeps the polar factor.
_INVERSE_ROOT = polar_express(6)

# Added to the k x k matrix in units of its norm: the shrunk directions never fall below 1e-3 of the largest,
# which is where the rounding of A = X X^H in float32 begins.
_RIDGE = 1e-6

# The root mean square polar error that an inexact subspace may cause.
_TOLERANCE = 0.05

# Products with A on the random start. One leaves angles that cost up to 0.05 of polar error on real
# momentum; two, none.
_SUBSPACE_STEPS = 2

_HIGHEST = jax.lax.Precision.HIGHEST


def _adjoint(a: jax.Array) -> jax.Array:
    return a.conj().mT


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(
        a, b, precision=_HIGHEST, preferred_element_type=jnp.promote_types(b.dtype, jnp.float32)
    )


def _hermitian(a: jax.Array) -> jax.Array:
    return (a + _adjoint(a)) / 2


def _inverse_root(h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """About h^(-1/2) for positive semidefinite h [*batch, k, k], times the root of its size: Q and the size.

    By products alone: a factorization would leave the matrix units, and on a CPU start threads of its own.
    """
    eye = jnp.eye(h.shape[-1], dtype=h.dtype)
    size = _frobenius(h) + jnp.finfo(h.dtype).tiny
    r = h / size + _RIDGE * eye

    def step(row, carry):
        r, q = carry
        a, b, c = row[0], row[1], row[2]
        p = a * eye + b * r + c * _dot(r, r)
        return _hermitian(_dot(_dot(p, r), p)), _hermitian(_dot(q, p))

    rows = jnp.asarray(_INVERSE_ROOT, jnp.finfo(h.dtype).dtype)
    _, q = jax.lax.fori_loop(0, len(_INVERSE_ROOT), lambda i, carry: step(rows[i], carry), (r, r * 0 + eye))
    return q, size


def _orthonormal(y: jax.Array) -> jax.Array:
    """Nearly orthonormal columns that span those of y [*batch, m, k].

    Twice, for y^H y has the squared condition of y, and its rounding swallows what is below 1e-3 of the
    largest. A column that depends on the others comes out short, not as noise; short columns are harmless.
    """
    for _ in range(2):
        inverse_root, size = _inverse_root(_dot(_adjoint(y), y))
        y = _dot(y, inverse_root) * jax.lax.rsqrt(size)
    return y


def _frobenius(a: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.abs(a) ** 2, axis=(-2, -1), keepdims=True))


def shrink_dominant(x: jax.Array, gram: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
    """W x and W gram W, for the map W that shrinks the `rank` dominant directions of `gram`.

    Args:
      x: [*batch, m, n], with entries of moderate size.
      gram: A = X X^H, [*batch, m, m], in float32 or wider.
      rank: k, in 1..m.
    """
    m = gram.shape[-1]
    v = jax.random.normal(jax.random.key(0), (m, rank), jnp.float32).astype(gram.dtype)
    for _ in range(_SUBSPACE_STEPS):
        v = _orthonormal(_dot(gram, v))
    av = _dot(gram, v)
    h = _hermitian(_dot(_adjoint(v), av))

    inverse_root, size = _inverse_root(h)
    inverse = _dot(inverse_root, inverse_root)
    # The common target of the k directions, between the least of their singular values and the mean.
    target = jnp.sqrt(math.sqrt(rank) / _frobenius(inverse))
    d = jnp.eye(rank, dtype=h.dtype) - target * inverse_root

    residual = _dot(av - _dot(v, h), _dot(d, inverse)) / size
    polar_error = math.sqrt(2 / m) * _frobenius(residual)
    d = d * jnp.minimum(1, _TOLERANCE / (polar_error + jnp.finfo(polar_error.dtype).tiny))

    # W A W = A - P S^H - S P^H with P = V D and S = A V - P (V^H A V) / 2.
    p = _dot(v, d)
    s = av - _dot(p, h) / 2
    update = _dot(jnp.concatenate([p, s], axis=-1), _adjoint(jnp.concatenate([s, p], axis=-1)))
    return x - _dot(p, _dot(_adjoint(v), x)), _hermitian(gram - update)
