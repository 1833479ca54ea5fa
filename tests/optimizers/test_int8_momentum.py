"""Momentum in int8: its rounding, its bytes, and all that reads an optimizer's state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from benchmarks.common import hlo_counts
from muonjax._transforms.momentum import (
    Int8TraceState,
    block_size,
    dequantize,
    quantize,
)
from tests.mesh.layouts import make_mesh, put, under
from tests.tools.oracles import SHORT, gradients, normal, normal_tree, trained
from tests.tools.tiers import thorough

SITES = muonjax.mha_site()
PARAMS = normal_tree(
    {
        "attention": {name: {"kernel": (128, 2, 64)} for name in ("query", "key")},
        "up": {"kernel": (130, 256), "bias": (256,)},
        "down": {"kernel": (256, 130)},
    }
)


def numpy_rounded(x):
    """`quantize` and back, in float64."""
    blocks = x.reshape(*x.shape[:-1], -1, block_size(x.shape[-1]))
    unit = np.abs(blocks).max(-1, keepdims=True) / 127
    return (np.round(blocks / np.where(unit == 0, 1, unit)) * unit).reshape(x.shape)


def momenta(state):
    def is_trace(node):
        return isinstance(node, (optax.TraceState, Int8TraceState))

    return [node for node in jax.tree.leaves(state, is_leaf=is_trace) if is_trace(node)]


def members(tx, tree, steps=3):
    return trained(tx, tree, [gradients(step, tree) for step in range(steps)])


# The format


@pytest.mark.parametrize(
    ("length", "size"),
    [
        (768, 128),
        (64, 64),
        (130, 65),
        (1, 1),
        (257, 257),
        (50304, 128),
    ],
)
def test_blocks_divide_the_axis_and_are_not_short(length, size):
    assert block_size(length) == size


@pytest.mark.rounding
@pytest.mark.parametrize(
    "shape", [(3, 256), (5,), (), thorough((2, 3, 130)), thorough((4, 1))]
)
def test_rounding_is_at_most_half_a_unit(shape):
    x = np.asarray(normal(*shape), np.float64)
    found = jax.jit(lambda x: dequantize(*quantize(x)))(jnp.float32(x))
    assert found.shape == shape
    largest = np.max(np.abs(x), axis=-1, keepdims=True) if shape else np.abs(x)
    assert (np.abs(np.asarray(found) - x) <= largest / 127 * 0.501).all()


@pytest.mark.nan("put in, and expected")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(768, 768), (3, 257), (5,)])
def test_nan_is_not_lost(shape, dtype):
    """XLA's maximum on a CPU may ignore NaN; its block has to keep it when the next gradient is finite."""
    tx = muonjax.trace(0.95, True, jnp.int8)
    gradient = (
        jnp.asarray(normal(*shape), dtype).reshape(-1).at[3].set(jnp.nan).reshape(shape)
    )
    update = jax.jit(tx.update)
    _, state = update({"w": gradient}, tx.init({"w": gradient}))
    found, _ = update({"w": jnp.ones(shape, dtype)}, state)
    assert jnp.isnan(found["w"]).any()
    assert shape == (5,) or not jnp.isnan(found["w"]).all()  # other blocks have none


def test_extremes_stay_in_their_block():
    x = jnp.stack(
        [normal(128), jnp.zeros(128), 1e30 * normal(128), 1e-30 * normal(128)]
    )
    x = x.reshape(2, 256)
    found = np.asarray(jax.jit(lambda x: dequantize(*quantize(x)))(x)).reshape(4, 128)
    assert not found[1].any()
    for row, size in ((0, 1.0), (2, 1e30), (3, 1e-30)):
        assert_allclose(found[row] / size, normal(128), atol=0.02)


@pytest.mark.parametrize("nesterov", [True, False])
def test_three_steps_equal_float64(nesterov):
    tree = {"w": normal(4, 256)}
    tx = muonjax.trace(0.9, nesterov, jnp.int8)
    state = tx.init(tree)
    update = jax.jit(tx.update)
    momentum = np.zeros((4, 256))
    for step in range(3):
        g = normal(4, 256, seed=step)
        updates, state = update({"w": g}, state)
        exact = 0.9 * momentum + np.asarray(g, np.float64)
        ahead = np.asarray(g, np.float64) + 0.9 * exact if nesterov else exact
        # The update is taken before the rounding.
        assert_allclose(updates["w"], ahead, atol=1e-5)
        momentum = np.asarray(
            dequantize(state.trace["w"], state.scale["w"]), np.float64
        )
        difference = np.abs(momentum - numpy_rounded(exact))
        unit = np.max(np.abs(exact)) / 127
        assert (
            np.mean(difference > 1e-5) < 0.01
        )  # a tie that float32 decides the other way
        assert np.max(difference) <= 1.01 * unit


# Bytes


def test_a_parameter_costs_little_more_than_a_byte():
    shapes = {
        "attention": {n: {"kernel": (768, 12, 64)} for n in ("query", "key", "value")},
        "out": {"kernel": (12, 64, 768)},
        "up": {"kernel": (768, 3072)},
        "down": {"kernel": (3072, 768)},
    }
    tree = jax.eval_shape(lambda: normal_tree(shapes))
    tx = muonjax.muon(0.1, mu_dtype=jnp.int8)
    (momentum,) = momenta(jax.eval_shape(tx.init, tree))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(momentum))
    assert held <= 1.04 * sum(x.size for x in jax.tree.leaves(tree))


def test_an_update_keeps_no_copy_in_float32():
    """It takes the temporary memory of the same update of float32 momentum, and a part of one matrix."""
    tree = {f"layer_{i}": jnp.ones((256, 512)) for i in range(12)}

    def temporary(dtype):
        tx = muonjax.muon(
            0.1, muonjax.MuonDimensionNumbers(), mu_dtype=dtype, newton_schulz=SHORT
        )

        def step(grads, state, tree):
            updates, state = tx.update(grads, state, tree)
            return optax.apply_updates(tree, updates), state

        state = jax.eval_shape(tx.init, tree)
        compiled = (
            jax.jit(step, donate_argnums=(1, 2)).lower(tree, state, tree).compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(jnp.int8) <= temporary(jnp.float32) + 4 * 256 * 512


def test_a_new_state_is_made_without_arithmetic():
    """XLA reduces constants while it compiles; for GPT-2 small that took minutes."""
    tx = muonjax.trace(0.9, accumulator_dtype=jnp.int8)
    text = jax.jit(tx.init).lower({"w": jnp.ones((8, 256))}).as_text()
    assert "reduce" not in text
    assert "divide" not in text


# Optimizers and wrappers


@pytest.mark.parametrize("name", ["muon", "normuon", "muonh"])
def test_every_optimizer_takes_it(name):
    tree = PARAMS
    other = {"adam_learning_rate": 0.01} if name == "muonh" else {}
    results = []
    for dtype in (jnp.int8, jnp.float32):
        tx = getattr(muonjax, name)(0.05, mu_dtype=dtype, newton_schulz=SHORT, **other)
        tree_after, state = members(tx, tree)
        results.append(tree_after)
        assert {x.dtype for x in jax.tree.leaves(momenta(state)[0].trace)} == {
            jnp.dtype(dtype)
        }
    for p, a, b in zip(*map(jax.tree.leaves, (tree, *results)), strict=True):
        assert float(jnp.linalg.norm(a - b)) <= 0.05 * float(jnp.linalg.norm(b - p))


# Meshes


@pytest.mark.parametrize("axis_type", [AxisType.Auto, thorough(AxisType.Explicit)])
def test_the_state_is_sharded_as_its_parameter_and_no_collective_is_added(axis_type):
    tree = {"w": normal(16, 512), "v": normal(32, 256, seed=1)}
    specs = {"w": P("fsdp", "tensor"), "v": P("tensor", "fsdp")}
    mesh = make_mesh(axis_type, fsdp=2, tensor=2)
    explicit = axis_type is AxisType.Explicit
    distribution = None if explicit else muonjax.Distribution(mesh, specs)
    everywhere = muonjax.Distribution(mesh, specs)
    settings = {"newton_schulz": SHORT, "program": muonjax.MuonDimensionNumbers()}
    counts = []
    results = []
    for dtype in (jnp.int8, jnp.float32):
        tx = muonjax.muon(0.1, mu_dtype=dtype, distribution=distribution, **settings)
        with under(mesh):
            there = put(tree, specs, mesh)
            shardings = (
                None if explicit else muonjax.state_shardings(tx, tree, everywhere)
            )
            state = jax.jit(tx.init, out_shardings=shardings)(there)
            update = (
                jax.jit(tx.update, out_shardings=(None, shardings))
                .lower(there, state, there)
                .compile()
            )
            updates, after = update(there, state, there)
        found = hlo_counts.count(
            update, devices=4, unknown_trips=1
        )  # loops at owners, of their own lengths
        counts.append((found.collectives, found.sent))
        results.append(jax.tree.map(np.asarray, updates))
        (momentum,) = momenta(after)
        assert momentum.trace["w"].addressable_shards[0].data.shape == (8, 256)
        if dtype == jnp.int8:
            assert momentum.scale["w"].addressable_shards[0].data.shape == (8, 2)
            assert momentum.scale["v"].addressable_shards[0].data.shape == (16, 1)
    assert counts[0] == counts[1]
    alone = muonjax.muon(0.1, mu_dtype=jnp.int8, **settings)
    expected, _ = jax.jit(alone.update)(tree, alone.init(tree), tree)
    for name in tree:
        assert_allclose(results[0][name], expected[name], atol=1e-5)


def test_a_block_that_would_cross_a_shard_is_refused():
    mesh = make_mesh(fsdp=2, tensor=2)
    tree = {"w": jnp.ones((16, 128))}
    distribution = muonjax.Distribution(mesh, {"w": P(None, "tensor")})
    with pytest.raises(
        ValueError, match=r"\['w'\].*blocks of 128.*2 shards have 64.*jnp.bfloat16"
    ):
        muonjax.muon(0.1, mu_dtype=jnp.int8, distribution=distribution).init(tree)
    explicit = make_mesh(AxisType.Explicit, fsdp=2, tensor=2)
    sharded = jax.device_put(tree["w"], NamedSharding(explicit, P(None, "tensor")))
    with jax.set_mesh(explicit), pytest.raises(ValueError, match="Shard another axis"):
        muonjax.trace(0.9, accumulator_dtype=jnp.int8).init({"w": sharded})


# Checkpoints and casts


def test_a_state_changes_its_dtype_by_name():
    tree = PARAMS
    wide, narrow = (
        muonjax.muon(0.05, mu_dtype=d, newton_schulz=SHORT)
        for d in (jnp.float32, jnp.int8)
    )
    _, state = members(wide, tree)
    cast = muonjax.cast_momentum(state, jnp.int8)
    assert jax.tree.structure(cast) == jax.tree.structure(narrow.init(tree))
    back = muonjax.cast_momentum(cast, jnp.float32)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        if a.ndim > 1:
            assert_allclose(a, numpy_rounded(np.asarray(b, np.float64)), atol=1e-5)
        else:
            assert_array_equal(a, b)
    found, expected = (
        jax.jit(tx.update)(gradients(9, tree), s, tree)[0]
        for tx, s in ((narrow, cast), (wide, state))
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.linalg.norm(a - b)) <= 0.05 * float(jnp.linalg.norm(b))


@pytest.mark.parametrize("name", ["muon", "muonclip", "chain"])
def test_a_state_of_another_dtype_is_refused_with_the_call_that_converts_it(name):
    tree = {"attention": PARAMS["attention"]}

    def optimizer(dtype):
        if name == "chain":
            return optax.chain(
                muonjax.trace(0.9, accumulator_dtype=dtype), optax.scale(-0.1)
            )
        sites = {"program": SITES} if name == "muonclip" else {}
        return getattr(muonjax, name)(0.1, mu_dtype=dtype, newton_schulz=SHORT, **sites)

    extra = {"max_logits": {"attention": jnp.ones(2)}} if name == "muonclip" else {}
    wide = optimizer(None)
    narrow = optimizer(jnp.int8)
    with pytest.raises(
        ValueError,
        match=r"cast_momentum\(state, (jnp.int8|mu_dtype)\)",
    ):
        narrow.update(tree, wide.init(tree), tree, **extra)
    with pytest.raises(
        ValueError, match=r"cast_momentum\(state, (jnp.float32|mu_dtype)\)"
    ):
        wide.update(tree, narrow.init(tree), tree, **extra)


@pytest.mark.parametrize(("call", "error", "message"), [
    *((functools.partial(muonjax.muon, 0.1, mu_dtype=dtype), TypeError, "must be jnp.bfloat16, a float")
      for dtype in (jnp.int16, jnp.float8_e4m3fn, jnp.float16)),
    (lambda: muonjax.muon(0.1, mu_dtype=jnp.int8).init({"w": jnp.ones((2, 2), jnp.complex64)}), TypeError,
     r"\['w'\] is complex64"),
    (lambda: muonjax.cast_momentum({}, jnp.int8), ValueError, "finds no momentum"),
    (lambda: muonjax.cast_momentum({}, jnp.int32), TypeError, "of 32 bits or more, or jnp.int8"),
])  # fmt: skip
def test_mistakes_say_what_to_give(call, error, message):
    with pytest.raises(error, match=message):
        call()
