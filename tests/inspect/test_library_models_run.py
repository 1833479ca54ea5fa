"""Models of public libraries, computed: the largest logits are what goes into softmax, and a clip is exact."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muonjax
from tests.inspect.library_models import MODELS
from tests.tools import tiers

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

QUICK = ("transformers-gpt2", "jax-latent_attention")
RUN = (
    *QUICK,
    "transformers-bert_masked",
    "transformers-gptj",
    "transformers-mistral",
    "transformers-t5",
    "transformers-vit",
    "haiku-haiku_layer_stack",
    "flax-linen_scan_on_axis_1",
    "flax-linen_cross_attention",
    "flax-nnx_scan",
    "equinox-equinox_rotary",
    "flax-vit_with_a_learned_query",
    "maxtext-gpt_oss",
    "maxtext-deepseek3",
    "levanter-gpt2",
    "tunix-llama3",
    "penzai-llama",
    "keras_hub-gpt2",
    "keras_hub-llama",
    "gemma-gemma",
)


@functools.cache
def made(name):
    """A model with weights and inputs."""
    pytest.importorskip(
        MODELS[name].needs, reason=f"{MODELS[name].needs} is not installed"
    )
    model = MODELS[name].make()
    rng = np.random.default_rng(0)

    def array(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 2, x.shape), x.dtype)
        return jnp.asarray(0.1 + 0.5 * rng.normal(size=x.shape), x.dtype)

    params, inputs = jax.tree.map(array, (model.params, list(model.inputs)))
    return model, params, inputs


@functools.cache
def measured(name):
    """Loss, largest logits and gradients."""
    model, params, inputs = made(name)
    return jax.jit(muonjax.value_and_grad(model.loss))(params, *inputs)


def what_softmax_gets(name):
    """The largest logit of each head, of each softmax while the model runs, by a `softmax` that reports it."""
    model, params, inputs = made(name)
    seen, softmax = [], jax.nn.softmax

    def report(logits):
        logits = np.asarray(logits, np.float64)
        if logits.ndim > 3:  # [batch, *heads, queries, keys]
            seen.append(logits.max((0, -1, -2)).reshape(-1))

    def reporting(x, *args, **kwargs):
        jax.debug.callback(report, x)
        return softmax(x, *args, **kwargs)

    jax.clear_caches()  # of bodies that were traced with the other softmax
    with mock.patch.object(jax.nn, "softmax", reporting):
        jax.block_until_ready(jax.jit(model.loss)(params, *inputs))
    jax.effects_barrier()
    return seen


# But for NNX, whose softmax is called inside of JAX, Equinox, which calls it for each example, Linen's scan, which
# takes the effect of a report for a dependence between layers, and libraries that have a softmax of their own.
OTHERS = (
    "nnx",
    "equinox",
    "linen_scan",
    "vit_with",
    "maxtext",
    "levanter",
    "tunix",
    "penzai",
    "keras_hub",
    "gemma-",
)
REPORTING = [name for name in RUN if not any(kind in name for kind in OTHERS)]


@pytest.mark.parametrize("name", REPORTING)
@tiers.quick(*QUICK, others="nightly")
def test_the_largest_logits_are_what_softmax_gets(name):
    (_, maxima), _ = measured(name)
    found = [
        row
        for maximum in maxima.values()
        for row in np.asarray(maximum).reshape(-1, maximum.shape[-1])
    ]
    seen = what_softmax_gets(name)
    assert found
    for row in found:  # refused attentions have softmaxes too
        assert any(np.allclose(row, other, rtol=1e-5) for other in seen), (
            row,
            seen,
        )


@pytest.mark.parametrize("name", RUN)
@tiers.quick(*QUICK, others="nightly")
def test_loss_and_gradients_are_those_of_jax(name, pytestconfig):
    """To the bit with XLA's optimizations (`--optimized`); without them the rest is fused in another way."""
    model, params, inputs = made(name)
    (loss, _), grads = measured(name)
    wanted = jax.jit(jax.value_and_grad(model.loss))(params, *inputs)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted))
    tolerance = 0 if pytestconfig.getoption("optimized") else 1e-5 * largest
    for found, right in zip(
        *map(jax.tree.leaves, ((loss, grads), wanted)), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", RUN)
@tiers.quick(*QUICK, others="nightly")
@pytest.mark.filterwarnings("ignore:.*not clipped")
def test_a_clip_holds_the_threshold(name):
    """In the first layer: those above get other inputs, once it is clipped."""
    model, params, inputs = made(name)
    (_, before), _ = measured(name)
    program = muonjax.inspect(model.loss, params, *inputs)
    first = next(a.name for a in program.attentions if a.site is not None)

    def lowest(maxima):
        return np.asarray(maxima[first]).reshape(-1, maxima[first].shape[-1])[0]

    threshold = float(np.median(lowest(before)) / 2)
    assert threshold > 0
    clipped = muonjax.apply_qk_clip(params, before, program, threshold)
    (_, after), _ = jax.jit(muonjax.value_and_grad(model.loss))(clipped, *inputs)
    np.testing.assert_allclose(
        lowest(after), np.minimum(lowest(before), threshold), rtol=1e-4
    )
