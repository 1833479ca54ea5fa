import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.sharding import PartitionSpec as P

from muonjax import value_and_grad
from muonjax._program.report import run
from muonjax._program.stretches import as_call, stretches
from tests.program.attention import by_hand, layer, tokens, unrolled, unstacked, weights


def functions(layers):
    """The functions that JAX differentiates for so many unrolled layers."""

    def loss(layers, x):
        for w in layers:
            x = layer(x, w)
        return jnp.mean(x)

    jaxpr = jax.make_jaxpr(loss)(unstacked(weights(layers)), tokens()).jaxpr
    calls = [as_call(eqns, outputs) for _, eqns, outputs in stretches(jaxpr.eqns, jaxpr.outvars, ())]
    return {id(eqn.params["jaxpr"]) for eqn in calls if "inline" in eqn.params}


def test_more_layers_are_no_more_functions():
    assert 0 < len(functions(8)) == len(functions(3)) < 30


def test_literals_count_bit_by_bit():
    def loss(x):
        return [1 / (x * zero) for zero in (0.0, -0.0, 0.0)]

    closed = jax.make_jaxpr(loss)(1.0)
    np.testing.assert_array_equal(run(closed, [], 1.0), [np.inf, -np.inf, np.inf])


def test_order_of_effects_stays():
    ref = jax.new_ref(jnp.float32(1))

    def loss(x):
        before = x * ref[...]
        ref[...] = jnp.sin(x)
        return before + ref[...]

    closed = jax.make_jaxpr(loss)(2.0)
    np.testing.assert_allclose(run(closed, [], 2.0)[0], 2 + np.sin(2), rtol=1e-6)


def test_scopes_and_lines_are_those_of_jax():
    w, x = weights(3), tokens()

    def each(x, w):
        with jax.named_scope("block"):
            return layer(x, w)

    def places(transform):
        fun = transform(functools.partial(unrolled, layer=each))
        return {
            (str(eqn.source_info.name_stack), source_info_util.summarize(eqn.source_info))
            for eqn in jax.jit(fun).trace(w, x).jaxpr.eqns
        }

    ours = {(scope, line) for scope, line in places(value_and_grad) if "muonjax/_" not in line}
    assert ours == places(jax.value_and_grad)


def test_inside_of_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    w, x = weights(2), tokens()

    def step(transform, w, x):
        def local(w, x):
            out, grads = transform(unrolled)(w, x)
            return jax.tree.map(lambda y: jax.lax.pmean(y, "data"), (out, grads))

        f = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        return jax.jit(f)(w, x)

    (loss, maxima), grads = step(value_and_grad, w, x)
    jax.tree.map(np.testing.assert_array_equal, (loss, grads), step(jax.value_and_grad, w, x))
    np.testing.assert_allclose(maxima["max_logits"], by_hand(w, x).max(1), rtol=2e-5)
