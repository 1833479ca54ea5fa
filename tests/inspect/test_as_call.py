import jax
import jax.numpy as jnp
import numpy as np

from muonjax._inspect.report import as_call, run
from tests.inspect.attention import layer, tokens, unstacked, weights


def functions(layers):
    """The functions that JAX differentiates for so many unrolled layers."""

    def loss(layers, x):
        for w in layers:
            x = layer(x, w)
        return jnp.mean(x)

    jaxpr = jax.make_jaxpr(loss)(unstacked(weights(layers)), tokens()).jaxpr
    calls = map(as_call, jaxpr.eqns)
    return {id(eqn.params["jaxpr"]) for eqn in calls if "inline" in eqn.params}


def test_more_layers_are_no_more_functions():
    assert 0 < len(functions(8)) == len(functions(3)) < 30


def test_literals_count_bit_by_bit():
    def loss(x):
        return [1 / (x * zero) for zero in (0.0, -0.0, 0.0)]

    closed = jax.make_jaxpr(loss)(1.0)
    np.testing.assert_array_equal(run(closed, [], 1.0), [np.inf, -np.inf, np.inf])
