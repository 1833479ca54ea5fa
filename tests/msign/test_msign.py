"""msign: values, every derivative, and what the backward pass keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from muonjax import JORDAN, msign, polar_express
from muonjax._msign.inputs import CONVERGED, normalized, product_of
from muonjax._msign.polynomial_gradient import iterate
from tests.msign import oracles as msign_oracles
from tests.tools import oracles
from tests.tools.tiers import nightly, thorough

relative = msign_oracles.relative


def matrix(m, n, condition, seed=0):
    """Log-spaced singular values from 1 to 1 / condition."""
    short = min(m, n)
    return oracles.with_spectrum(
        np.geomspace(1, 1 / condition, short), max(m, n), seed, tall=m > n
    )


def random(shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape)


@functools.partial(jax.jit, static_argnums=0)
def vjp(f, x, cotangent):
    return jax.vjp(f, x)[1](cotangent)[0]


def pulled_back(x, cotangent, dtype=None, **settings):
    """The cotangent of `msign` with these settings, pulled back to x."""
    f = functools.partial(msign, **settings)
    return vjp(f, jnp.asarray(x, dtype), jnp.asarray(cotangent, dtype))


# Values


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(64, 256), (128, 128), nightly((256, 64))])
def test_the_default_is_converged_in_float32_at_condition_1e3(shape):
    x = jnp.asarray(matrix(*shape, 1e3), jnp.float32)
    exact = np.asarray(x, np.float64)
    # Rounding x itself moves the polar factor of such a matrix by 1e-6: LAPACK's SVD in float32 is the measure.
    u, _, vt = (
        np.asarray(v, np.float64) for v in jnp.linalg.svd(x, full_matrices=False)
    )
    svd_error = oracles.polar_error(u @ vt, exact)
    assert oracles.polar_error(msign(x), exact) < min(1e-5, svd_error)
    with jax.enable_x64(True):
        assert oracles.polar_error(msign(jnp.asarray(exact)), exact) < 1e-11


@pytest.mark.parametrize("shape", [(128, 128), (128, 512)])
@pytest.mark.parametrize(("dtype", "most"), [(jnp.float32, 2e-6), (jnp.bfloat16, 5e-3)])
def test_little_is_rounded_where_singular_values_are_alike(shape, dtype, most):
    """Products of the Gram matrix itself, not of its distance from its mean, lose two to seven times as much."""
    x = jnp.asarray(matrix(*shape, 3), dtype)
    y = msign(x, coefficients=polar_express(8))
    assert (
        oracles.polar_error(np.asarray(y, np.float64), np.asarray(x, np.float64)) < most
    )


def test_the_default_schedule_reaches_1e_5():
    s = np.geomspace(1e-5, 1, 20001)
    for a, b, c in CONVERGED:
        s = a * s + b * s**3 + c * s**5
    assert np.max(np.abs(s - 1)) < 2e-12


@pytest.mark.parametrize(
    "rows", [polar_express(5), 5 * JORDAN, JORDAN], ids=["5", "JORDAN5", "JORDAN"]
)
def test_the_rows_that_run(rows):
    x = random((2, 6, 9))
    y = msign(jnp.asarray(x, jnp.float32), coefficients=rows)
    expected = np.stack([oracles.newton_schulz(v, rows) for v in x])
    assert_allclose(y, expected, atol=2e-5)


@pytest.mark.thorough
def test_scale_batch_and_orientation_do_not_matter():
    f = msign
    x = jnp.asarray(random((2, 3, 5, 8)), jnp.float32)
    y = f(x)
    assert y.shape == x.shape
    assert_array_equal(f(x * 2.0**-90), y)
    assert_array_equal(f(x * 2.0**90), y)
    assert_allclose(f(x * 1e-30), y, atol=1e-5)
    assert_allclose(f(x * 1e30), y, atol=1e-5)
    assert_allclose(f(x[1, 2]), y[1, 2], atol=1e-6)
    assert_allclose(f(x.mT), y.mT, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, thorough(jnp.float16)])
def test_a_zero_matrix_has_value_zero_and_gradient_zero(dtype):
    f = msign
    x = jnp.stack([jnp.zeros((4, 6)), jnp.asarray(random((4, 6)))]).astype(dtype)
    y = jax.jit(f)(x)
    g = vjp(f, x, jnp.ones_like(x))
    assert y.dtype == g.dtype == dtype
    assert_array_equal(np.asarray(y[0], np.float32), 0)
    assert_array_equal(np.asarray(g[0], np.float32), 0)
    assert jnp.all(jnp.isfinite(g))
    assert jnp.any(g[1] != 0)
    tangent = jax.jit(lambda x, dx: jax.jvp(f, (x,), (dx,))[1])(x, jnp.ones_like(x))
    assert_array_equal(np.asarray(tangent[0], np.float32), 0)


@pytest.mark.nan
@pytest.mark.parametrize("bad", [np.inf, thorough(np.nan), thorough(-np.inf)])
def test_nan_and_infinity_stay_in_their_matrix_and_are_not_hidden(bad):
    x = random((2, 3, 5)).astype(np.float32)
    x[0, 1, 1] = bad
    y = jax.jit(msign)(x)
    g = vjp(msign, x, jnp.ones_like(x))
    assert np.all(np.isnan(y[0]))
    assert np.any(np.isnan(g[0]))
    assert np.all(np.isfinite(y[1]))
    assert np.all(np.isfinite(g[1]))


def test_an_empty_matrix_is_itself():
    assert msign(jnp.zeros((2, 0, 3))).shape == (2, 0, 3)


# First derivatives against the SVD


# Five rows are truncated: what is exact is the derivative of what ran, ripple and all.
@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((32, 80), polar_express(8)),
        thorough((48, 48), JORDAN * 5),
        *(
            nightly(shape, rows)
            for shape in ((48, 48), (80, 32))
            for rows in (polar_express(8), JORDAN * 5)
        ),
    ],
)
def test_polynomial_gradient(shape, rows):
    for condition, seed in ((3, 0), (1e3, 1)):
        x = matrix(*shape, condition, seed)
        c = random(shape)
        expected = msign_oracles.svd_derivative(x, c, rows)
        g = pulled_back(x, c, jnp.float32, coefficients=rows)
        assert relative(g, expected) < 5e-5
        with jax.enable_x64(True):
            assert relative(pulled_back(x, c, coefficients=rows), expected) < 1e-12


@pytest.mark.parametrize("steps", [1, 2, thorough(3)])
def test_polynomial_gradient_of_few_steps(steps):
    """A last turn alone, of one or two steps; and an odd step before it."""
    x = random((6, 20))
    c = random((6, 20), 2)
    rows = JORDAN * steps
    with jax.enable_x64(True):
        g = pulled_back(x, c, coefficients=rows)
    assert relative(g, msign_oracles.svd_derivative(x, c, rows)) < 1e-12


@pytest.mark.parametrize("shape", [(32, 80), thorough((48, 48)), nightly((80, 32))])
def test_the_default_has_the_gradient_of_the_polar_factor(shape):
    for condition, single in ((1e2, 5e-5), (1e3, 1e-4)):
        x = matrix(*shape, condition)
        c = random(shape)
        expected = msign_oracles.svd_derivative(x, c)
        assert relative(pulled_back(x, c, jnp.float32), expected) < single
        with jax.enable_x64(True):
            assert relative(pulled_back(x, c), expected) < 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(32, 80), *map(nightly, [(48, 48), (80, 32)])])
def test_gradient_of_bfloat16_operands(shape):
    x, c = (jnp.asarray(y, jnp.bfloat16) for y in (matrix(*shape, 1e2), random(shape)))
    g = pulled_back(x, c, coefficients=polar_express(8))
    expected = msign_oracles.svd_derivative(
        np.asarray(x, np.float64), np.asarray(c, np.float64)
    )
    assert relative(g, expected) < 6e-2


# The derivative's properties


@pytest.mark.parametrize("shape", [(5, 9), thorough((6, 6))])
def test_the_gradient_is_inverse_in_the_scale_of_x(shape):
    x = jnp.asarray(matrix(*shape, 30), jnp.float32)
    c = jnp.asarray(random(shape), jnp.float32)
    g = vjp(msign, x, c)
    for scale in (1e-30, 1e-3, 7.0, 1e30):
        assert_allclose(
            vjp(msign, scale * x, c) * scale, g, atol=3e-4 * float(jnp.max(jnp.abs(g)))
        )


@pytest.mark.parametrize("shape", [(4, 4), thorough((3, 5)), nightly((5, 3))])
def test_the_jacobian_is_symmetric_and_positive_semidefinite(shape):
    with jax.enable_x64(True):
        x = jnp.asarray(matrix(*shape, 10))
        jacobian = jax.jit(jax.jacfwd(msign))(x).reshape(x.size, x.size)
        assert_allclose(jacobian, jacobian.T, atol=1e-9)
        assert np.min(np.linalg.eigvalsh(jacobian)) > -1e-9
        reverse = jax.jit(jax.jacrev(msign))(x).reshape(x.size, x.size)
        assert_allclose(jacobian, reverse, atol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [thorough((12, 12)), (10, 20)])
def test_rank_deficiency(shape):
    s = np.r_[np.linspace(1, 0.3, 5), np.zeros(shape[0] - 5)]
    x = oracles.with_spectrum(s, shape[1])
    c = random(shape)
    with jax.enable_x64(True):
        rows = polar_express(8)
        g = pulled_back(x, c, coefficients=rows)
        assert relative(g, msign_oracles.svd_derivative(x, c, rows)) < 1e-10


# All orders


def scalar(f, shape):
    weights = random(shape, 7)
    return lambda x: jnp.sum(jnp.sin(f(x)) * weights)


# Two plain steps more, so that the second and third derivatives of the polynomial have converged too.
ROWS = polar_express(8) + oracles.CLASSICAL * 2


@functools.cache
def derivative_by_autodiff(shape, order):
    def by_autodiff(x):
        """msign, of which JAX differentiates every step."""
        return iterate(normalized(x), jnp.asarray(ROWS), product_of(x, "highest"))

    loss = scalar(by_autodiff, shape)
    derivative = {2: jax.hessian(loss), 3: jax.jacfwd(jax.hessian(loss))}[order]
    with jax.enable_x64(True):
        return jax.jit(derivative)(jnp.asarray(matrix(*shape, 4)))


def check_derivative(shape, derivative, order, most):
    loss = scalar(functools.partial(msign, coefficients=ROWS), shape)
    with jax.enable_x64(True):
        found = jax.jit(derivative(loss))(jnp.asarray(matrix(*shape, 4)))
        assert relative(found, derivative_by_autodiff(shape, order)) < most


SMALL_SHAPES = [(3, 4), *map(nightly, ((2, 4), (3, 3)))]


@pytest.mark.parametrize("shape", SMALL_SHAPES)
@pytest.mark.parametrize(("outer", "inner"), [
    (jax.jacfwd, jax.jacrev),
    thorough(jax.jacrev, jax.jacfwd),
    thorough(jax.jacrev, jax.jacrev),
])  # fmt: skip
def test_second_derivatives(shape, outer, inner):
    check_derivative(shape, lambda loss: outer(inner(loss)), 2, 1e-11)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", SMALL_SHAPES)
def test_third_derivatives(shape):
    check_derivative(shape, lambda loss: jax.jacfwd(jax.hessian(loss)), 3, 1e-9)


@pytest.mark.thorough
def test_vmap_scan_and_remat():
    shape = (3, 5)
    f = functools.partial(msign, coefficients=polar_express(8))
    x = jnp.asarray(random((3, *shape)), jnp.float32)
    loss = scalar(f, shape)
    gradient = jax.jit(jax.grad(loss))
    one_by_one = jnp.stack([gradient(v) for v in x])
    assert_allclose(jax.jit(jax.vmap(jax.grad(loss)))(x), one_by_one, atol=1e-4)

    def recurrent(x0, f):
        return jnp.sum(
            jax.lax.scan(lambda w, v: (w + 0.3 * f(w + v), jnp.sum(jnp.sin(w))), x0, x)[
                1
            ]
        )

    def by_autodiff(x):
        rows = jnp.asarray(polar_express(8))
        return iterate(normalized(x), rows, product_of(x, "highest"))

    gradient = jax.jit(jax.grad(recurrent), static_argnums=1)
    expected = gradient(x[0], by_autodiff)
    assert_allclose(gradient(x[0], jax.checkpoint(f)), expected, atol=2e-3)


# What it costs


def temporary_bytes(f, *arguments):
    return jax.jit(f).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("shape", "most"), [
    thorough((512, 512), 8),
    ((512, 2048), 7.5),
    nightly((2048, 512), 8.5),
])  # fmt: skip
def test_temporary_memory_of_a_gradient(shape, most):
    x = jax.ShapeDtypeStruct((8, *shape), jnp.float32)
    f = functools.partial(msign, coefficients=polar_express(8))

    def value_and_vjp(x, c):
        y, back = jax.vjp(f, x)
        return y, back(c)[0]

    assert temporary_bytes(value_and_vjp, x, x) / (8 * shape[0] * shape[1] * 4) <= most


def test_unrolled_layers_do_not_keep_the_steps():
    """XLA merges an unrolled recomputation with the forward pass and then keeps everything: 199 n² for autodiff."""
    n = 256

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(msign(w, coefficients=polar_express(8)) @ x)
        return jnp.sum(x**2)

    weights = [jax.ShapeDtypeStruct((n, n), jnp.float32)] * 8
    x = jax.ShapeDtypeStruct((n, 16), jnp.float32)
    assert temporary_bytes(jax.grad(loss), weights, x) / (n * n * 4) <= 30


def compiled_vjp(f, x):
    return jax.jit(lambda x, c: jax.vjp(f, x)[1](c)[0]).lower(x, x).compile().as_text()


def test_the_loops_are_rolled_and_stack_nothing():
    """There are three products of a step and four of its tangent."""
    few, many = (
        compiled_vjp(
            functools.partial(msign, coefficients=polar_express(t)),
            jnp.ones((3, 5)),
        )
        for t in (7, 23)
    )
    assert few.count(" dot(") == many.count(" dot(") == 7
    assert "f32[23,3]" in many  # the coefficients
    for turns in (21, 22, 23):
        assert f"[{turns},3,5]" not in many
        assert f"[{turns},3,3]" not in many


# Mistakes


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: msign(jnp.ones((2, 2), jnp.complex64)), TypeError, r"real form"),
    (lambda: msign(jnp.ones((2, 2), jnp.int32)), TypeError, r"int32"),
    (lambda: msign(jnp.ones(3)), ValueError, r"needs a matrix .* got shape \(3,\)"),
    (lambda: msign(jnp.ones((2, 2)), coefficients=()), ValueError, r"msign\(coefficients=\(\)\) .* one row"),
    (lambda: msign(jnp.ones((2, 2)), coefficients=((1.0, 2.0),)), ValueError, r"rows of three numbers"),
    (lambda: msign(jnp.ones((2, 2)), coefficients="jordan"), ValueError, r"rows of three numbers"),
    (lambda: msign(jnp.ones((2, 2)), coefficients=((1.0, np.nan, 2.0),)), ValueError, r"finite"),
    (lambda: msign({"w": jnp.ones((2, 2))}), TypeError, r"msign\(x=\{'w': .* must be an array \[\*b"),
    (lambda: msign([[1.0, 2.0], [3.0]]), TypeError, r"msign\(x=\[\[1\.0, 2\.0\], \[3\.0\]\]\) must be an array"),
])  # fmt: skip
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call()
