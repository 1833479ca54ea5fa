"""The accelerators' iteration, its rounding emulated on a CPU: products of half types with float32 sums."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonjax
from benchmarks.common import momentum
from benchmarks.optimizer.half_precision import EMULATED
from muonjax import NewtonSchulz
from muonjax._common.platform_policy import Policy
from muonjax._newton_schulz import half_precision
from muonjax._newton_schulz.coefficients import parts_of
from muonjax._newton_schulz.polar_factor import polar_factor
from tests.mesh.layouts import make_mesh
from tests.tools import oracles, spectra
from tests.tools.oracles import normal
from tests.tools.products import equations
from tests.tools.tiers import nightly, quick, thorough

PRESETS = {"fast": NewtonSchulz.fast(), "balanced": NewtonSchulz.balanced()}
PLATFORMS = ("gpu", "tpu")
M = 96


def traceable(x, platform, preset="balanced"):
    return polar_factor(x, settings=PRESETS[preset], policy=Policy(platform))


orthogonalize = jax.jit(traceable, static_argnums=(1, 2), compiler_options=EMULATED)


def with_spectrum(s, n=M, seed=0):
    """A matrix [len(s), n] and its polar factor."""
    x = oracles.with_spectrum(s, n, seed)
    return jnp.asarray(x, jnp.float32), oracles.polar(x)


ADVERSARIAL = {"zero": np.zeros(M), **spectra.adversarial(M)}


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_no_singular_value_comes_out_above_1_2(name, platform):
    x, _ = with_spectrum(ADVERSARIAL[name])
    y = orthogonalize(x, platform)
    top = np.linalg.norm(np.asarray(y, np.float64), 2)
    assert top == 0 if name == "zero" else 0.7 < top <= 1.2


@pytest.mark.rounding
@pytest.mark.thorough
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_tall_matrix_is_the_transpose_of_a_wide_one(platform):
    x, _ = with_spectrum(np.geomspace(1, 1e-2, 24), 40)
    # XLA's programs for a CPU leave some roundings out, or lack products of transposed operands.
    with jax.disable_jit():
        tall, wide = (traceable(a, platform) for a in (x.T, x))
    np.testing.assert_allclose(tall, wide.T, atol=1e-6)


@pytest.mark.rounding
@pytest.mark.thorough
@pytest.mark.parametrize("shape", [nightly((64, 64)), (64, 160)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "platform"), [("float16", "gpu"), ("bfloat16", "tpu")]
)
def test_a_cpu_computes_in_the_half_type_that_is_asked_for(shape, dtype, platform):
    """Bit for bit as the platform whose type it is."""
    x = jnp.stack(
        [
            momentum.matrix(s, *shape, np.random.default_rng(0))[0]
            for s in momentum.spectra()[::36]
        ]
    )
    asked = NewtonSchulz(compute_dtype=dtype)
    here = jax.jit(lambda x: muonjax.newton_schulz(x, asked), compiler_options=EMULATED)
    np.testing.assert_array_equal(here(x), orthogonalize(x, platform))
    assert np.abs(here(x) - muonjax.newton_schulz(x)).max() > 1e-3  # not in float32


@pytest.mark.rounding
@quick("balanced", others="nightly")
@pytest.mark.parametrize("preset", PRESETS)
def test_a_named_implementation_is_as_accurate(preset):
    """It mirrors each product, and each matrix of a stack is scaled by a number of its own."""
    pairs = [
        with_spectrum(np.geomspace(1, 10.0**-decades, 32), 100) for decades in (1, 2)
    ]
    x = jnp.stack([pairs[0][0], 1e3 * pairs[1][0]])
    named = dataclasses.replace(PRESETS[preset], implementation="reference")
    y = jax.jit(
        lambda x: polar_factor(x, settings=named, policy=Policy("gpu")),
        compiler_options=EMULATED,
    )(x)
    plain = orthogonalize(x, "gpu", preset)
    for i, (_, polar) in enumerate(pairs):
        want = momentum.polar_error(plain[i], polar)
        assert momentum.polar_error(y[i], polar) <= want + 0.005


@pytest.mark.rounding
@quick("1e-30-gpu", "1e+30-tpu", others="nightly")
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_the_scale_of_the_input_changes_rounding_only(scale, platform):
    x, polar = with_spectrum(np.geomspace(1, 1e-2, 32), 48)
    want = momentum.polar_error(orthogonalize(x, platform), polar)
    assert momentum.polar_error(
        orthogonalize(x * scale, platform), polar
    ) == pytest.approx(want, abs=0.02)


@pytest.mark.nan
@quick("nan-gpu", "inf-tpu")
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_number_stays_in_its_matrix(bad, platform):
    x = jnp.stack(
        [with_spectrum(np.geomspace(1, 1e-2, 16), 24, seed)[0] for seed in range(3)]
    )
    y = orthogonalize(x.at[1, 3, 5].set(bad), platform)
    clean = orthogonalize(x, platform)
    assert bool(jnp.isnan(y[1]).all())
    np.testing.assert_array_equal(y[jnp.array([0, 2])], clean[jnp.array([0, 2])])


@pytest.mark.rounding
@pytest.mark.parametrize(("preset", "most", "platform"), [
    ("balanced", 0.25, "gpu"),
    thorough("balanced", 0.25, "tpu"),
    nightly("fast", 0.40, "gpu"),
    nightly("fast", 0.40, "tpu"),
])  # fmt: skip
def test_polar_error_on_recorded_momentum(preset, most, platform):
    rng = np.random.default_rng(0)
    matrices = [momentum.matrix(s, 96, 192, rng) for s in momentum.spectra()[::6]]
    y = orthogonalize(jnp.stack([x for x, _ in matrices]), platform, preset)
    errors = [
        momentum.polar_error(a, polar)
        for a, (_, polar) in zip(y, matrices, strict=True)
    ]
    assert np.mean(errors) <= most


@pytest.mark.rounding
@pytest.mark.parametrize(("platform", "most"), [("gpu", 0.2), ("tpu", 1.0)])
def test_polar_error_of_exact_low_rank(platform, most):
    """The steps lift what rounding leaves outside of the space of the matrix."""
    names, xs, ranks = zip(*low_rank(64, 96), strict=True)
    ys = np.asarray(
        orthogonalize(jnp.asarray(np.stack(xs), jnp.float32), platform), np.float64
    )
    for name, x, y, r in zip(names, xs, ys, ranks, strict=True):
        u, _, vh = np.linalg.svd(x, full_matrices=False)
        assert np.linalg.norm(y - u[:, :r] @ vh[:r]) <= most * np.sqrt(r), name


@pytest.mark.rounding
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("n", [M, 4 * M])
def test_polar_error_where_singular_values_are_spread_evenly_in_the_logarithm(
    n, platform
):
    for least, most in ((1e-3, 0.2), (0.1, 0.0125)):
        x, polar = with_spectrum(np.geomspace(1, least, M), n)
        assert momentum.polar_error(orthogonalize(x, platform), polar) <= most


@quick("zero-gpu", "9 rows-tpu")
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    "x", [jnp.zeros((16, 24)), with_spectrum(np.ones(9), 12)[0]], ids=["zero", "9 rows"]
)
def test_gradients_are_numbers(x, platform):
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(traceable(x, platform) * x)))(x)
    assert bool(jnp.isfinite(gradient).all())


def program(platform):
    x = jnp.ones((136, 160))
    return list(equations(jax.make_jaxpr(lambda x: traceable(x, platform))(x).jaxpr))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_nothing_is_factorized(platform):
    """A factorization of a library can fail, and takes the time of ten products."""
    names = {equation.primitive.name for equation in program(platform)}
    factorizations = (
        "cholesky triangular_solve eigh svd qr householder_product lu schur"
    )
    assert not names & set(factorizations.split())


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_first_gram_matrix_is_mirrored_and_no_other(platform):
    """An asymmetric one is amplified by the first steps. No value shows this here: the products of a CPU are
    symmetric, and those of an accelerator need not be."""
    transposed = [
        equation.outvars[0].aval.shape
        for equation in program(platform)
        if equation.primitive.name == "transpose"
    ]
    assert transposed == [(136, 136)]


def test_where_the_gram_form_restarts():
    schedules = {
        "fast": NewtonSchulz.fast().steps.half,
        "balanced": NewtonSchulz().steps.half,
        "Jordan": muonjax.JORDAN * 5,
        "You": muonjax.YOU,
        "six steps": muonjax.polar_express(6, lower=3e-4),
    }

    # The number of steps of each part
    def lengths(rows):
        for growth in half_precision.LARGEST_GROWTH.values():
            yield "".join(str(len(part)) for part in parts_of(rows, growth))

    assert list(half_precision.LARGEST_GROWTH) == ["float16", "bfloat16"]
    assert {name: " ".join(lengths(rows)) for name, rows in schedules.items()} == {
        "fast": "22 1111",
        "balanced": "23 1112",
        "Jordan": "32 11111",
        "You": "23 1112",
        "six steps": "222 11112",
    }


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_bound_is_one_where_two_directions_are_shrunk(platform):
    """A diagonal matrix of 16 rows: what rounding makes of a basis of two directions does not average out."""
    x = jnp.stack(
        [
            momentum.interpolated(s, 16)[:, None] * np.eye(16, 48)
            for s in momentum.spectra()[::2]
        ]
    ).astype(jnp.float32)
    top = np.linalg.norm(
        np.asarray(orthogonalize(x, platform), np.float64), 2, axis=(-2, -1)
    )
    assert top.max() <= 1.2


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("rows", ["alike", "one"])
def test_rank_one_keeps_its_direction(rows, platform):
    """Rounding errors of one row, or of equal ones, average out nowhere."""
    x = np.outer(
        np.ones(M) if rows == "alike" else np.eye(M)[3],
        np.random.default_rng(0).standard_normal(2 * M),
    )
    y = np.asarray(orthogonalize(jnp.asarray(x, jnp.float32), platform), np.float64)
    assert np.sum(x * y) > 0.99 * np.linalg.norm(x) * np.linalg.norm(y)


def low_rank(m, n):
    """By name, a matrix [m, n] of exact rank r, and r; rectified factors are what a layer after a ReLU gives."""
    rng = np.random.default_rng(0)
    count = 1536 // m
    for r in (r for r in (1, 4, 32) if 4 * r <= m):
        a = rng.standard_normal((count, m, r))
        b = rng.standard_normal((count, r, n))
        for i in range(count):
            yield f"Gaussian of rank {r}, {i}", a[i] @ b[i], r
            yield (
                f"rectified of rank {r}, {i}",
                np.maximum(a[i], 0) @ np.maximum(b[i], 0),
                r,
            )
        dead = np.where(np.arange(n) % 3 == 0, 0, a[0] @ b[0])
        yield f"dead columns, rank {r}", dead, r
    yield "repeated rows", np.repeat(rng.standard_normal((4, n)), m // 4, 0), 4


def test_a_stack_on_an_explicit_mesh_keeps_its_sharding():
    mesh = make_mesh(AxisType.Explicit, a=4)
    x = normal(4, 32, 48)
    f = jax.jit(lambda x: traceable(x, "gpu"))
    y = f(jax.device_put(x, NamedSharding(mesh, P("a"))))
    assert y.sharding.spec == P("a", None, None)
    np.testing.assert_allclose(y, f(x), atol=0.02)


def wide_spectra():
    yield from ADVERSARIAL.items()
    rng = np.random.default_rng(0)
    for i in range(30):
        yield (
            f"random {i}",
            np.sort(10 ** -(4 * rng.random(M) ** rng.uniform(0.2, 5)))[::-1],
        )
    for i, s in enumerate(momentum.spectra()[::6]):
        yield f"recorded {i}", momentum.interpolated(s, M)


SCHEDULES = {name: settings.coefficients for name, settings in PRESETS.items()} | {
    "Jordan": muonjax.JORDAN * 5,
    "You": muonjax.YOU,
    "six steps": muonjax.polar_express(6, lower=1e-3),
}


@pytest.mark.rounding
@pytest.mark.parametrize(("preset", "vectors"), [
    ("fast", "of the axes"),
    thorough("balanced", "random"),
    thorough("Jordan", "random"),
    *(nightly(name, "random") for name in SCHEDULES if name not in ("balanced", "Jordan")),
    *(nightly(name, "of the axes") for name in SCHEDULES if name != "fast"),
])  # fmt: skip
def test_updates_are_as_good_as_the_standard_form(preset, vectors):
    """Never worse by more than 0.03, and no singular value above 1.2; diagonal matrices have no averaged rounding."""
    cases = dict(wide_spectra())
    polar = np.eye(M, 2 * M)
    diagonal = {name: (s[:, None] * polar, polar) for name, s in cases.items()}
    random = {name: with_spectrum(s, 2 * M) for name, s in cases.items()}
    pairs = random if vectors == "random" else diagonal
    x = jnp.stack([jnp.asarray(a, jnp.float32) for a, _ in pairs.values()])

    def results(form):
        settings = NewtonSchulz(coefficients=SCHEDULES[preset], form=form)
        one = functools.partial(polar_factor, settings=settings, policy=Policy("gpu"))
        y = jax.jit(lambda x: jax.lax.map(one, x), compiler_options=EMULATED)(x)
        return {n: np.asarray(a, np.float64) for n, a in zip(pairs, y, strict=True)}

    updated = results("auto")
    standard = results("standard")
    for name, (_, polar) in pairs.items():
        most = max(
            1.2, np.linalg.norm(standard[name], 2) + 0.02
        )  # of a short schedule it is larger
        assert np.linalg.norm(updated[name], 2) <= most, name
        if cases[name].min() > 0:
            errors = [momentum.polar_error(y[name], polar) for y in (updated, standard)]
            assert errors[0] <= errors[1] + 0.03, name


@pytest.mark.rounding
def test_a_cpu_multiplies_a_tall_matrix_under_jit():
    """XLA's CPU compiler has no product of bfloat16 with float32 sums whose result it transposes at once."""
    settings = NewtonSchulz(compute_dtype="bfloat16")
    wide = jnp.asarray(np.random.default_rng(0).standard_normal((8, 32)), jnp.float32)
    run = jax.jit(lambda x: muonjax.newton_schulz(x, settings))
    for x in (wide, jnp.stack([wide, 2 * wide])):
        np.testing.assert_allclose(run(x.mT).mT, run(x), atol=2e-2)
