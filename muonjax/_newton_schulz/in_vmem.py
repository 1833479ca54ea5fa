"""Make all of the half-precision iteration of a matrix in one launch on a TPU, between its load and its store.

The same steps, deflation and roundings as in `half_precision` and `thin_deflation`. Sums are taken in another order,
what is added to a product is added before its rounding, and symmetric products are mirrored. No TPU has run it: it is
used only where it is named.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from muonjax._linalg import dot, square_norm
from muonjax._newton_schulz import half_precision
from muonjax._newton_schulz.deflation import random_start
from muonjax._newton_schulz.half_precision import polynomial
from muonjax._newton_schulz.normalization import scale_of_largest
from muonjax._newton_schulz.settings import NewtonSchulz
from muonjax._newton_schulz.thin_deflation import Sketch, shrinkings, with_rest
from muonjax._policy import Policy
from pallas_kernels._vmem_tpu import each_block, map_matrices, padded, plain, symmetric, with_transpose

NAME = "tpu_vmem"

_HALF = jnp.dtype(jnp.bfloat16)


class Memory(NamedTuple):
    """Arrays in VMEM; a matrix has m x n, padded.

    Attributes:
      z, r, q: As in `half_precision`, [m, n], [m, m], [m, m].
      once, total: [m, m], of fused steps.
      y, v: As in `thin_deflation`, [m, 2 k], float32, and [m, k], of the deflation.
    """

    z: Any
    r: Any
    q: Any
    once: Any
    total: Any
    y: Any
    v: Any


def iterate(
    x: jax.Array, settings: NewtonSchulz, policy: Policy, dtype: jnp.dtype, axis_name: tuple[str, ...] = ()
) -> jax.Array:
    """x [*batch, m, n] with m <= n -> its orthogonalization, in x's dtype.

    Raises:
      NotImplementedError: If it can't run there, or on such matrices, with the reason.
    """
    for applies, reason in (
        (policy.platform != "tpu", f"needs a TPU, the arrays are on {policy.platform!r}"),
        (dtype != _HALF, f"computes in bfloat16, got {dtype.name}"),
        (bool(axis_name), f"needs whole matrices, got columns sharded over {axis_name}"),
        (
            settings.normalization != "schatten",
            f'needs normalization="schatten", got {settings.normalization!r}',
        ),
    ):
        if applies:
            raise NotImplementedError(f"NewtonSchulz(implementation={NAME!r}) {reason}; leave it out.")
    half_precision.require_steps(settings)
    m, n = x.shape[-2:]
    rank = min(settings.deflation, m // 8)
    k = rank + rank // 2
    number, _ = half_precision.fused_steps(settings, policy, m, n)
    rows, columns = padded(m), padded(n)

    def array(shape, dtype=_HALF, needed=True):
        return jax.ShapeDtypeStruct(shape, dtype) if needed else None

    square = array((rows, rows))
    memory = Memory(
        z=array((rows, columns)),
        r=square,
        q=square,
        once=square if number > 1 else None,
        total=square if number > 1 else None,
        y=array((rows, 2 * k), jnp.float32, k > 0),
        v=array((rows, k), needed=k > 0),
    )

    def constants():
        """The start of the subspace iteration, transposed."""
        start = (random_start(m, k) * m**-0.5).T.astype(_HALF)
        return [jnp.pad(start, ((0, 0), (0, rows - m)))] if k else []

    flops = 2.0 * m * (n * (2 * len(settings.steps) * m + 7 * k) + 3 * len(settings.steps) * m * m)
    steps = functools.partial(_steps, settings=settings, number=number, m=m)
    return map_matrices(x, constants, memory, _begin, steps, name=NAME, kind=policy.kind, flops=flops)


def _begin(x: Any, memory: Memory, *start: Any) -> None:
    """z, from references to x and to the start: scaled, and with its dominant directions shrunk."""
    m, n = x.shape

    def larger(i, found):
        return jnp.maximum(found, jnp.abs(x[:, _range(i)].astype(jnp.float32)))

    largest = jax.lax.fori_loop(0, n // 128, larger, jnp.zeros((m, 128), jnp.float32))
    scale = scale_of_largest(jnp.max(largest, (-2, -1), keepdims=True))
    z, y = memory.z, memory.y

    def scaled(columns):
        return scale * x[:, columns].astype(jnp.float32)

    if not start:

        @each_block(n)
        def _(columns):
            z[:, columns] = scaled(columns).astype(_HALF)

        return
    y[...] = jnp.zeros_like(y)

    @each_block(n)
    def _(columns):
        rounded = scaled(columns).astype(_HALF)
        z[:, columns] = rounded
        b = with_rest(plain(start[0][...], rounded), _HALF, (0, 1), -2)
        y[...] += with_transpose(rounded, b)

    k = memory.v.shape[1]
    both = y[:, :k] + y[:, k:]
    (found,) = shrinkings([Sketch(scale, dot(start[0][...].astype(jnp.float32), both), both, None)], _HALF)
    v = found.v.astype(jnp.float32)
    memory.v[...] = found.v
    adjoint, p = v.T.astype(_HALF), with_rest(dot(v, found.d), _HALF, (0, 1, 0), -1)

    @each_block(n)
    def _(columns):
        c = with_rest(plain(adjoint, z[:, columns]), _HALF, (0, 0, 1), -2)
        z[:, columns] = (scaled(columns) - plain(p, c)).astype(_HALF)


def _steps(memory: Memory, *, settings: NewtonSchulz, number: int, m: int) -> Any:
    """The polynomials, up to the function of some columns that gives the result's; see `half_precision`."""
    z, r, q, once, total, _, _ = memory
    first, *others = settings.steps
    apart, fused = (others[:-number], others[-number:]) if number > 1 else (others, [])

    def gram(scale: Any = 1.0):
        symmetric(r, z, z, lambda sums, _: scale * sums)

    def polynomial_of_r(out, row, square, inverse_bound: Any):
        symmetric(out, r, r, lambda sums, place: polynomial(row, r[place], sums, square, inverse_bound))

    def add():
        """z + Q z."""

        @each_block(z.shape[1])
        def _(columns):
            own = z[:, columns]
            z[:, columns] = (own.astype(jnp.float32) + plain(q[...], own)).astype(_HALF)

    def product(out, a, y, *addends):
        """A Y + the addends."""
        symmetric(
            out,
            a,
            y,
            lambda sums, place: functools.reduce(lambda t, c: t + c[place].astype(t.dtype), addends, sums),
        )

    gram()
    product(q, r, r)
    inverse_bound, root = _bound(memory, m)
    _each_rows(q, lambda place: polynomial(first, r[place], q[place], 1.0, inverse_bound))
    gain = first[0]
    for row in apart:
        add()
        gram()
        polynomial_of_r(q, row, gain**2, inverse_bound)
        gain = row[0] * gain
    if fused:
        add()
        gram(half_precision.MAGNIFIED * gain**2 * inverse_bound)
        row, last = fused
        square = 1 / half_precision.MAGNIFIED
        polynomial_of_r(q, row, square, 1.0)
        product(once, q, r, r)  # (1 + Q) R
        product(r, once, q, once)
        polynomial_of_r(once, last, row[0] ** 2 * square, 1.0)
        product(total, once, q, q, once)
        q = total
    factor = math.prod(a for a, _, _ in settings.steps) * root

    def whole(place):
        rows, _ = place
        own = q[place].astype(jnp.float32)
        row, column = (jax.lax.broadcasted_iota(jnp.int32, own.shape, axis) for axis in (0, 1))
        return factor * jnp.where(row + rows.start == column, own + 1, own)

    _each_rows(q, whole)
    return lambda columns: plain(q[...], z[:, columns])


def _bound(memory: Memory, m: int) -> tuple[jax.Array, jax.Array]:
    """The inverse of an upper bound of R's largest eigenvalue, and its root; `memory.q` holds r^2."""
    v = memory.v

    def more(i, sums):
        fourth, s = sums
        fourth = fourth + square_norm(memory.q[_range(i), :])
        if v is not None:
            rv = plain(memory.r[_range(i), :], v[...]) * v[_range(i), :].astype(jnp.float32)
            s = s + jnp.sum(rv, (-2, -1), keepdims=True)
        return fourth, s

    fourth, s = jax.lax.fori_loop(0, memory.q.shape[0] // 128, more, (jnp.zeros((1, 1), jnp.float32),) * 2)
    k = 0 if v is None else v.shape[1]
    return half_precision.bound_of_fourth_powers(fourth, s if k > 1 else None, k, m)


def _each_rows(out: Any, entries: Any) -> None:
    """Replaces a matrix [m, m] by a function of the places of its rows."""

    @pl.loop(0, out.shape[0] // 128)
    def _(i):
        place = _range(i), slice(None)
        out[place] = entries(place).astype(out.dtype)


def _range(i: Any) -> Any:
    return pl.ds(pl.multiple_of(i * 128, 128), 128)
