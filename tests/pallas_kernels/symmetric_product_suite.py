"""What every implementation of `symmetric_product` must do: each has a test class that inherits this one."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import test_util

from pallas_kernels import symmetric_product
from tests.tools.oracles import on_device
from tests.tools.tiers import thorough

# In the quick tests each dtype has one of these, and the tests of one shape take two dtypes.
QUICK_SHAPES = ((31, 13), (64, 64), (130, 67), (3, 16, 48), (2, 5, 0))
QUICK_DTYPES = (jnp.bfloat16, jnp.complex64)


def draw(shape, dtype, seed=0):
    rng = np.random.default_rng([seed, *shape])
    value = rng.standard_normal(shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        value = value + 1j * rng.standard_normal(shape)
    return on_device(value, dtype)


def exact(x):
    """The same numbers in NumPy's widest dtype."""
    return np.asarray(x).astype(np.complex128 if jnp.iscomplexobj(x) else np.float64)


def mirrored(p):
    """The Hermitian matrix with P's lower triangle."""
    lower = np.tril(p, -1)
    diagonal = np.einsum("...ii->...i", p).real
    return (
        lower
        + lower.conj().swapaxes(-1, -2)
        + diagonal[..., None] * np.eye(p.shape[-1])
    )


def oracle(x, y=None, c=None, alpha=1.0, beta=0.0):
    x = exact(x)
    y = x if y is None else exact(y)
    alpha, beta = (np.asarray(n, np.float64)[..., None, None] for n in (alpha, beta))
    p = alpha * (x @ y.conj().swapaxes(-1, -2))
    return mirrored(p if c is None else p + beta * exact(c))


def assert_as_accurate_as_xla(out, x, y=None, c=None, alpha=1.0, beta=0.0):
    """The error against float64 is at most twice that of plain XLA in the same dtype."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    plain = jnp.asarray(alpha, wide.type(0).real.dtype)[..., None, None] * jnp.einsum(
        "...ik,...jk->...ij",
        x,
        (x if y is None else y).conj(),
        preferred_element_type=wide,
        precision="highest",
    )
    if c is not None:
        plain = plain + jnp.asarray(beta, wide)[..., None, None] * c.astype(wide)
    want = oracle(x, y, c, alpha, beta)
    baseline = np.abs(mirrored(exact(plain.astype(x.dtype))) - want).max(initial=0)
    tiny = 4 * float(jnp.finfo(wide).eps) * np.abs(want).max(initial=0)
    assert out.dtype == x.dtype
    assert out.shape == want.shape
    assert np.abs(exact(out) - want).max(initial=0) <= 2 * baseline + tiny


def assert_symmetric(out):
    out = np.asarray(out)
    np.testing.assert_array_equal(out, out.conj().swapaxes(-1, -2))


class SymmetricProductSuite:
    """Inherit, name the `implementation`, and say which `shapes` and `dtypes` it is asked."""

    implementation = ""
    shapes = (
        (1, 1),
        (1, 7),
        (7, 1),
        (31, 13),
        (64, 64),
        (130, 67),
        (3, 16, 48),
        (2, 1, 37, 5),
        (2, 1, 3, 8, 4),
        (0, 4, 3),
        (2, 0, 3),
        (2, 5, 0),
    )
    dtypes = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64)
    every_dtype = True  # also where the shape doesn't vary
    derivative_dtype = jnp.float32

    def context(self):
        return contextlib.nullcontext()

    def product(self, x, **settings):
        """One compilation, not one for each operation."""
        with self.context():
            return jax.jit(symmetric_product, static_argnames="implementation")(
                x, implementation=self.implementation, **settings
            )

    def pytest_generate_tests(self, metafunc):
        if "shape" in metafunc.fixturenames:
            # Every shape in one dtype, every dtype in some shape.
            cases = [
                (shape, self.dtypes[i % len(self.dtypes)])
                for i, shape in enumerate(self.shapes)
            ]
            cases = [
                case if case[0] in QUICK_SHAPES else thorough(*case) for case in cases
            ]
            metafunc.parametrize(("shape", "dtype"), cases)
        elif "dtype" in metafunc.fixturenames:
            dtypes = self.dtypes if self.every_dtype else self.dtypes[:1]
            metafunc.parametrize(
                "dtype", [d if d in QUICK_DTYPES else thorough(d) for d in dtypes]
            )

    def test_gram_matrix(self, shape, dtype):
        x = draw(shape, dtype)
        out = self.product(x)
        assert_as_accurate_as_xla(out, x)
        assert_symmetric(out)

    def test_all_operands(self, shape, dtype):
        """Also shows that only lower triangles count: neither X Yᵀ nor C is symmetric here."""
        x = draw(shape, dtype, 1)
        y = draw(shape, dtype, 2)
        c = draw((*shape[:-1], shape[-2]), dtype, 3)
        out = self.product(x, y=y, c=c, alpha=0.7, beta=-1.3)
        assert_as_accurate_as_xla(out, x, y, c, 0.7, -1.3)
        assert_symmetric(out)

    def test_one_alpha_and_beta_for_each_matrix(self, dtype):
        x = draw((2, 3, 20, 8), dtype)
        c = draw((2, 3, 20, 20), dtype)
        alpha = jnp.asarray([[0.5, 2.0, 1.0], [0.0, -1.0, 3.0]])
        beta = jnp.asarray([[1.0, 0.0, -1.0], [2.0, 0.5, 1.0]])
        out = self.product(x, c=c, alpha=alpha, beta=beta)
        assert_as_accurate_as_xla(out, x, None, c, np.asarray(alpha), np.asarray(beta))

    def test_traced_scalars_compile_once(self):
        x = draw((24, 8), self.dtypes[0])
        self.product(
            x
        )  # the interpreter's first use sets a state that makes JAX trace anew
        traces = []

        @jax.jit
        def f(x, alpha):
            traces.append(alpha)
            return self.product(x, c=self.product(x), alpha=alpha, beta=alpha)

        with self.context():
            for alpha in (0.5, 2.0):
                assert_symmetric(f(x, alpha))
        assert len(traces) == 1

    def test_zero_alpha_leaves_c(self, dtype):
        x = draw((20, 8), dtype)
        c = draw((20, 20), dtype)
        c = self.product(c)
        np.testing.assert_array_equal(
            np.asarray(self.product(x, c=c, alpha=0.0, beta=1.0)), np.asarray(c)
        )

    @pytest.mark.parametrize("alpha", [1e30, 1e-30])
    def test_huge_and_tiny_alpha(self, alpha):
        """alpha multiplies the accumulator, so that what fits at the end isn't lost on the way."""
        dtype = jnp.bfloat16 if jnp.bfloat16 in self.dtypes else self.dtypes[0]
        x = draw((20, 16), dtype) * jnp.asarray(alpha**-0.25, dtype)
        assert_as_accurate_as_xla(self.product(x, alpha=alpha), x, alpha=alpha)

    def test_accumulates_in_float32(self, dtype):
        # 2048 ones: a bfloat16 sum sticks at 256, a float16 one is exact only to 2048.
        x = jnp.ones((8, 2048), dtype)
        np.testing.assert_array_equal(
            np.asarray(self.product(x)), np.asarray(jnp.full((8, 8), 2048, dtype))
        )

    @pytest.mark.nan
    def test_nan_stays_in_its_matrix(self, dtype):
        x = draw((2, 20, 8), dtype).at[0, 3, 3].set(jnp.nan)
        out = np.isnan(np.asarray(self.product(x)))
        assert out[0].any()
        assert not out[1].any()

    def test_vmap(self, dtype):
        x = draw((2, 3, 20, 8), dtype)
        c = draw((3, 20, 20), dtype)
        alpha = jnp.asarray([0.5, 2.0])
        with self.context():
            out = jax.vmap(
                lambda x, alpha: self.product(x, c=c, alpha=alpha, beta=0.5)
            )(x, alpha)
        every_alpha = jnp.broadcast_to(alpha[:, None], (2, 3))
        want = self.product(
            x, c=jnp.broadcast_to(c, (2, *c.shape)), alpha=every_alpha, beta=0.5
        )
        np.testing.assert_array_equal(np.asarray(out), np.asarray(want))

    def test_forward_derivative(self):
        dtype = self.derivative_dtype
        shape = (2, 24, 8)
        x, y, dx, dy = (draw(shape, dtype, seed) for seed in range(4))
        c, dc = (draw((2, 24, 24), dtype, seed) for seed in (4, 5))
        with self.context():
            gram = jax.jvp(lambda x: self.product(x, alpha=0.7), (x,), (dx,))[1]
            every = jax.jvp(
                lambda x, y, c, alpha, beta: self.product(
                    x, y=y, c=c, alpha=alpha, beta=beta
                ),
                (x, y, c, jnp.float32(0.7), jnp.float32(-1.3)),
                (dx, dy, dc, jnp.float32(0.3), jnp.float32(2.0)),
            )[1]
        tolerance = 200 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(
            exact(gram),
            0.7 * (oracle(x + dx) - oracle(x - dx)) / 2,
            atol=tolerance * 10,
            rtol=tolerance,
        )
        want = (
            oracle(dx, y, dc, 0.7, -1.3)
            + oracle(x, dy, None, 0.7)
            + oracle(x, y, c, 0.3, 2.0)
        )
        np.testing.assert_allclose(
            exact(every), want, atol=tolerance * 10, rtol=tolerance
        )
        assert_symmetric(gram)
        assert_symmetric(every)

    def test_reverse_derivative(self):
        """⟨S̄, dS⟩ = ⟨X̄, dX⟩ + …: the transpose of forward mode, for every argument."""
        dtype = self.derivative_dtype
        arguments = [
            draw((24, 8), dtype, 0),
            draw((24, 8), dtype, 1),
            draw((24, 24), dtype, 2),
            0.7,
            -1.3,
        ]
        tangents = [
            draw(np.shape(a), dtype, 7) if np.ndim(a) else 0.4 for a in arguments
        ]
        cotangent = draw((24, 24), dtype, 9)

        def f(x, y, c, alpha, beta):
            return self.product(x, y=y, c=c, alpha=alpha, beta=beta)

        with self.context():
            _, forward = jax.jvp(f, arguments, tangents)
            _, pullback = jax.vjp(f, *arguments)
            cotangents = pullback(cotangent)
        left = np.sum(exact(cotangent) * exact(forward))
        right = sum(
            np.sum(exact(a) * exact(b))
            for a, b in zip(cotangents, tangents, strict=True)
        )
        scale = np.linalg.norm(exact(cotangent)) * np.linalg.norm(exact(forward))
        assert abs(left - right) <= 20 * float(jnp.finfo(dtype).eps) * scale

    @pytest.mark.thorough
    def test_second_derivatives(self):
        if self.derivative_dtype != jnp.float32:
            pytest.skip("numerical differences need float32")
        x = draw((6, 4), jnp.float32)
        y = draw((6, 4), jnp.float32, 1)
        c = draw((6, 6), jnp.float32, 2)
        test_util.check_grads(
            lambda *a: self.product(a[0], y=a[1], c=a[2], alpha=a[3], beta=a[4]),
            (x, y, c, jnp.float32(0.7), jnp.float32(-1.3)),
            order=2,
            modes=("fwd", "rev"),
            atol=3e-2,
            rtol=3e-2,
        )
        test_util.check_grads(
            self.product, (x,), order=2, modes=("fwd", "rev"), atol=3e-2, rtol=3e-2
        )
