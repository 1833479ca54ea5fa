"""Routing of Equinox's own layers, by their types."""

import jax
import jax.numpy as jnp
import pytest
from optax.contrib import MuonDimensionNumbers

import muonjax
import muonjax.equinox

eqx = pytest.importorskip("equinox")

KEY = jax.random.key(0)


class Model(eqx.Module):
    table: eqx.nn.Embedding
    stem: eqx.nn.Conv2d
    groups: eqx.nn.Conv2d
    depthwise: eqx.nn.Conv1d
    up: eqx.nn.ConvTranspose2d
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    blocks: eqx.nn.Linear
    mixer: eqx.nn.Linear

    def __init__(self):
        self.table = eqx.nn.Embedding(100, 32, key=KEY)
        self.stem = eqx.nn.Conv2d(3, 16, 3, key=KEY)
        self.groups = eqx.nn.Conv2d(16, 32, 3, groups=4, use_bias=False, key=KEY)
        self.depthwise = eqx.nn.Conv1d(16, 16, 3, groups=16, key=KEY)
        self.up = eqx.nn.ConvTranspose2d(16, 8, 2, key=KEY)
        self.attention = eqx.nn.MultiheadAttention(4, 32, key=KEY)
        self.norm = eqx.nn.LayerNorm(32)
        self.blocks = eqx.filter_vmap(lambda key: eqx.nn.Linear(32, 32, key=key))(jax.random.split(KEY, 3))
        self.mixer = eqx.nn.Linear(32, 32, use_bias=False, key=KEY)

    def __call__(self, x):
        return self.mixer(x)


def test_layers_decide():
    numbers = muonjax.equinox.dimension_numbers(eqx.filter_eval_shape(Model))
    convolution = MuonDimensionNumbers((1, 2, 3), 0)
    assert numbers.stem.weight == numbers.up.weight == convolution
    assert numbers.groups.weight == muonjax.FusedDimensionNumbers((1, 2, 3), 0, 4, 0)
    assert numbers.attention.query_proj.weight == numbers.mixer.weight == MuonDimensionNumbers(1, 0)
    assert numbers.blocks.weight == MuonDimensionNumbers(2, 1)
    nothing = (numbers.table.weight, numbers.depthwise.weight, numbers.norm.weight, numbers.stem.bias)
    assert nothing == (None,) * 4


@pytest.mark.thorough
def test_an_attention_knows_its_heads():
    numbers = muonjax.equinox.dimension_numbers(Model(), attention="heads")
    assert numbers.attention.key_proj.weight == muonjax.FusedDimensionNumbers(1, 0, 4, 0)
    assert numbers.attention.output_proj.weight == MuonDimensionNumbers(1, 0)


def test_a_step():
    params = eqx.filter(Model(), eqx.is_inexact_array)
    tx = muonjax.muon(1e-2, muon_weight_dimension_numbers=muonjax.equinox.dimension_numbers)
    updates, _ = jax.jit(lambda p: tx.update(p, tx.init(p), p))(params)
    model = eqx.apply_updates(Model(), updates)
    assert bool(jnp.isfinite(model(jnp.ones(32))).all())
