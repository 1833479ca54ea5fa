"""Low-rank Hadamard products against float64 NumPy, and what their derivatives keep."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muonjax import hadamard_dot, hadamard_linear, hadamard_weight
from muonjax._adapters.hadamard import column_norms
from tests.tools.oracles import on_device
from tests.tools.tiers import nightly, quick, thorough

M, N, R, T = 301, 200, 5, 7  # 3 blocks of 100 rows and 1 more
FORMS = ("rows", "kronecker")


def factors(m=M, n=N, r=R, seed=0, batch=()):
    rng = np.random.default_rng(seed)
    shapes = [(*batch, m, r), (*batch, r, n)] * 2
    return [rng.standard_normal(shape) / r**0.5 for shape in shapes]


def weight64(a, b, c, d, scale=1.0):
    return scale * (a @ b) * (c @ d)


def gradients64(g, a, b, c, d, scale):
    """The vector-Jacobian product of `weight64`, by hand."""
    left, right = scale * g * (c @ d), scale * g * (a @ b)
    return left @ b.T, a.T @ left, right @ d.T, c.T @ right, np.sum(g * (a @ b) * (c @ d))


def check_gradients(got, got_scale, g, f, scale=0.7):
    *want, want_scale = gradients64(g, *f, scale)
    for one, other in zip(got, want, strict=True):
        assert relative(one, other) < 1e-6
    # A sum of as many signs as there are elements cancels: judged by what is summed.
    assert abs(float(got_scale) - want_scale) < 1e-6 * np.linalg.norm(g) * np.linalg.norm(weight64(*f))


def relative(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def as_float32(arrays):
    return [on_device(a) for a in arrays]


@pytest.mark.parametrize("m", [1, 300, *map(thorough, [8, 128, 1024])])
def test_weight_is_the_product_of_two_products(m):
    f = factors(m=m)
    assert relative(hadamard_weight(*as_float32(f), scale=0.3), weight64(*f, 0.3)) < 5e-7


def test_double_precision_stays_double():
    with jax.enable_x64(True):
        f = factors()
        got, pulled = jax.vjp(hadamard_weight, *(jnp.asarray(a) for a in f))
        assert relative(got, weight64(*f)) < 1e-15
        want = gradients64(np.ones((M, N)), *f, 1.0)[:4]
        assert all(relative(a, b) < 1e-13 for a, b in zip(pulled(jnp.ones((M, N))), want, strict=True))


def test_weight_of_a_stack_takes_a_scale_each():
    f = factors(m=9, n=6, r=2, batch=(3,))
    scales = np.array([1.0, -2.0, 0.5])
    want = np.stack([weight64(*(a[i] for a in f), scales[i]) for i in range(3)])
    assert relative(hadamard_weight(*as_float32(f), scale=jnp.asarray(scales, jnp.float32)), want) < 5e-7


def test_weight_gradients_of_every_factor_and_of_the_scale():
    f, g = factors(), np.random.default_rng(1).standard_normal((M, N))
    _, vjp = jax.vjp(lambda s, *f: hadamard_weight(*f, scale=s), jnp.float32(0.7), *as_float32(f))
    scale, *got = vjp(jnp.asarray(g, jnp.float32))
    check_gradients(got, scale, g, f)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m", [thorough(3), M])
def test_dot_and_its_gradients(form, m):
    f, rng = factors(m=m), np.random.default_rng(2)
    x, g = rng.standard_normal((T, m)), rng.standard_normal((T, N))
    y, vjp = jax.vjp(
        lambda s, x, *f: hadamard_dot(x, *f, scale=s, form=form), jnp.float32(0.7), *as_float32([x, *f])
    )
    assert relative(y, x @ weight64(*f, 0.7)) < 1e-6
    scale, dx, *got = vjp(jnp.asarray(g, jnp.float32))
    assert relative(dx, g @ weight64(*f, 0.7).T) < 1e-6
    check_gradients(got, scale, x.T @ g, f)


@pytest.mark.parametrize("form", FORMS)
def test_linear_and_its_gradients(form):
    f, rng = factors(), np.random.default_rng(3)
    x, w, g = (rng.standard_normal(shape) for shape in [(T, M), (M, N), (T, N)])
    y, vjp = jax.vjp(
        lambda s, x, w, *f: hadamard_linear(x, w, *f, scale=s, form=form),
        jnp.float32(0.7),
        *as_float32([x, w, *f]),
    )
    assert relative(y, x @ (w + weight64(*f, 0.7))) < 1e-6
    scale, dx, dw, *got = vjp(jnp.asarray(g, jnp.float32))
    assert relative(dx, g @ (w + weight64(*f, 0.7)).T) < 1e-6
    assert relative(dw, x.T @ g) < 1e-6
    check_gradients(got, scale, x.T @ g, f)


def test_magnitude_scales_columns_of_unit_norm_and_its_gradient_goes_through_the_norm():
    f, rng = factors(), np.random.default_rng(4)
    x, w, g = (rng.standard_normal(shape) for shape in [(T, M), (M, N), (T, N)])
    magnitude = rng.uniform(0.5, 2.0, N)
    v = w + weight64(*f, 0.7)
    norm = np.linalg.norm(v, axis=0)
    y, vjp = jax.vjp(
        lambda k, *f: hadamard_linear(*as_float32([x, w]), *f, scale=0.7, magnitude=k),
        *as_float32([magnitude, *f]),
    )
    assert relative(y, x @ v * (magnitude / norm)) < 1e-6
    dk, *got = vjp(jnp.asarray(g, jnp.float32))
    assert relative(dk, np.sum(g * (x @ v), 0) / norm) < 1e-6
    # d(v/‖v‖) = (dv − v̂ (v̂·dv)) / ‖v‖, column by column
    gw = x.T @ g * magnitude
    gv = (gw - v / norm * np.sum(v / norm * gw, 0)) / norm
    for one, want in zip(got, gradients64(gv, *f, 0.7)[:4], strict=True):
        assert relative(one, want) < 2e-6


def test_magnitude_of_the_columns_themselves_changes_nothing():
    f, w = factors(), np.random.default_rng(5).standard_normal((M, N))
    f[3][:] = 0.0  # as at the start of training
    x, w, *f = as_float32([np.ones((2, M)), w, *f])
    np.testing.assert_allclose(hadamard_linear(x, w, *f, magnitude=column_norms(w)), x @ w, atol=1e-4)


def test_tucker_weight_and_its_gradients():
    rng = np.random.default_rng(6)
    f, window = factors(m=12, n=10, r=3), (3, 2)
    t = [rng.standard_normal((*window, 3, 3)) for _ in range(2)]
    sides = [np.einsum("ij,xyjl,lo->xyio", a, c, b) for a, c, b in zip(f[::2], t, f[1::2], strict=True)]
    k, vjp = jax.vjp(
        lambda t1, t2, *f: hadamard_weight(*f, scale=0.5, tucker=(t1, t2)), *as_float32([*t, *f])
    )
    assert relative(k, 0.5 * sides[0] * sides[1]) < 1e-6
    g = rng.standard_normal(k.shape)
    grads = vjp(jnp.asarray(g, jnp.float32))
    for got, names in zip(grads[:3:2], ("ij,lo->xyjl", "xyjl,lo->ij"), strict=True):  # t1 and w1a
        left = 0.5 * g * sides[1]
        others = {"ij,lo->xyjl": (f[0], f[1]), "xyjl,lo->ij": (t[0], f[1])}[names]
        want = np.einsum(f"xyio,{names}", left, *others)
        assert relative(got, want) < 1e-6


def test_tucker_of_one_position_is_a_plain_product_by_the_cores():
    f = as_float32(factors(m=6, n=5, r=2))
    t = jax.random.normal(jax.random.key(0), (2, 1, 2, 2))
    want = (f[0] @ t[0, 0] @ f[1]) * (f[2] @ t[1, 0] @ f[3])
    np.testing.assert_allclose(hadamard_weight(*f, tucker=(t[0], t[1])), want[None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_forward_mode_is_the_transpose_of_reverse_mode(form):
    f, rng = as_float32(factors()), np.random.default_rng(7)
    x, g = as_float32([rng.standard_normal((T, M)), rng.standard_normal((T, N))])
    tangents = as_float32(factors(seed=8))

    def call(*f):
        return hadamard_dot(x, *f, form=form)

    _, pushed = jax.jvp(call, f, tangents)
    pulled = jax.vjp(call, *f)[1](g)
    want = sum(float(jnp.vdot(t, p)) for t, p in zip(tangents, pulled, strict=True))
    assert float(jnp.vdot(g, pushed)) == pytest.approx(want, rel=1e-4)


@quick("<lambda>")
@pytest.mark.parametrize("call", [hadamard_weight, lambda *f: hadamard_dot(jnp.ones((2, 6)), *f)])
def test_second_derivative_is_that_of_the_plain_product(call):
    f = as_float32(factors(m=6, n=4, r=2))

    def plain(*f):
        w = (f[0] @ f[1]) * (f[2] @ f[3])
        return jnp.ones((2, 6)) @ w if call is not hadamard_weight else w

    got, want = (jax.jit(jax.hessian(lambda a, c=c: jnp.sum(c(a, *f[1:]) ** 2)))(f[0]) for c in (call, plain))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS)
def test_mixed_second_derivative_is_that_of_the_plain_product(form):
    f, rng = as_float32(factors(m=6, n=4, r=2)), np.random.default_rng(10)
    x, w = as_float32([rng.standard_normal((2, 6)), rng.standard_normal((6, 4))])

    def plain(x, w, a, b, c, d):
        return x @ (w + (a @ b) * (c @ d))

    def mixed(call):
        value = lambda x, w, *f: jnp.sum(jnp.tanh(call(x, w, *f)))  # noqa: E731
        forward = jax.jacfwd(jax.grad(value, argnums=(1, 2)))
        backward = jax.jacrev(jax.grad(value), argnums=(0, 1, 2))
        return jax.jit(lambda *args: (*forward(*args), *backward(*args)))(x, w, *f)

    got, want = mixed(functools.partial(hadamard_linear, form=form)), mixed(plain)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@quick("kronecker")
@pytest.mark.parametrize("form", FORMS)
def test_vmap_of_the_gradient(form):
    f = as_float32(factors(m=9, n=6, r=2, batch=(3,)))
    x = jax.random.normal(jax.random.key(0), (3, T, 9))
    grad = jax.jit(jax.grad(lambda x, a, *f: jnp.sum(hadamard_dot(x, a, *f, form=form) ** 2), argnums=(0, 1)))
    for got, *each in zip(
        jax.vmap(grad)(x, *f), *(grad(x[i], *(a[i] for a in f)) for i in range(3)), strict=True
    ):
        np.testing.assert_allclose(got, jnp.stack(each), rtol=1e-4, atol=1e-4)


def test_vmap_over_examples_and_over_adapters():
    f = as_float32(factors(m=9, n=6, r=2, batch=(3,)))
    x = jax.random.normal(jax.random.key(0), (3, T, 9))
    got = jax.vmap(hadamard_dot)(x, *f)
    np.testing.assert_allclose(got, x @ hadamard_weight(*f), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["auto", *FORMS])
def test_leading_axes_and_no_axes_of_x(form):
    f = as_float32(factors(m=9, n=6, r=2))
    w = hadamard_weight(*f)
    for shape in [(9,), (2, 3, 9), (0, 9)]:
        x = jnp.ones(shape)
        np.testing.assert_allclose(hadamard_dot(x, *f, form=form), x @ w, rtol=1e-5, atol=1e-6)


def test_bfloat16_rounds_the_weight_once():
    f = factors(m=64, n=32, r=4)
    halves = [jnp.asarray(a, jnp.bfloat16) for a in f]
    want = weight64(*(np.asarray(a, np.float64) for a in halves))
    got = hadamard_weight(*halves)
    assert got.dtype == jnp.bfloat16
    # half an ulp of bfloat16, 2^-9, an element; two rounded products would be three times that
    assert np.max(np.abs(np.asarray(got, np.float64) - want) / np.abs(want)) < 2.0**-8


@pytest.mark.parametrize("form", FORMS)
def test_a_half_precision_input_is_promoted_as_in_a_plain_product(form):
    f, rng = factors(m=64, n=32, r=4), np.random.default_rng(9)
    x, w = jnp.asarray(rng.standard_normal((T, 64)), jnp.bfloat16), rng.standard_normal((64, 32))
    want = np.asarray(x, np.float64) @ weight64(*f)
    got = hadamard_dot(x, *as_float32(f), form=form)
    assert got.dtype == jnp.float32
    assert relative(got, want) < 1e-6
    got = hadamard_linear(x, *as_float32([w, *f]), form=form)
    assert relative(got, want + np.asarray(x, np.float64) @ w) < 1e-6


def test_a_double_precision_scale_of_single_precision_factors():
    f, w = factors(), np.random.default_rng(5).standard_normal((M, N))
    with jax.enable_x64(True):
        x, w, *f = as_float32([np.ones((2, M)), w, *f])
        scale = jnp.asarray(0.5, jnp.float64)
        for magnitude in (None, column_norms(w)):
            got = hadamard_linear(x, w, *f, scale=scale, magnitude=magnitude)
            want = hadamard_linear(x, w, *f, scale=0.5, magnitude=magnitude)
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def unrolled(layers, width, linear, tokens=16):
    """The compiled gradient of a deep network with respect to its adapters alone."""
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    adapters = [(leaf(width, 8), leaf(8, width)) * 2] * layers
    kernels = [leaf(width, width)] * layers

    def loss(adapters, kernels, x):
        for w, f in zip(kernels, adapters, strict=True):
            x = jnp.tanh(linear(x, w, *f))
        return jnp.sum(x**2)

    return jax.jit(jax.grad(loss)).lower(adapters, kernels, leaf(tokens, width)).compile()


FUNCTIONS = {
    "rows": lambda x, w, *f: hadamard_linear(x, w, *f, form="rows"),
    "kronecker": lambda x, w, *f: hadamard_linear(x, w, *f, form="kronecker"),
    "dot": lambda x, w, *f: x @ w + hadamard_dot(x, *f, form="rows"),
    "weight": lambda x, w, *f: x @ (w + hadamard_weight(*f)),
}


# 255: neither the rows after the last whole block nor a block that is the whole matrix may be kept.
@pytest.mark.thorough
@pytest.mark.parametrize("width", [255, *map(nightly, [128, 512])])
def test_unrolled_layers_hold_no_matrix_between_the_passes(width):
    layers, weight = 8, 4 * width**2
    plain = unrolled(layers, width, lambda x, w, a, b, c, d: x @ (w + (a @ b) * (c @ d)))
    assert plain.memory_analysis().temp_size_in_bytes > 2.5 * layers * weight
    thin = layers * 4 * (16 * width + 4 * 8 * width)  # each layer's tokens, and gradients of its factors
    for name, linear in FUNCTIONS.items():
        ours = unrolled(layers, width, linear).memory_analysis().temp_size_in_bytes
        # W + ΔW itself is an ordinary value beside `hadamard_weight`, which x · (W + ΔW) keeps.
        kept = layers if name == "weight" else 0
        assert ours < (kept + 2.5) * weight + thin, name


@pytest.mark.parametrize("name", ["kronecker", *map(thorough, ["rows", "dot"])])
def test_unrolled_layers_hold_one_input_each_between_the_passes(name):
    layers, width, tokens = 8, 128, 1024
    x = 4 * tokens * width
    # Three more at work, and the rest for blocks and factors; with zeros written ahead it would be twice `layers`.
    compiled = unrolled(layers, width, FUNCTIONS[name], tokens)
    assert compiled.memory_analysis().temp_size_in_bytes < (layers + 4) * x


@pytest.mark.parametrize("name", FUNCTIONS)
def test_recomputation_is_behind_a_barrier_in_a_loop(name):
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    args = leaf(4, 130), leaf(130, 6), leaf(130, 3), leaf(3, 6), leaf(130, 3), leaf(3, 6)
    grad = jax.grad(lambda *args: jnp.sum(FUNCTIONS[name](*args)), argnums=(2, 3, 4, 5))
    text = jax.jit(grad).lower(*args).as_text()
    loops, after = text.split("stablehlo.while", 1)
    assert "optimization_barrier" not in loops
    assert "optimization_barrier" in after


def test_precision_is_that_of_every_product():
    f, x = as_float32(factors(m=9, n=6, r=2)), jnp.ones((2, 9))
    for form in FORMS:
        call = functools.partial(hadamard_linear, form=form, precision="highest")
        jaxpr = str(jax.make_jaxpr(call)(x, jnp.ones((9, 6)), *f))
        products = jaxpr.count("dot_general[")
        assert products == jaxpr.count("HIGHEST") / 2 > 0, form  # one for each side


@pytest.mark.parametrize("form", FORMS)
def test_dot_makes_no_matrix_as_large_as_the_weight(form):
    m, n, r = 1024, 768, 4
    f = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(m, r), (r, n)] * 2]
    x = jax.ShapeDtypeStruct((2, m), jnp.float32)
    gradient = jax.grad(lambda x, *f: jnp.sum(hadamard_dot(x, *f, form=form) ** 2), argnums=(0, 1, 2, 3, 4))
    text = jax.jit(gradient).lower(x, *f).as_text()
    sizes = [np.prod([int(d) for d in dims.split("x")]) for dims in re.findall(r"tensor<([\dx]+)xf32>", text)]
    assert max(sizes) < m * n / 2


@pytest.mark.parametrize(("tokens", "is_kronecker"), [(64, True), (65, False)])
def test_auto_changes_form_where_the_documentation_says(tokens, is_kronecker):
    f = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(1024, 16), (16, 1024)] * 2]
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in [(tokens, 1024), (1024, 1024)])

    def jaxpr(form):
        return str(jax.make_jaxpr(lambda *args: hadamard_linear(*args, form=form))(x, w, *f))

    assert (jaxpr("auto") == jaxpr("kronecker")) == is_kronecker
    assert (jaxpr("auto") == jaxpr("rows")) != is_kronecker


def test_dot_auto_takes_the_cheaper_form():
    x = jax.ShapeDtypeStruct((512, 256), jnp.float32)
    for r, form in [(2, "kronecker"), (64, "rows")]:
        f = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(256, r), (r, 256)] * 2]
        auto, named = (
            str(jax.make_jaxpr(lambda *args, form=form: hadamard_dot(*args, form=form))(x, *f))
            for form in ("auto", form)
        )
        assert auto == named


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b, x: hadamard_weight(a, a, a, b), "exchanged"),
        (lambda a, b, x: hadamard_weight(a, b, a, b[:, :3]), "exchanged"),
        (lambda a, b, x: hadamard_weight(a[:, :0], b[:0], a[:, :0], b[:0]), "rank must be > 0"),
        (lambda a, b, x: hadamard_weight(a, b, a, b, tucker=(jnp.ones((3, 2, 3)),) * 2), "cores"),
        (lambda a, b, x: hadamard_weight(*(f.astype(int) for f in (a, b, a, b))), "floating-point"),
        (lambda a, b, x: hadamard_dot(x[:, :5], a, b, a, b), "does not end in 6"),
        (lambda a, b, x: hadamard_dot(x, a, b, a, b, form="fast"), "'rows' or 'kronecker'"),
        (lambda a, b, x: hadamard_dot(x, a[None], b[None], a[None], b[None]), "jax.vmap"),
        (lambda a, b, x: hadamard_linear(x, x, a, b, a, b), r"make \(6, 4\)"),
        (lambda a, b, x: hadamard_linear(x, jnp.ones((6, 4)), a, b, a, b, magnitude=x), "each of 4 columns"),
        (
            lambda a, b, x: hadamard_linear(
                x, jnp.ones((6, 4)), a, b, a, b, magnitude=jnp.ones(4), form="kronecker"
            ),
            "norms need",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.ones((6, 2)), jnp.ones((2, 4)), jnp.ones((3, 6)))
