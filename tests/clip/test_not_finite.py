"""Statistics that are NaN or infinite hide no head that is too hot, wherever several of them become one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from numpy.testing import assert_array_equal

import muonjax
from tests.tools.oracles import queries_and_keys

pytestmark = pytest.mark.nan
PARAMS = {"a": queries_and_keys(8, 2, 4)}
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)
BAD = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("make", [muonjax.muonclip, muonjax.adamclip])
def test_one_micro_batch(make, first, bad):
    tx = make(0.0, muonjax.mha_site(), threshold=100.0, every_k=2)
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    statistics = [[bad, 400.0], [400.0, 50.0]]
    for maxima in statistics if first else statistics[::-1]:
        _, state = update(ZEROS, state, PARAMS, max_logits={"a": jnp.array(maxima)})
    assert_array_equal(state[-1].maxima["a"], [400.0, 400.0])
    assert_array_equal(state[-1].factors["a"], [0.25, 0.25])
    assert muonjax.metrics(state)["qk_clip/largest"] == 400.0


def test_a_head_that_was_never_finite():
    """It is not clipped, and the log shows that it has no maximum."""
    tx = muonjax.qk_clip(100.0, muonjax.mha_site(), every_k=3)
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    for maxima in ([-np.inf, -np.inf], [np.nan, np.inf], [-np.inf, -np.inf]):
        updates, state = update(
            ZEROS, state, PARAMS, max_logits={"a": jnp.array(maxima)}
        )
    assert_array_equal(state.maxima["a"], -np.inf)
    assert_array_equal(state.factors["a"], 1.0)
    jax.tree.map(assert_array_equal, updates, ZEROS)
    assert np.isnan(muonjax.metrics(state)["qk_clip/largest"])
    _, state = update(ZEROS, state, PARAMS, max_logits={"a": jnp.zeros(2)})
    assert_array_equal(state.running_max["a"], 0.0)  # anew


@pytest.mark.parametrize("bad", BAD)
def test_one_device(bad):
    """The other devices' statistics count."""
    tx = muonjax.qk_clip(100.0, muonjax.mha_site(), axis_name="data")

    def factors(maxima):
        return tx.update(ZEROS, tx.init(PARAMS), PARAMS, max_logits={"a": maxima})[
            1
        ].factors["a"]

    maxima = jnp.array([[bad, 50.0], [400.0, bad], [200.0, bad]])
    found = jax.jit(jax.vmap(factors, axis_name="data"))(maxima)
    assert_array_equal(found, [[0.25, 1.0]] * 3)


X = jax.random.normal(jax.random.key(0), (2, 5, 8))


def test_one_call_of_a_module():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            attention = nn.MultiHeadDotProductAttention(2, name="attention")
            return (attention(x) + attention(x * jnp.nan) + attention(x)).sum()

    model = Twice()
    variables = model.init(jax.random.key(0), X)
    (_, max_logits), _ = jax.jit(muonjax.value_and_grad(lambda v: model.apply(v, X)))(
        variables
    )
    assert np.isfinite(max_logits["params/attention"]).all()
