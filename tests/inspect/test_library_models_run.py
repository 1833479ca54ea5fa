"""Models of public libraries, computed: loss and gradients are those of JAX, and a clip is exact."""

import functools

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
def test_a_clip_holds_the_threshold_and_leaves_calm_heads(name):
    model, params, inputs = made(name)
    program = muonjax.inspect(model.loss, params, *inputs)
    assert max(program.check_clip(params, *inputs).values()) < 1e-4
