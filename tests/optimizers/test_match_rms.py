import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muonjax
from muonjax import MuonDimensionNumbers


def scale(shape, numbers=None, **settings):
    tx = muonjax.match_rms(**settings, dimension_numbers=numbers)
    x = jnp.ones(shape)
    return float(np.ravel(jax.jit(tx.update)({"w": x}, tx.init(None))[0]["w"])[0])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0.2 * 8**0.5),
        ({"rms": 1.0}, 8**0.5),
        ({"rms": None}, 1.0),
    ],
)
def test_scales(settings, expected):
    assert scale((8, 4), **settings) == pytest.approx(expected)
    # The same matrix, seen through an attention kernel's axes.
    assert scale(
        (2, 4, 4), MuonDimensionNumbers((0, 1), 2), **settings
    ) == pytest.approx(expected)


def test_width_widens_only():
    assert scale((4, 8), rms=None) == pytest.approx(2**0.5)


def test_a_vector_is_refused():
    with pytest.raises(ValueError, match="match_rms needs matrices"):
        scale((3,))
