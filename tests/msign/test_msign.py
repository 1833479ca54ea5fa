"""msign: values, every derivative, and what the backward pass keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from muonjax import JORDAN, msign, polar_express
from muonjax._msign.inputs import CONVERGED
from tests.msign import oracles as msign_oracles
from tests.tools import oracles
from tests.tools.tiers import nightly, quick, thorough

MODES = ("polynomial", "polar", "autodiff")
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
    for mode in MODES:
        error = oracles.polar_error(msign(x, gradient=mode), np.asarray(x, np.float64))
        # Rounding x itself moves the polar factor of such a matrix by 1e-6: LAPACK's SVD in float32 is the measure.
        u, _, vt = (
            np.asarray(v, np.float64) for v in jnp.linalg.svd(x, full_matrices=False)
        )
        assert error < min(1e-5, oracles.polar_error(u @ vt, np.asarray(x, np.float64)))
        with jax.enable_x64(True):
            assert (
                oracles.polar_error(
                    msign(jnp.asarray(x, jnp.float64), gradient=mode),
                    np.asarray(x, np.float64),
                )
                < 1e-11
            )


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "rows", [polar_express(5), 5 * JORDAN, JORDAN], ids=["5", "JORDAN5", "JORDAN"]
)
def test_the_rows_that_run(mode, rows):
    x = random((2, 6, 9))
    polish = (
        8 if mode == "polar" else 0
    )  # for its derivative alone: the value is that of the rows
    f = functools.partial(msign, coefficients=rows, gradient=mode, polish=polish)
    y = f(jnp.asarray(x, jnp.float32))
    expected = np.stack([oracles.newton_schulz(v, rows) for v in x])
    assert_allclose(y, expected, atol=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", MODES)
def test_scale_batch_and_orientation_do_not_matter(mode):
    f = functools.partial(msign, gradient=mode)
    x = jnp.asarray(random((2, 3, 5, 8)), jnp.float32)
    y = f(x)
    assert y.shape == x.shape
    assert_array_equal(f(x * 2.0**-90), y)
    assert_array_equal(f(x * 2.0**90), y)
    assert_allclose(f(x * 1e-30), y, atol=1e-5)
    assert_allclose(f(x * 1e30), y, atol=1e-5)
    assert_allclose(f(x[1, 2]), y[1, 2], atol=1e-6)
    assert_allclose(f(x.mT), y.mT, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        (jnp.bfloat16, "polar"),
        (jnp.bfloat16, "autodiff"),
        thorough(jnp.float16, "polynomial"),
    ],
)
def test_a_zero_matrix_has_value_zero_and_gradient_zero(dtype, mode):
    f = functools.partial(msign, gradient=mode)
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
@pytest.mark.parametrize(
    ("bad", "mode"),
    [(np.inf, "polar"), thorough(np.nan, "polynomial"), thorough(-np.inf, "autodiff")],
)
def test_nan_and_infinity_stay_in_their_matrix_and_are_not_hidden(bad, mode):
    x = random((2, 3, 5)).astype(np.float32)
    x[0, 1, 1] = bad
    f = functools.partial(msign, gradient=mode)
    y = jax.jit(f)(x)
    g = vjp(f, x, jnp.ones_like(x))
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
        settings = {"coefficients": rows, "gradient": "polynomial"}
        assert relative(pulled_back(x, c, jnp.float32, **settings), expected) < 5e-5
        with jax.enable_x64(True):
            assert relative(pulled_back(x, c, **settings), expected) < 1e-12


@pytest.mark.parametrize("steps", [1, 2, thorough(3)])
def test_polynomial_gradient_of_few_steps(steps):
    """A last turn alone, of one or two steps; and an odd step before it."""
    x = random((6, 20))
    c = random((6, 20), 2)
    rows = JORDAN * steps
    with jax.enable_x64(True):
        g = pulled_back(x, c, coefficients=rows)
    assert relative(g, msign_oracles.svd_derivative(x, c, rows)) < 1e-12


FIVE = {"coefficients": polar_express(5), "polish": 3}
EIGHT = {"coefficients": polar_express(8)}


@pytest.mark.parametrize(("shape", "options"), [
    ((32, 80), {}),
    ((32, 80), FIVE),
    thorough((48, 48), EIGHT),
    *(nightly((80, 32), options) for options in ({}, FIVE, EIGHT)),
])  # fmt: skip
def test_polar_gradient(shape, options):
    for condition, exact, single in ((1e2, 1e-12, 5e-5), (1e3, 1e-12, 1e-4)):
        if condition == 1e3 and options:
            continue  # a smallest singular value below 1e-3 of the norm: not what eight or five steps are for
        x = matrix(*shape, condition)
        c = random(shape)
        expected = msign_oracles.svd_derivative(x, c)
        settings = {"gradient": "polar", **options}
        assert relative(pulled_back(x, c, jnp.float32, **settings), expected) < single
        with jax.enable_x64(True):
            assert relative(pulled_back(x, c, **settings), expected) < exact


@pytest.mark.parametrize(
    ("steps", "polish", "most"),
    [(1, 8, 1e-9), (3, 3, 5e-3), (3, 6, 1e-9), (4, 4, 1e-6), (5, 2, 1e-4)],
)
def test_polish_takes_any_truncated_value_to_the_polar_factor(steps, polish, most):
    """Three steps leave singular values up to 1.87, where the classical quintic diverges."""
    x = matrix(16, 24, 1e2)
    c = random((16, 24))
    rows = polar_express(steps)
    with jax.enable_x64(True):
        g = pulled_back(x, c, gradient="polar", coefficients=rows, polish=polish)
    assert relative(g, msign_oracles.svd_derivative(x, c)) < most


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(32, 80), *map(nightly, [(48, 48), (80, 32)])])
def test_polar_gradient_of_bfloat16_operands(shape):
    x, c = (jnp.asarray(y, jnp.bfloat16) for y in (matrix(*shape, 1e2), random(shape)))
    g = pulled_back(x, c, gradient="polar", coefficients=polar_express(8))
    expected = msign_oracles.svd_derivative(
        np.asarray(x, np.float64), np.asarray(c, np.float64)
    )
    assert relative(g, expected) < 6e-2


# The derivative's properties


@pytest.mark.parametrize(
    ("mode", "shape"), [("polar", (5, 9)), thorough("polynomial", (6, 6))]
)
def test_the_gradient_is_inverse_in_the_scale_of_x(mode, shape):
    x = jnp.asarray(matrix(*shape, 30), jnp.float32)
    c = jnp.asarray(random(shape), jnp.float32)
    f = functools.partial(msign, gradient=mode)
    g = vjp(f, x, c)
    for scale in (1e-30, 1e-3, 7.0, 1e30):
        assert_allclose(
            vjp(f, scale * x, c) * scale, g, atol=3e-4 * float(jnp.max(jnp.abs(g)))
        )


@pytest.mark.parametrize("shape", [(4, 4), thorough((3, 5)), nightly((5, 3))])
def test_the_polar_jacobian_is_symmetric_and_positive_semidefinite(shape):
    with jax.enable_x64(True):
        x = jnp.asarray(matrix(*shape, 10))
        jacobian = jax.jit(jax.jacfwd(functools.partial(msign, gradient="polar")))(
            x
        ).reshape(x.size, x.size)
        assert_allclose(jacobian, jacobian.T, atol=1e-12)
        assert np.min(np.linalg.eigvalsh(jacobian)) > -1e-12
        reverse = jax.jit(jax.jacrev(functools.partial(msign, gradient="polar")))(
            x
        ).reshape(x.size, x.size)
        assert_allclose(jacobian, reverse, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [thorough((12, 12)), (10, 20)])
def test_rank_deficiency(shape):
    """The polynomial mode is exact at any rank; the polar mode is finite, and right only inside of the range."""
    s = np.r_[np.linspace(1, 0.3, 5), np.zeros(shape[0] - 5)]
    x = oracles.with_spectrum(s, shape[1])
    c = random(shape)
    with jax.enable_x64(True):
        rows = polar_express(8)
        g = pulled_back(x, c, coefficients=rows)
        assert relative(g, msign_oracles.svd_derivative(x, c, rows)) < 1e-10
        u, _, vt = np.linalg.svd(x)
        left = u[:, :5]
        right = vt[:5].T
        inside = left @ left.T @ c @ right @ right.T
        g = pulled_back(x, inside, gradient="polar")
        compressed = msign_oracles.svd_derivative(
            left.T @ x @ right, left.T @ c @ right
        )
        assert relative(g, left @ compressed @ right.T) < 1e-10
        assert np.all(np.isfinite(pulled_back(x, c, gradient="polar")))


# All orders


def scalar(f, shape):
    weights = random(shape, 7)
    return lambda x: jnp.sum(jnp.sin(f(x)) * weights)


# Two plain steps more, so that the second and third derivatives of the polynomial have converged too.
ROWS = polar_express(8) + oracles.CLASSICAL * 2


@functools.cache
def derivative_by_autodiff(shape, order):
    loss = scalar(
        functools.partial(msign, coefficients=ROWS, gradient="autodiff"), shape
    )
    derivative = {2: jax.hessian(loss), 3: jax.jacfwd(jax.hessian(loss))}[order]
    with jax.enable_x64(True):
        return jax.jit(derivative)(jnp.asarray(matrix(*shape, 4)))


def check_derivative(mode, shape, derivative, order, most):
    loss = scalar(functools.partial(msign, coefficients=ROWS, gradient=mode), shape)
    with jax.enable_x64(True):
        found = jax.jit(derivative(loss))(jnp.asarray(matrix(*shape, 4)))
        assert relative(found, derivative_by_autodiff(shape, order)) < most


SMALL_SHAPES = [(3, 4), *map(nightly, ((2, 4), (3, 3)))]


@pytest.mark.parametrize("shape", SMALL_SHAPES)
@pytest.mark.parametrize(("mode", "outer", "inner"), [
    ("polar", jax.jacfwd, jax.jacrev),
    thorough("polar", jax.jacrev, jax.jacfwd),
    thorough("polynomial", jax.jacrev, jax.jacrev),
    nightly("polynomial", jax.jacfwd, jax.jacrev),
])  # fmt: skip
def test_second_derivatives(mode, shape, outer, inner):
    check_derivative(mode, shape, lambda loss: outer(inner(loss)), 2, 1e-11)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["polynomial", "polar"])
@pytest.mark.parametrize("shape", SMALL_SHAPES)
def test_third_derivatives(mode, shape):
    check_derivative(mode, shape, lambda loss: jax.jacfwd(jax.hessian(loss)), 3, 1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [thorough("polynomial"), "polar"])
def test_vmap_scan_and_remat(mode):
    shape = (3, 5)
    f = functools.partial(msign, gradient=mode, coefficients=polar_express(8))
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

    plain = functools.partial(msign, gradient="autodiff", coefficients=polar_express(8))
    expected = jax.jit(jax.grad(recurrent), static_argnums=1)(x[0], plain)
    g = f if mode == "polynomial" else jax.checkpoint(f)
    # Eight steps' polynomial and the polar factor differ by no more than float32 here.
    assert_allclose(
        jax.jit(jax.grad(recurrent), static_argnums=1)(x[0], g), expected, atol=2e-3
    )


# What it costs


def temporary_bytes(f, *arguments):
    return jax.jit(f).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("shape", "mode", "most"), [
    thorough((512, 512), "polynomial", 8),
    nightly((512, 512), "polar", 6.01),
    ((512, 2048), "polynomial", 7.5),
    ((512, 2048), "polar", 2.5),
    nightly((2048, 512), "polynomial", 8.5),
    thorough((2048, 512), "polar", 3.5),
])  # fmt: skip
def test_temporary_memory_of_a_gradient(shape, mode, most):
    x = jax.ShapeDtypeStruct((8, *shape), jnp.float32)
    f = functools.partial(msign, coefficients=polar_express(8), gradient=mode)

    def value_and_vjp(x, c):
        y, back = jax.vjp(f, x)
        return y, back(c)[0]

    assert temporary_bytes(value_and_vjp, x, x) / (8 * shape[0] * shape[1] * 4) <= most


@quick("polar-17")
@pytest.mark.parametrize(("mode", "most"), [("polynomial", 30), ("polar", 17)])
def test_unrolled_layers_do_not_keep_the_steps(mode, most):
    """XLA merges an unrolled recomputation with the forward pass and then keeps everything: 199 n² for autodiff."""
    n = 256

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(msign(w, coefficients=polar_express(8), gradient=mode) @ x)
        return jnp.sum(x**2)

    weights = [jax.ShapeDtypeStruct((n, n), jnp.float32)] * 8
    x = jax.ShapeDtypeStruct((n, 16), jnp.float32)
    assert temporary_bytes(jax.grad(loss), weights, x) / (n * n * 4) <= most


def compiled_vjp(f, x):
    return jax.jit(lambda x, c: jax.vjp(f, x)[1](c)[0]).lower(x, x).compile().as_text()


@quick("polar-16")
@pytest.mark.parametrize(("mode", "products"), [("polynomial", 7), ("polar", 16)])
def test_the_loops_are_rolled_and_stack_nothing(mode, products):
    """Polynomial: 3 of a step and 4 of its tangent. Polar: a step, 8 of the solve's, and 5 before and after it."""
    few, many = (
        compiled_vjp(
            functools.partial(msign, coefficients=polar_express(t), gradient=mode),
            jnp.ones((3, 5)),
        )
        for t in (7, 23)
    )
    assert few.count(" dot(") == many.count(" dot(") == products
    assert "f32[23,3]" in many  # the coefficients
    for turns in (21, 22, 23):
        assert f"[{turns},3,5]" not in many
        assert f"[{turns},3,3]" not in many
    assert "[23,3,5]" in compiled_vjp(
        functools.partial(msign, coefficients=polar_express(23), gradient="autodiff"),
        jnp.ones((3, 5)),
    )


# Mistakes


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: msign(jnp.ones((2, 2), jnp.complex64)), TypeError, r"real form"),
    (lambda: msign(jnp.ones((2, 2), jnp.int32)), TypeError, r"int32"),
    (lambda: msign(jnp.ones(3)), ValueError, r"needs a matrix .* got shape \(3,\)"),
    (lambda: msign(jnp.ones((2, 2)), coefficients=()), ValueError, r"msign\(coefficients=\(\)\) .* one row"),
    (lambda: msign(jnp.ones((2, 2)), coefficients=((1.0, 2.0),)), ValueError, r"rows of three numbers"),
    (lambda: msign(jnp.ones((2, 2)), coefficients="jordan"), ValueError, r"give numbers in place of a name"),
    (lambda: msign(jnp.ones((2, 2)), coefficients=((1.0, np.nan, 2.0),)), ValueError, r"finite"),
    (lambda: msign(jnp.ones((2, 2)), gradient="polar", polish=-1), ValueError, r"polish=-1"),
    (lambda: msign(jnp.ones((2, 2)), polish=1), ValueError, r"belongs to gradient='polar'"),
    (lambda: msign(jnp.ones((2, 2)), coefficients=polar_express(3), gradient="polar"), ValueError,
     r"3 steps and 0 of polish .* to between 0\.13 and 1\.9; give more polish"),
    (lambda: msign(jnp.ones((2, 2)), coefficients=polar_express(2), gradient="polar", polish=2), ValueError,
     r"polish=2\) needs steps that converge"),
    (lambda: msign(jnp.ones((2, 2)), coefficients=((-1.0, 0, 0),), gradient="polar", polish=3), ValueError,
     r"or other coefficients"),
    (lambda: msign({"w": jnp.ones((2, 2))}), TypeError, r"msign\(x=\{'w': .* must be an array \[\*b"),
    (lambda: msign([[1.0, 2.0], [3.0]]), TypeError, r"msign\(x=\[\[1\.0, 2\.0\], \[3\.0\]\]\) must be an array"),
])  # fmt: skip
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call()
