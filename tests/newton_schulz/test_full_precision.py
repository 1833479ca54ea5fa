import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import muonjax
from muonjax import NewtonSchulz
from muonjax._newton_schulz.coefficients import evaluate, parts_of
from muonjax._newton_schulz.full_precision import GROWTH_TIMES_EPS
from tests.tools import oracles
from tests.tools.tiers import every_pair, examples, nightly, quick, thorough

PRESETS = {
    "fast": NewtonSchulz.fast(),
    "balanced": NewtonSchulz.balanced(),
    "accurate": NewtonSchulz.accurate(),
}
# Largest |f(s) - 1| that each preset's polynomials allow for normalized singular values in [lower, 1.01].
LOWER = {"fast": 2e-2, "balanced": 1e-2, "accurate": 1e-5}


def minimax_error(preset, m):
    s = np.concatenate(
        [np.geomspace(LOWER[preset], 1.0, 20_000), np.linspace(0.5, 1.0, 20_000)]
    )
    return np.abs(evaluate(PRESETS[preset].in_full_precision(m)[0], s) - 1).max()


@functools.partial(jax.jit, static_argnums=1)
def orthogonalize(x, settings):
    return muonjax.newton_schulz(x, settings)


def spectrum(name, m):
    return {
        "gaussian": np.linalg.svd(
            np.random.default_rng(7).standard_normal((m, 2 * m)), compute_uv=False
        ),
        "log to 1e-3": np.geomspace(1, 1e-3, m),
        "log to 1e-6": np.geomspace(1, 1e-6, m),
        "one dominant": np.r_[1.0, np.full(m - 1, 3e-3)],
        "repeated": np.ones(m),
        "two levels": np.r_[np.ones(m // 2), np.full(m - m // 2, 0.05)],
        "hilbert": 1 / (1 + np.arange(m)),
        "rank deficient": np.r_[np.linspace(1, 0.5, m // 2), np.zeros(m - m // 2)],
        # The subspace of a random start is worst where many singular values are just below the dominant ones.
        "plateau below": np.r_[np.ones(m // 10), np.full(m - m // 10, 0.3)],
    }[name]


SPECTRA = [
    "gaussian",
    "log to 1e-3",
    "log to 1e-6",
    "one dominant",
    "repeated",
    "two levels",
    "hilbert",
]
SPECTRA += ["rank deficient", "plateau below"]
SHAPES = [(72, 160), thorough((72, 72)), thorough((37, 101)), nightly((16, 256))]


@pytest.mark.rounding
@every_pair
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("preset", PRESETS)
def test_polar_error_is_within_the_minimax_bound(preset, name, shape):
    """Directions inside of the schedule's interval are off by its minimax error at most, the ones below it
    by 1."""
    m, n = shape
    s = spectrum(name, m)
    x = oracles.with_spectrum(s, n)
    y = np.asarray(
        orthogonalize(jnp.asarray(x, jnp.float32), PRESETS[preset]), np.float64
    )
    s = s[s > 0] / np.linalg.norm(s, 8)
    # Deflation only raises the normalized values of the tail; what it may cost is its stated tolerance of
    # 0.05.
    inside = s >= LOWER[preset]
    bound = (
        np.sqrt((inside * (minimax_error(preset, m) + 1e-3) ** 2 + ~inside).sum() / m)
        + 0.05
    )
    assert oracles.polar_error(y, x) <= bound
    assert np.linalg.norm(y, 2) <= 1 + max(0.06, minimax_error(preset, m) + 1e-3)


@pytest.mark.rounding
@every_pair
@pytest.mark.parametrize("n", [96, nightly(256)])
@pytest.mark.parametrize("name", [*SPECTRA, "as many equal as are shrunk"])
@pytest.mark.parametrize("preset", ["fast", "balanced"])
def test_deflation_is_never_worse(preset, name, n):
    s = (
        np.r_[np.ones(9), np.full(63, 0.3)]
        if name not in SPECTRA
        else spectrum(name, 72)
    )
    x = oracles.with_spectrum(s, n)
    with_it = PRESETS[preset]
    without = NewtonSchulz(coefficients=with_it.coefficients, deflation=0)
    errors = [
        oracles.polar_error(orthogonalize(jnp.asarray(x, jnp.float32), s), x)
        for s in (with_it, without)
    ]
    assert errors[0] <= errors[1] + 0.05


def test_deflation_finds_a_long_tail():
    """One direction a thousand times the rest: three steps alone leave the tail at a tenth, deflation lifts
    it."""
    x = oracles.with_spectrum(np.r_[1.0, np.full(71, 1e-3)], 96)
    fast = NewtonSchulz.fast()
    plain = NewtonSchulz(coefficients=fast.coefficients, deflation=0)
    assert (
        oracles.polar_error(orthogonalize(jnp.asarray(x, jnp.float32), plain), x) > 0.6
    )
    assert (
        oracles.polar_error(orthogonalize(jnp.asarray(x, jnp.float32), fast), x) < 0.35
    )


@pytest.mark.rounding
@pytest.mark.parametrize("condition", [1e3, 1e5])
@pytest.mark.parametrize(
    ("n", "tall"), [thorough(64, False), nightly(256, False), (256, True)]
)
def test_accurate_is_as_exact_as_the_condition_allows(condition, n, tall):
    x = oracles.with_spectrum(np.geomspace(1, 1 / condition, 64), n, tall=tall).astype(
        np.float32
    )
    y = orthogonalize(jnp.asarray(x), NewtonSchulz.accurate())
    assert (
        oracles.polar_error(y, x.astype(np.float64))
        < np.finfo(np.float32).eps * condition
    )


@pytest.mark.rounding
@every_pair
@quick(
    "schatten-64-auto-(33, 200)-None",
    "frobenius-64-auto-(33, 200)-None",
    "frobenius-64-auto-(33, 200)-bfloat16",
)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize(
    "shape", [(33, 200), *map(thorough, [(1, 1), (1, 9), (64, 64)])], ids=str
)
@pytest.mark.parametrize(
    ("deflation", "form"),
    [thorough(0, "standard"), thorough(64, "standard"), (64, "auto")],
)
@pytest.mark.parametrize("normalization", ["schatten", "frobenius"])
def test_every_normalization_bounds_the_largest_singular_value(
    normalization, deflation, form, shape, dtype
):
    """f rises without bound above 1, so a bound that fails shows at once: adversarial for each norm, over
    dtypes."""
    settings = NewtonSchulz(
        coefficients=muonjax.polar_express(6),
        normalization=normalization,
        deflation=deflation,
        form=form,
        compute_dtype=dtype,
    )
    m, n = shape
    one = np.r_[1.0, np.zeros(m - 1)]
    for s in (
        one,
        np.ones(m),
        np.geomspace(1, 1e-3, m),
        one + 1e-2,
        1 / np.arange(1, m + 1) ** 2,
    ):
        x = jnp.asarray(oracles.with_spectrum(s, n), jnp.float32)
        assert (
            np.linalg.norm(np.asarray(orthogonalize(x, settings), np.float64), 2) < 1.05
        )


def test_jordan_with_frobenius_is_the_textbook_iteration():
    x = np.random.default_rng(0).standard_normal((24, 60))
    rows = 5 * muonjax.JORDAN
    expected = oracles.newton_schulz(x, rows)
    for form in ("standard", "gram"):
        textbook = NewtonSchulz(
            coefficients=5 * muonjax.JORDAN,
            normalization="frobenius",
            deflation=0,
            form=form,
        )
        np.testing.assert_allclose(
            orthogonalize(jnp.asarray(x, jnp.float32), textbook), expected, atol=2e-5
        )


@given(
    m=st.integers(1, 9),
    n=st.integers(1, 9),
    batch=st.integers(0, 3),
    seed=st.integers(0, 99),
    exponent=st.floats(-30, 30),
    preset=st.sampled_from(sorted(PRESETS)),
)
@examples(5)
def test_invariances(m, n, batch, seed, exponent, preset):
    rng = np.random.default_rng(seed)
    value = PRESETS[preset]
    x = rng.standard_normal((*[2] * batch, m, n)).astype(np.float32)
    y = np.asarray(muonjax.newton_schulz(jnp.asarray(x), value))
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    tight = {"rtol": 0, "atol": 3e-4 * np.abs(y).max()}
    # A power of two changes no bit; any other positive scale only rounding.
    power = float(2.0 ** round(exponent))
    np.testing.assert_array_equal(
        muonjax.newton_schulz(jnp.asarray(x * np.float32(power)), value), y
    )
    if min(m, n) < max(
        m, n
    ):  # square Gaussian matrices can be as ill conditioned as they like
        scaled = x * np.float32(10.0**exponent)
        np.testing.assert_allclose(
            muonjax.newton_schulz(jnp.asarray(scaled), value), y, rtol=0, atol=0.02
        )
    np.testing.assert_array_equal(muonjax.newton_schulz(-jnp.asarray(x), value), -y)
    if m != n:
        np.testing.assert_array_equal(
            muonjax.newton_schulz(jnp.asarray(x).mT, value), np.swapaxes(y, -1, -2)
        )
    if batch:
        np.testing.assert_allclose(
            muonjax.newton_schulz(jnp.asarray(x[::-1]), value), y[::-1], **tight
        )


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.complex64, *map(thorough, [jnp.float32, jnp.float16])]
)
@pytest.mark.parametrize("preset", ["balanced", *map(thorough, ["fast", "accurate"])])
def test_zero_gives_zero(dtype, preset):
    y = orthogonalize(jnp.zeros((3, 16, 40), dtype), PRESETS[preset])
    np.testing.assert_array_equal(np.asarray(y, np.complex64), 0)
    assert y.dtype == dtype


@pytest.mark.nan
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_stays_in_its_matrix(bad):
    x = np.random.default_rng(0).standard_normal((3, 16, 40)).astype(np.float32)
    x[1, 2, 3] = bad
    y = np.asarray(orthogonalize(jnp.asarray(x), None))
    assert np.isnan(y[1]).any()
    assert np.isfinite(y[[0, 2]]).all()
    np.testing.assert_allclose(y[0], orthogonalize(jnp.asarray(x[0]), None), atol=1e-5)


@pytest.mark.parametrize("scale", [3e-38, 1e-30, 1e-12, 1e12, 1e30, 1e38])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_extreme_scales(scale, dtype):
    x = np.random.default_rng(0).uniform(0.5, 2, (16, 40)) * np.sign(
        np.random.default_rng(1).standard_normal((16, 40))
    )
    y = orthogonalize(jnp.asarray(x * scale, dtype), NewtonSchulz.accurate())
    assert oracles.polar_error(np.asarray(y, np.float64), x) < (
        1e-5 if dtype == jnp.float32 else 0.02
    )


def test_complex_matrices():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 12, 30)) + 1j * rng.standard_normal((2, 12, 30))
    for form in ("standard", "gram"):
        value = NewtonSchulz(
            coefficients=muonjax.polar_express(8), form=form, deflation=0
        )
        assert (
            oracles.polar_error(
                muonjax.newton_schulz(jnp.asarray(x, jnp.complex64), value), x
            )
            < 1e-4
        )
    assert (
        oracles.polar_error(
            muonjax.newton_schulz(jnp.asarray(x, jnp.complex64).mT, value),
            np.swapaxes(x, 1, 2),
        )
        < 1e-4
    )


@pytest.mark.rounding
@pytest.mark.thorough
def test_complex_entries_whose_absolute_value_overflows():
    x = jnp.full((1, 2), 3e38 + 3e38j, jnp.complex64)
    y = muonjax.newton_schulz(x, NewtonSchulz.accurate())
    np.testing.assert_allclose(y, np.full((1, 2), (1 + 1j) / 2), atol=1e-5)


@pytest.mark.rounding
@pytest.mark.thorough
def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        x = oracles.with_spectrum(np.geomspace(1, 1e-3, 24), 60)
        y = muonjax.newton_schulz(
            jnp.asarray(x),
            NewtonSchulz(coefficients=muonjax.polar_express(10), deflation=0),
        )
        assert y.dtype == jnp.float64
        assert oracles.polar_error(y, x) < 1e-9


SCHEDULES = {
    "fast": NewtonSchulz.fast().steps.full,
    "balanced": NewtonSchulz().steps.full,
    "Jordan": 10 * muonjax.JORDAN,
    "You": muonjax.YOU,
    **{f"polar express {t}": muonjax.polar_express(t) for t in (4, 6, 8, 12)},
}


def test_where_the_gram_form_restarts():
    # The number of steps of each part
    def parts(rows, dtype=jnp.float32):
        growth = GROWTH_TIMES_EPS / float(jnp.finfo(dtype).eps)
        return "".join(str(len(part)) for part in parts_of(rows, growth))

    tables = {name: parts(rows) for name, rows in SCHEDULES.items()}
    assert tables == {
        "fast": "3",
        "balanced": "4",
        "Jordan": "55",
        "You": "41",
        "polar express 4": "4",
        "polar express 6": "42",
        "polar express 8": "44",
        "polar express 12": "48",
    }
    assert parts(muonjax.polar_express(8), jnp.float64) == "8"


def test_auto_form_is_gram_only_where_wide():
    def products(shape, dtype, form="auto", deflation=0):
        rows = muonjax.polar_express(4)
        value = NewtonSchulz(
            coefficients=rows, compute_dtype=dtype, deflation=deflation, form=form
        )
        text = str(
            jax.make_jaxpr(lambda x: muonjax.newton_schulz(x, value))(
                jnp.zeros(shape, jnp.float32)
            )
        )
        long = [
            line
            for line in text.splitlines()
            if "dot_general" in line and f",{shape[1]}]" in line.split("=")[0]
        ]
        return len(
            long
        )  # products that yield an m x n matrix: one in the Gram form, one a step in the standard form

    assert products((64, 256), None) == 1
    assert products((64, 80), None) == 4
    # Pre-deflation makes four, two of which are equal and made once, and the standard form goes without it.
    assert products((64, 256), None, deflation=8) == 5
    assert products((64, 80), None, deflation=8) == 4
    # In float16 the Gram form restarts once, in bfloat16 before each step.
    assert products((64, 256), jnp.float16) == 2
    assert products((64, 80), jnp.float16, "gram") == 2
    assert products((64, 80), jnp.bfloat16, "gram") == 4


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["gram", "standard"])
def test_reverse_mode_agrees_with_forward_mode(form):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((72, 160)), jnp.float32)
    dx = x[::-1]
    ct = x[:, ::-1]
    f = functools.partial(muonjax.newton_schulz, settings=NewtonSchulz(form=form))
    tangent = jax.jit(lambda x, dx: jax.jvp(f, (x,), (dx,))[1])(x, dx)
    cotangent = jax.jit(lambda x, ct: jax.vjp(f, x)[1](ct)[0])(x, ct)
    forward = jnp.vdot(ct, tangent)
    backward = jnp.vdot(cotangent, dx)
    assert abs(forward) > 0.1
    np.testing.assert_allclose(forward, backward, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"coefficients": ()}, ValueError, "at least one row"),
        ({"coefficients": ((1.0, 2.0),)}, ValueError, "rows of three"),
        ({"coefficients": ((1.0, float("nan"), 2.0),)}, ValueError, "finite"),
        ({"form": "gramm"}, ValueError, "form='gramm'.*'gram'"),
        (
            {"implementation": "nonsense"},
            ValueError,
            "implementation='nonsense'.*'hopper'",
        ),
        ({"compute_dtype": jnp.int32}, TypeError, "compute_dtype=.*int32"),
        ({"compute_dtype": "float8_e4m3fn"}, TypeError, "float8.*16 bits or more"),
    ],
)
def test_bad_settings(arguments, error, message):
    with pytest.raises(error, match=message):
        NewtonSchulz(**arguments)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_step_may_lack_a_linear_term(dtype):
    rows = ((0.0, 1.0, 0.0), *muonjax.polar_express(8, lower=1e-4))
    settings = NewtonSchulz(coefficients=rows, deflation=0, compute_dtype=dtype)
    x = oracles.with_spectrum(np.geomspace(1, 0.01, 64), 160, 0)
    y = muonjax.newton_schulz(jnp.asarray(x), settings)
    assert np.linalg.norm(y, 2) < 1.01


def test_bad_matrices():
    with pytest.raises(ValueError, match=r"shape \(3,\); give a bias to Adam"):
        muonjax.newton_schulz(jnp.ones(3))
    for shape in ((3, 0), (0, 3), (0, 3, 4)):
        with pytest.raises(
            ValueError, match=rf"shape {re.escape(str(shape))}: an empty matrix"
        ):
            muonjax.newton_schulz(jnp.ones(shape))
    with pytest.raises(TypeError, match="int32"):
        muonjax.newton_schulz(jnp.ones((3, 3), jnp.int32))


def test_settings_are_values():
    assert NewtonSchulz() == NewtonSchulz.balanced()
    assert hash(NewtonSchulz(coefficients=[[1, 2, 3]])) == hash(
        NewtonSchulz(coefficients=((1.0, 2.0, 3.0),))
    )


@pytest.mark.parametrize("m", [48, 1024])
def test_the_polynomials_of_a_preset_do_not_depend_on_the_deflation(m):
    rows, rank = NewtonSchulz(deflation=63).in_full_precision(m)
    assert rows == NewtonSchulz().in_full_precision(m)[0]
    assert rank == (63 if m > 64 else 0)


def test_float64_is_float32_without_the_x64_mode():
    """With the eps of float64 the Gram form would restart too seldom, and diverge on this matrix."""
    rng = np.random.default_rng(0)
    u, _, vh = np.linalg.svd(rng.standard_normal((96, 512)), full_matrices=False)
    x = jnp.asarray(u * np.geomspace(1, 1e-6, 96) @ vh, jnp.float32)
    rows = muonjax.polar_express(12, lower=1e-5)
    wide, single = (
        NewtonSchulz(coefficients=rows, form="gram", deflation=0, compute_dtype=dtype)
        for dtype in (jnp.float64, jnp.float32)
    )
    found = muonjax.newton_schulz(x, wide)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, muonjax.newton_schulz(x, single))
