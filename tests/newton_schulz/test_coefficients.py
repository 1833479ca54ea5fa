import itertools

import numpy as np
import optax.contrib
import pytest

import muonjax
from muonjax._newton_schulz.coefficients import (
    evaluate,
    never_above_one,
    polar_express_rows,
)
from tests.tools.oracles import CLASSICAL

# As J. Su published them (kexue.fm/archives/10996): lower = 1e-3, cushion 0.02407..., before the safety division. Row
# 6's b is negative; two articles print +.
TABLE = [
    (8.287212, -23.595887, 17.300387), (4.107059, -2.947850, 0.544843), (3.948691, -2.908902, 0.551819),
    (3.318420, -2.488488, 0.510049), (2.300652, -1.668904, 0.418807), (1.891301, -1.267996, 0.376804),
    (1.875001, -1.250002, 0.375000), (1.875000, -1.250000, 0.375000),
]  # fmt: skip

# max over [1e-3, 1] of |f - 1| after T steps: without cushion; with cushion, and safety 1.01 but for the last step.
MINIMAX = {
    1: (0.991530, 0.991713),
    2: (0.964572, 0.966303),
    3: (0.859771, 0.868365),
    4: (0.545893, 0.572988),
    5: (0.113449, 0.147627),
    6: (9.1647e-4, 4.4084e-3),
}


def without_safety(num_steps, lower=1e-3, **options):
    return polar_express_rows((5,) * num_steps, lower, safety=1.0, **options)


def worst(rows, lower=1e-3, upper=1.0):
    s = np.concatenate(
        [np.geomspace(lower, upper, 200_001), np.linspace(lower, upper, 200_001)]
    )
    return np.abs(evaluate(rows, s) - 1).max()


def test_the_schedule_is_the_published_one():
    np.testing.assert_allclose(without_safety(8), TABLE, atol=6e-7)


@pytest.mark.parametrize("steps", MINIMAX)
def test_minimax_errors(steps):
    schedules = [
        without_safety(steps, cushion=0.0),
        muonjax.polar_express(steps),
    ]
    errors = [worst(rows) for rows in schedules]
    np.testing.assert_allclose(errors, MINIMAX[steps], rtol=2e-5, atol=2e-6)


def test_long_schedules_converge_to_one_exactly():
    assert worst(muonjax.polar_express(7)) < 4.3e-7
    assert worst(muonjax.polar_express(12)) < 3e-15


@pytest.mark.parametrize("lower", [1e-6, 1e-4, 1e-2, 0.1, 0.5, 0.99])
def test_no_schedule_leaves_the_interval_it_promises(lower):
    """Each error bounds the next interval; a wrong exchange or recentring would break the chain."""
    errors = [worst(without_safety(t, lower), lower) for t in range(1, 12)]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(errors))
    assert errors[0] < 1


@pytest.mark.parametrize("lower", [1e-6, 1e-3, 0.1, 0.9])
def test_a_cubic_is_minimax_too(lower):
    """No odd cubic is closer to 1: its error is met at three points with changing signs (Chebyshev)."""
    ((a, b, c),) = polar_express_rows((3,), lower, cushion=0.0, safety=1.0)
    assert c == 0
    error = worst([(a, b, c)], lower)
    at = np.array([lower, np.sqrt(-a / (3 * b)), 1.0])
    np.testing.assert_allclose(
        evaluate([(a, b, c)], at) - 1, error * np.array([-1, 1, -1]), rtol=1e-7
    )


@pytest.mark.parametrize(
    "degrees", [*itertools.product((3, 5), repeat=2), (5, 3, 3), (3, 5, 3)]
)
def test_the_composition_is_as_far_above_one_as_below(degrees):
    """Also where the interval no longer ends at 1: a polynomial that is not minimax on it, or not by its own error
    about 1, is farther off on one side."""
    rows = polar_express_rows(degrees, lower=0.1, cushion=0.0, safety=1.0)
    f = evaluate(rows, np.linspace(0.1, 1, 1_000_001))
    np.testing.assert_allclose(f.max() - 1, 1 - f.min(), rtol=1e-6)


def test_safety_divides_every_step_but_the_last():
    plain = without_safety(3)
    safe = muonjax.polar_express(3)
    assert safe[2] == plain[2]
    np.testing.assert_allclose(
        safe[1], np.array(plain[1]) / 1.01 ** np.array([1, 3, 5]), rtol=1e-14
    )


def test_rows_whose_composition_is_never_above_one():
    rows = never_above_one(muonjax.polar_express(3))
    assert evaluate(rows, np.linspace(0, 1, 10_001)).max() <= 1 + 1e-7


def test_published_tables():
    assert worst(5 * muonjax.JORDAN) == pytest.approx(0.529456, abs=2e-6)
    assert worst(30 * muonjax.JORDAN, lower=0.01) == pytest.approx(0.318185, abs=2e-4)
    assert worst(30 * CLASSICAL) < 1e-14
    np.testing.assert_array_equal(muonjax.YOU, optax.contrib._muon._DION_NS_COEFFS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": 0}, "whole number of steps"),
        ({"num_steps": 3, "lower": 0.0}, r"lower=0.0.*\(0, 1\)"),
        ({"num_steps": 3, "lower": 1.0}, "lower=1.0"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        muonjax.polar_express(arguments.pop("num_steps"), **arguments)
