"""JAX's strict modes, and leaves whose dtypes differ from their gradients'."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import muonjax
from muonjax._common.platform_policy import Policy
from muonjax._newton_schulz.polar_factor import polar_factor
from tests.tools.oracles import queries_and_keys
from tests.tools.tiers import quick

STACK = np.random.default_rng(0).standard_normal((2, 24, 32)).astype(np.float32)


PARAMS = {"attention": queries_and_keys(16, 2, 8)}
PARAMS |= {
    "mlp": {"kernel": jnp.ones((3, 16, 40)), "bias": jnp.ones((3, 40))},
    "embedding": jnp.ones((9, 16)),
}
STACKED = {
    "mlp": {"kernel": muonjax.MuonDimensionNumbers(1, 2), "bias": None},
    "embedding": None,
}
PROGRAM = {"attention": muonjax.MuonDimensionNumbers(0, (1, 2))} | STACKED
SITES = muonjax.mha_site()
OPTIMIZERS = {
    "muon": lambda **own: muonjax.muon(
        optax.linear_schedule(1e-3, 0, 9), PROGRAM, **own
    ),
    "muon, bfloat16": lambda **own: muonjax.muon(
        1e-3, PROGRAM, mu_dtype=jnp.bfloat16, **own
    ),
    "muon, int8": lambda **own: muonjax.muon(1e-3, PROGRAM, mu_dtype=jnp.int8, **own),
    "normuon": lambda **own: muonjax.normuon(1e-3, PROGRAM, **own),
    "muonh": lambda **own: muonjax.muonh(
        1e-3, PROGRAM, **(own or {"adam_learning_rate": 1e-3})
    ),
    "muonclip": lambda **own: muonjax.muonclip(
        1e-3, SITES, every_k=2, dimension_numbers=PROGRAM, **own
    ),
    "optax_contrib": lambda **own: muonjax.optax_contrib.scale_by_muon(
        weight_dimension_numbers=PROGRAM
    ),
    "ema_nesterov": lambda **own: muonjax.ema_nesterov(
        muonjax.muon(1e-3, PROGRAM, **own), beta=0.9
    ),
    "monitor": lambda **own: muonjax.monitor(
        muonjax.muon(1e-3, PROGRAM, **own), PROGRAM, every_k=2
    ),
}


@pytest.mark.nan("what was not measured yet is NaN in the state of `monitor`")
# Optax's Adam, and its correction of a bias, raise a float to the power of an int32.
@pytest.mark.parametrize(("dtypes", "name"), [
    *(("standard", name) for name in OPTIMIZERS),
    *(("strict", name) for name in OPTIMIZERS if name != "optax_contrib"),
])  # fmt: skip
@pytest.mark.parametrize(
    ("x64", "dtype"), [(False, "float32"), (True, "float32"), (True, "float64")]
)
def test_optimizers_without_promotion(dtypes, name, x64, dtype):
    tx = OPTIMIZERS[name](**({"adam": optax.sgd(1e-3)} if dtypes == "strict" else {}))
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion(dtypes),
        jax.enable_x64(x64),
    ):
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS)
        given = (
            {"max_logits": {"attention": jnp.ones(2, "float32")}}
            if name == "muonclip"
            else {}
        )
        state = tx.init(params)
        jax.eval_shape(lambda p, s: tx.update(p, s, p, **given), params, state)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("shape", [(2, 24, 32), (300, 256), (5, 4)])
def test_polar_factors_without_promotion(platform, shape):
    settings = muonjax.NewtonSchulz()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for dtype in ("float32", "bfloat16"):
            one = functools.partial(
                polar_factor, settings=settings, policy=Policy(platform)
            )
            jax.eval_shape(one, jnp.ones(shape, dtype))


def test_msign_and_its_derivative_without_promotion():
    x = jnp.asarray(STACK[:, :24, :24])
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(muonjax.msign(x))), x)


def test_normalized_complex_neurons_without_promotion():
    x = (STACK[0] + 1j * STACK[1]).astype(np.complex64)
    tx = muonjax.normalize_neurons()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.jit(lambda tree: tx.update(tree, tx.init(tree))[0]).trace({"w": x})


@quick("standard-9", "standard-zero", others="nightly")
@pytest.mark.parametrize(
    "x", [STACK[0, :9], STACK[0, :15], np.zeros((16, 24))], ids=["9", "15", "zero"]
)
@pytest.mark.parametrize("form", ["standard", "gram"])
def test_gradients_through_newton_schulz_are_numbers(x, form):
    settings = muonjax.NewtonSchulz(form=form)
    gradient = jax.jit(
        jax.grad(lambda x: jnp.sum(muonjax.newton_schulz(x, settings) * (x + 1)))
    )(x)
    assert bool(jnp.isfinite(gradient).all())


@pytest.mark.parametrize("nesterov", [True, False])
def test_half_precision_parameters_keep_their_state_under_float32_gradients(nesterov):
    params = {"w": jnp.ones((8, 12), jnp.bfloat16), "b": jnp.ones(8, jnp.bfloat16)}
    gradients = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    tx = muonjax.muon(1e-3, nesterov=nesterov)
    state = tx.init(params)
    _, after = jax.eval_shape(tx.update, gradients, state, params)
    trace = [leaf.dtype for leaf in jax.tree.leaves(after.inner_states["muon"])]
    assert trace == [leaf.dtype for leaf in jax.tree.leaves(state.inner_states["muon"])]
