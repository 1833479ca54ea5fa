"""Any matrix through `newton_schulz`: the polynomial of its singular values, or NaN where NaN was, and nothing else."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import muonjax
from muonjax import NewtonSchulz
from muonjax._newton_schulz.coefficients import evaluate
from muonjax._newton_schulz.half_precision import ABOVE_ROUNDING
from tests.reliability.adversarial import BAD
from tests.tools.tiers import examples, tier

SETTINGS = {
    "fast": NewtonSchulz.fast(),
    "balanced": NewtonSchulz.balanced(),
    "accurate": NewtonSchulz.accurate(),
    "gram": NewtonSchulz(
        coefficients=muonjax.polar_express(5), form="gram", deflation=0
    ),
    "standard": NewtonSchulz(coefficients=muonjax.YOU, form="standard", deflation=0),
    "jordan": NewtonSchulz(
        coefficients=5 * muonjax.JORDAN, normalization="frobenius", deflation=0
    ),
    "bfloat16": NewtonSchulz(compute_dtype=jnp.bfloat16, deflation=0),
}
SHAPES = [
    (1, 1),
    (1, 7),
    (7, 1),
    (8, 8),
    (9, 33),
    (33, 9),
    (3, 8, 20),
    (2, 2, 20, 8),
    (24, 24),
    (40, 64),
]
SHAPES += [(64, 64), (16, 128), (5, 1, 4), (2, 64, 17)]
DTYPES = ["float32", "bfloat16", "float16"]
# Each is compiled once, so there are few of them and many matrices for each.
PROGRAMS = list(itertools.product(SETTINGS, SHAPES, DTYPES))
random.Random(0).shuffle(PROGRAMS)
PROGRAMS = PROGRAMS[: {"quick": 8, "thorough": 24, "nightly": 200}[tier()]]

TINY = float(np.finfo(np.float32).tiny)
# What rounding may add, as root mean square over the singular values: the polynomials lift it with the tail.
ROUNDING = {"float32": 5e-3, "bfloat16": 5e-2, "float16": 2e-2}


@functools.partial(jax.jit, static_argnums=1)
def orthogonalize(x, name):
    return muonjax.newton_schulz(x, SETTINGS[name])


def spectra(m, cond):
    return {
        "log": np.geomspace(1, 1 / cond, m),
        "repeated": np.ones(m),
        "one dominant": np.r_[1.0, np.full(m - 1, 1 / cond)],
        "two levels": np.r_[np.ones(m - m // 2), np.full(m // 2, 1 / cond)],
        "rank one": np.r_[1.0, np.zeros(m - 1)],
        "rank deficient": np.r_[np.linspace(1, 0.5, m - m // 2), np.zeros(m // 2)],
    }


@st.composite
def matrices(draw, shape):
    """float64 [*shape] of any kind and scale, zeros and subnormal entries among them."""
    kind = draw(
        st.sampled_from(
            ["spectrum", "gaussian", "signs", "sparse", "constant", "zero", "any bits"]
        )
    )
    if kind == "any bits":  # every float32, all scales in one matrix
        few = arrays(
            np.float32,
            shape,
            elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
        )
        return draw(few).astype(np.float64)
    scale = 10.0 ** draw(st.floats(-38, 38))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if kind == "spectrum":
        m, n = sorted(shape[-2:])
        cond = 10.0 ** draw(st.floats(0, 8))
        s = spectra(m, cond)[draw(st.sampled_from(sorted(spectra(m, cond))))]
        u = np.linalg.qr(rng.standard_normal((*shape[:-2], m, m)))[0]
        v = np.linalg.qr(rng.standard_normal((*shape[:-2], n, m)))[0]
        x = (u * s) @ np.swapaxes(v, -1, -2)
        x = x if shape[-2] <= shape[-1] else np.swapaxes(x, -1, -2)
    else:
        x = {
            "gaussian": lambda: rng.standard_normal(shape),
            "signs": lambda: rng.choice([-1.0, 1.0], shape),
            "sparse": lambda: rng.standard_normal(shape) * (rng.random(shape) < 0.1),
            "constant": lambda: np.ones(shape),
            "zero": lambda: np.zeros(shape),
        }[kind]()
    return x * scale


def expected(x, settings, rows):
    """U f(S / bound) V^H of x [m, n] in float64: what the rows mean, without rounding and without deflation; and the
    normalized singular values S / bound."""
    if not x.any():
        return x, np.ones(1)
    x = x / 2.0 ** np.frexp(np.abs(x).max())[1]
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    u, s, vh = np.linalg.svd(x, full_matrices=False)
    bound = np.linalg.norm(s, {"schatten": 8, "frobenius": 2}[settings.normalization])
    if settings.compute_dtype == jnp.bfloat16:
        bound *= ABOVE_ROUNDING**0.125  # of the fourth power of the squares
    y = (u * evaluate(rows, s / bound)) @ vh
    return (y.T if tall else y), s / bound


def noise(rows, s, dtype):
    """Root of the summed squares of what rounding to `dtype` may do to each direction: turn it by eps over its share
    `s`, or, where there is next to nothing of it, put noise in its place that all polynomials lift."""
    slope = np.prod([row[0] for row in rows])
    lifted = (
        2 * float(jnp.finfo(dtype).eps) * np.minimum(1 / np.maximum(s, TINY), slope)
    )
    return np.linalg.norm(np.minimum(lifted, 2))


def interval_error(rows, s):
    """The largest |f - 1| between the smallest normalized singular value of `s` and 1.01."""
    return np.abs(evaluate(rows, np.geomspace(s, 1.01, 2_000)) - 1).max()


def is_right(y, x, name, dtype):
    """Whether y is what `SETTINGS[name]` mean for x [m, n] of this dtype."""
    m = min(x.shape)
    settings = SETTINGS[name]
    rows, rank = settings.in_full_precision(m)
    compute = (
        "float32" if settings.compute_dtype is None else settings.compute_dtype.name
    )
    rounding = ROUNDING[compute] + float(jnp.finfo(dtype).eps)
    if not rank:
        right, normal = expected(x, settings, rows)
        return np.linalg.norm(y - right) <= rounding * np.sqrt(m) + noise(
            rows, normal, compute
        )
    # Deflation raises the tail, by how much it decides itself. So each direction of the schedule's own interval is off
    # by the polynomials' error at most, each of the tail by 1, and the subspace may cost its stated 0.05.
    u, s, vh = np.linalg.svd(x / (np.abs(x).max() or 1), full_matrices=False)
    normal = s / (np.linalg.norm(s, 8) or 1)
    inside = normal >= {"fast": 2e-2, "balanced": 1e-2}[name]
    error = interval_error(rows, normal[inside].min()) if inside.any() else 0.0
    polar = (u * (s > 1e-13 * s[0])) @ vh
    bound = np.sqrt((inside * (error + rounding) ** 2 + ~inside).sum() / m) + 0.05
    return (
        np.linalg.norm(y - polar) <= bound * np.sqrt(m)
        and np.linalg.norm(y, 2)
        <= 1 + interval_error(rows, 1e-2 if name == "balanced" else 2e-2) + 0.06
    )


@pytest.mark.nan
@examples(45)
@given(data=st.data())
def test_any_matrix(data):
    name, shape, dtype = data.draw(st.sampled_from(PROGRAMS))
    drawn = data.draw(matrices(shape))
    with np.errstate(over="ignore"):
        x = np.array(
            jnp.asarray(np.clip(drawn, -3e38, 3e38), jnp.float32).astype(dtype)
        )
    at = data.draw(st.lists(st.integers(0, x.size - 1), max_size=2))
    for index in at:
        x.flat[index] = data.draw(st.sampled_from(BAD))
    y = orthogonalize(jnp.asarray(x), name)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    wide = x.astype(np.float64).reshape(-1, *shape[-2:])
    result = np.asarray(y, np.float64)
    for before, after in zip(wide, result.reshape(wide.shape), strict=True):
        if not np.isfinite(before).all():
            assert np.isnan(after).any()
            continue
        assert np.isfinite(after).all()
        # Subnormal float32 numbers may count as zero, as they do in every product on most devices.
        flushed = np.where(np.abs(before) < TINY, 0, before)
        if np.abs(before).max() < TINY:
            assert np.abs(after).max() <= TINY
        else:
            assert is_right(after, before, name, dtype) or is_right(
                after, flushed, name, dtype
            )
