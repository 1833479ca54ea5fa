"""One adapter as plain arrays: its scale, its dropout, and what a convolution keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muonjax._adapters.adapter import Adapter
from muonjax._adapters.config import LoHaConfig


def test_scale_is_alpha_over_rank_or_over_its_root():
    assert LoHaConfig(16).scale == 1.0
    assert LoHaConfig(16, 8.0).scale == 0.5
    assert LoHaConfig(16, 8.0, rank_stabilized=True).scale == 2.0


@pytest.mark.parametrize("settings", [{"alpha": float("nan")}, {"rank_dropout": 1.0}, {"rank_dropout": -0.1}])
def test_bad_settings_are_named(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        LoHaConfig(2, **settings)


def test_drop_ranks_drops_whole_ranks():
    adapter = Adapter((jnp.ones((3, 64)), jnp.ones((64, 2)), jnp.ones((3, 64)), jnp.ones((64, 2))))
    kept = adapter.drop_ranks(jax.random.key(0), 0.25).factors[0]
    assert set(np.unique(kept)) == {0.0, np.float32(1 / 0.75)}
    assert (kept == kept[:1]).all()
    assert 0.5 < (kept[0] > 0).mean() < 0.95


# 160 is no multiple of the least size of a block.
@pytest.mark.thorough
@pytest.mark.parametrize("channels", [160, 256])
def test_unrolled_convolutions_keep_no_kernel(channels):
    layers = 6
    kernel = jax.ShapeDtypeStruct((3, 3, channels, channels), jnp.float32)
    f = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(9 * channels, 4), (4, channels)] * 2]

    def temporary(convolution):
        def loss(adapters, kernels, x):
            for factors, kernel in zip(adapters, kernels, strict=True):
                x = jnp.tanh(convolution(factors, kernel, x))
            return jnp.sum(x**2)

        x = jax.ShapeDtypeStruct((1, 8, 8, channels), jnp.float32)
        compiled = jax.jit(jax.grad(loss)).lower([f] * layers, [kernel] * layers, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    settings = {
        "window_strides": (1, 1),
        "padding": "SAME",
        "dimension_numbers": jax.lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)),
    }

    def plain(f, kernel, x):
        delta = (f[0] @ f[1]) * (f[2] @ f[3])
        return jax.lax.conv_general_dilated(x, kernel + delta.reshape(kernel.shape), **settings)

    ours = temporary(lambda f, kernel, x: Adapter(tuple(f)).convolution(x, kernel, **settings))
    assert ours < 0.2 * temporary(plain)


def test_an_adapter_of_another_kernel_is_refused():
    adapter = Adapter((jnp.ones((4, 2)), jnp.ones((2, 3)), jnp.ones((4, 2)), jnp.ones((2, 3))))
    for shape in [(4, 4), (3, 2, 3)]:
        with pytest.raises(ValueError, match="does not fit"):
            adapter.delta(shape)
