import jax.numpy as jnp
import numpy as np
import pytest

from muonjax._common.power_of_two_scale import power_of_two_scale

SPECIAL = [0.0, 1e-40, jnp.inf, jnp.nan]


def test_an_exact_power_of_two_brings_the_largest_entry_below_one():
    x = jnp.asarray([8e37, 1e30, 4.0, 3.0, 1.0, 0.7, 1e-30, 1.2e-38])
    scale = np.asarray(
        power_of_two_scale(x[:, None, None] * jnp.asarray([[0.25, -1.0, 0.0]]))
    )
    mantissa, _ = np.frexp(scale)
    np.testing.assert_array_equal(mantissa, 0.5)
    scaled = np.asarray(x) * scale[:, 0, 0]
    assert np.all((scaled >= 0.5) & (scaled < 1))


def test_the_largest_numbers_end_below_four():
    x = jnp.asarray([[[3.4e38]], [[1e38]]])
    assert np.all(x * power_of_two_scale(x) < 4)


@pytest.mark.nan
def test_what_has_no_scale_takes_that_of_one():
    special = jnp.asarray(SPECIAL)[:, None, None]
    np.testing.assert_array_equal(
        power_of_two_scale(special), power_of_two_scale(jnp.ones_like(special))
    )


def test_of_complex_entries_the_larger_part_counts():
    for entry in (
        3e38 + 3e38j,
        1 + 3e38j,
        3e38 - 1j,
    ):  # the first one's absolute value overflows
        x = jnp.asarray([[entry, 0.0]], jnp.complex64)
        np.testing.assert_array_equal(
            power_of_two_scale(x), power_of_two_scale(jnp.asarray([[3e38]]))
        )
