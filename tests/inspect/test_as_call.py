import jax
import jax.numpy as jnp
import numpy as np

from muonjax._inspect.measure import _inlined, run
from tests.inspect.attention import layer, tokens, unstacked, weights


def functions(layers):
    """The functions that JAX differentiates for so many unrolled layers."""

    def loss(layers, x):
        for w in layers:
            x = layer(x, w)
        return jnp.mean(x)

    _inlined.cache_clear()
    parameters = unstacked(weights(layers))
    x = tokens()
    run(jax.make_jaxpr(loss)(parameters, x), [], *jax.tree.leaves((parameters, x)))
    return _inlined.cache_info().currsize


def test_more_layers_are_no_more_functions():
    assert 0 < functions(8) == functions(3) < 30


def test_literals_count_bit_by_bit():
    def loss(x):
        return [1 / (x * zero) for zero in (0.0, -0.0, 0.0)]

    closed = jax.make_jaxpr(loss)(1.0)
    np.testing.assert_array_equal(run(closed, [], 1.0), [np.inf, -np.inf, np.inf])
