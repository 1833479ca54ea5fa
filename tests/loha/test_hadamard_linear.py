"""x · (W + ΔW) of a low-rank Hadamard adapter against float64 NumPy, and what its derivative keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from muonjax import hadamard_linear
from tests.tools.oracles import on_device

M = 301
N = 200
R = 5
T = 7


def factors(m=M, n=N, r=R, seed=0, batch=()):
    rng = np.random.default_rng(seed)
    shapes = [(*batch, m, r), (*batch, r, n)] * 2
    return [rng.standard_normal(shape) / r**0.5 for shape in shapes]


def weight64(a, b, c, d, scale=1.0):
    return scale * (a @ b) * (c @ d)


def gradients64(g, a, b, c, d, scale):
    """The vector-Jacobian product of `weight64`, by hand."""
    left = scale * g * (c @ d)
    right = scale * g * (a @ b)
    return (
        left @ b.T,
        a.T @ left,
        right @ d.T,
        c.T @ right,
        np.sum(g * (a @ b) * (c @ d)),
    )


def relative(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def as_float32(arrays):
    return [on_device(a) for a in arrays]


def plain(x, w, a, b, c, d):
    return x @ (w + (a @ b) * (c @ d))


def check_gradients(exact, run):
    f = factors()
    rng = np.random.default_rng(3)
    x, w, g = (rng.standard_normal(shape) for shape in [(T, M), (M, N), (T, N)])
    y, vjp = run(lambda s, x, w, *f: hadamard_linear(x, w, *f, scale=s), 0.7, x, w, *f)
    assert relative(y, x @ (w + weight64(*f, 0.7))) < exact
    scale, dx, dw, *got = vjp(jnp.asarray(g, y.dtype))
    assert relative(dx, g @ (w + weight64(*f, 0.7)).T) < exact
    assert relative(dw, x.T @ g) < exact
    *want, want_scale = gradients64(x.T @ g, *f, 0.7)
    assert all(
        relative(one, other) < exact for one, other in zip(got, want, strict=True)
    )
    # A sum of as many signs as there are elements cancels: judged by what is summed.
    assert abs(float(scale) - want_scale) < exact * np.linalg.norm(
        x.T @ g
    ) * np.linalg.norm(weight64(*f))


def test_the_product_and_its_gradients():
    check_gradients(
        1e-6,
        lambda call, s, *args: jax.vjp(call, jnp.float32(s), *as_float32(args)),
    )


def test_double_precision_stays_double():
    with jax.enable_x64(True):
        check_gradients(
            1e-13,
            lambda call, *args: jax.vjp(call, *(jnp.asarray(a) for a in args)),
        )


def test_second_derivatives_are_those_of_the_plain_product():
    f = as_float32(factors(m=6, n=4, r=2))
    rng = np.random.default_rng(10)
    x, w = as_float32([rng.standard_normal((2, 6)), rng.standard_normal((6, 4))])

    def mixed(call):
        value = lambda x, w, *f: jnp.sum(jnp.tanh(call(x, w, *f)))  # noqa: E731
        forward = jax.jacfwd(jax.grad(value, argnums=(1, 2)))
        backward = jax.jacrev(jax.grad(value), argnums=(0, 1, 2))
        return jax.jit(lambda *args: (*forward(*args), *backward(*args)))(x, w, *f)

    for one, other in zip(
        *(jax.tree.leaves(mixed(call)) for call in (hadamard_linear, plain)),
        strict=True,
    ):
        assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_vmap_over_examples_computes_one_weight():
    f = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(M, R), (R, N)] * 2]
    x = jax.ShapeDtypeStruct((3, M), jnp.float32)
    w = jax.ShapeDtypeStruct((M, N), jnp.float32)
    over_examples = jax.vmap(hadamard_linear, in_axes=(0, *[None] * 5))
    assert f"[3,{M},{N}]" not in str(jax.make_jaxpr(over_examples)(x, w, *f))


def test_leading_axes_and_no_axes_of_x():
    f = as_float32(factors(m=9, n=6, r=2))
    w = jnp.ones((9, 6))
    for shape in [(9,), (2, 3, 9), (0, 9)]:
        x = jnp.ones(shape)
        assert_allclose(
            hadamard_linear(x, w, *f), plain(x, w, *f), rtol=1e-5, atol=1e-6
        )


def test_half_precision_rounds_the_weight_once():
    x, w, *f = (
        jnp.asarray(a, jnp.bfloat16)
        for a in (np.eye(64), np.zeros((64, 32)), *factors(64, 32, 4))
    )
    want = weight64(*(np.asarray(a, np.float64) for a in f))
    got = hadamard_linear(x, w, *f)
    assert got.dtype == jnp.bfloat16
    # half an ulp of bfloat16, 2^-9, an element; two rounded products would be three times that
    assert np.max(np.abs(np.asarray(got, np.float64) - want) / np.abs(want)) < 2.0**-8


def test_a_half_precision_input_is_promoted_as_in_a_plain_product():
    f = factors(m=64, n=32, r=4)
    rng = np.random.default_rng(9)
    x = jnp.asarray(rng.standard_normal((T, 64)), jnp.bfloat16)
    w = rng.standard_normal((64, 32))
    got = hadamard_linear(x, *as_float32([w, *f]))
    assert got.dtype == jnp.float32
    assert relative(got, np.asarray(x, np.float64) @ (w + weight64(*f))) < 1e-6
    # Half-precision x and w multiply in half precision, also under adapters in single precision.
    assert (
        hadamard_linear(x, jnp.asarray(w, jnp.bfloat16), *as_float32(f)).dtype
        == jnp.float32
    )


def test_a_double_precision_scale_of_single_precision_factors():
    with jax.enable_x64(True):
        x, w, *f = as_float32([np.ones((2, M)), np.ones((M, N)), *factors()])
        got = hadamard_linear(x, w, *f, scale=jnp.asarray(0.5, jnp.float64))
        assert got.dtype == jnp.float32
        assert_allclose(got, hadamard_linear(x, w, *f, scale=0.5), rtol=1e-5)


def test_precision_is_that_of_every_product():
    call = functools.partial(hadamard_linear, precision="highest")
    jaxpr = str(
        jax.make_jaxpr(call)(
            jnp.ones((2, 9)),
            jnp.ones((9, 6)),
            *as_float32(factors(m=9, n=6, r=2)),
        )
    )
    assert (
        jaxpr.count("dot_general[") == jaxpr.count("HIGHEST") / 2 == 3
    )  # one for each side


def test_the_derivative_keeps_its_arguments_alone():
    given = as_float32([np.ones((T, M)), np.ones((M, N)), *factors()])
    kept = jax.tree.leaves(jax.vjp(hadamard_linear, *given)[1])
    assert sorted(leaf.shape for leaf in kept if leaf.ndim) == sorted(
        a.shape for a in given
    )


def test_the_weight_waits_for_x_and_its_recomputation_for_the_cotangent():
    given = as_float32([np.ones((T, M)), np.ones((M, N)), *factors()])
    gradient = jax.grad(lambda *args: jnp.sum(hadamard_linear(*args) ** 2), argnums=2)
    text = jax.jit(gradient).lower(*given).as_text()
    assert text.count("optimization_barrier") >= 2


# JAX 0.10's CPU compiler drops optimization barriers.


A = jnp.ones((6, 2))
B = jnp.ones((2, 4))
X = jnp.ones((3, 6))
W = jnp.ones((6, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, W, A, A, A, B), "exchanged"),
        ((X, W, A, B, A, B[:, :3]), "exchanged"),
        ((X, W, A[:, :0], B[:0], A[:, :0], B[:0]), "none of them empty"),
        ((X[:, :5], W, A, B, A, B), r"needs x \[..., m\].*got x \(3, 5\)"),
        ((X, W, A[None], B[None], A[None], B[None]), "jax.vmap"),
        ((X, X, A, B, A, B), r"w and factors \[\(3, 6\), \(6, 2\)"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        hadamard_linear(*arguments)
