import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import muonjax
from benchmarks.optimizer.half_precision import EMULATED
from muonjax import MuonDimensionNumbers, NewtonSchulz
from muonjax._common.platform import Policy
from muonjax._matrices.batching import group_by_shape, map_groups
from muonjax._newton_schulz.polar_factor import polar_function
from tests.tools import oracles
from tests.tools.oracles import normal

EXACT = NewtonSchulz.accurate()


def update(tree, **settings):
    tx = muonjax.orthogonalize(**settings)
    return jax.jit(tx.update)(tree, tx.init(tree))[0]


def test_every_axis_order_gives_the_same_matrix():
    x = normal(8, 3, 5)  # (features, heads, size)
    expected = oracles.polar(np.asarray(x).reshape(8, 15)).reshape(8, 3, 5)
    y = update({"w": x}, dimension_numbers={"w": MuonDimensionNumbers(0, (1, 2))}, newton_schulz=EXACT)["w"]
    np.testing.assert_allclose(y, expected, atol=1e-5)
    out = jnp.transpose(x, (1, 2, 0))
    y = update({"w": out}, dimension_numbers={"w": MuonDimensionNumbers((0, 1), -1)}, newton_schulz=EXACT)[
        "w"
    ]
    np.testing.assert_allclose(y, np.transpose(expected, (1, 2, 0)), atol=1e-5)


def test_batch_axes_are_matrices_of_their_own():
    x = normal(4, 8, 3, 6)
    y = update({"w": x}, dimension_numbers=MuonDimensionNumbers(1, 3), newton_schulz=EXACT)["w"]
    np.testing.assert_allclose(
        np.swapaxes(y, 1, 2), oracles.polar(np.swapaxes(np.asarray(x), 1, 2)), atol=1e-5
    )


def test_leaves_without_dimension_numbers_pass_through():
    tree = {"w": normal(4, 6), "b": normal(6)}
    y = update(tree, dimension_numbers={"w": MuonDimensionNumbers(), "b": None})
    np.testing.assert_array_equal(y["b"], tree["b"])
    assert not np.array_equal(y["w"], tree["w"])


def test_groups_are_shapes_up_to_transposition():
    arrays = [normal(1, 4, 8), normal(2, 8, 4), normal(1, 4, 4), normal(3, 4, 8).astype(jnp.bfloat16)]
    assert group_by_shape(arrays) == [[0, 1], [2], [3]]


@pytest.mark.rounding
@pytest.mark.thorough
def test_map_groups_gives_every_array_its_own_result():
    arrays = [normal(2, 4, 8), normal(3, 8, 4, seed=1), normal(1, 5, 5, seed=2), normal(7, 4, 8, seed=3)]
    results = map_groups(lambda x: x * jnp.sum(x * x, axis=(-2, -1), keepdims=True), arrays, Policy("cpu"))
    for x, y in zip(arrays, results, strict=True):
        np.testing.assert_allclose(y, x * jnp.sum(x * x, axis=(-2, -1), keepdims=True), rtol=1e-6)


@pytest.mark.rounding
@pytest.mark.thorough
def test_a_stack_in_chunks_equals_the_stack_at_once(monkeypatch):
    x = normal(6, 4, 8)
    once = map_groups(lambda x: muonjax.newton_schulz(x, EXACT), [x], Policy("cpu"))[0]
    monkeypatch.setattr(Policy, "chunk_size", lambda self, count, shape: 2)
    parts = map_groups(lambda x: muonjax.newton_schulz(x, EXACT), [x], Policy("cpu"))[0]
    np.testing.assert_allclose(parts, once, atol=1e-6)


@pytest.mark.thorough
def test_stacks_that_share_small_operations_get_what_each_gets_alone(monkeypatch):
    """Stacks of several shapes and ranks, one in chunks, a matrix too small for a deflation, another dtype."""
    monkeypatch.setattr(Policy, "stack_elements", 4 * 24 * 40)
    monkeypatch.setattr(Policy, "chunk_size", lambda self, count, shape: 1 if shape == (32, 32) else count)
    gpu = Policy("gpu")
    shapes = [
        (3, 24, 40),
        (2, 40, 24),
        (2, 24, 40),
        (1, 16, 16),
        (1, 4, 8),
        (2, 32, 32),
        (2, 56, 16),
        (1, 16, 48),
    ]
    arrays = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    arrays.append(arrays[0].astype(jnp.bfloat16))
    f = polar_function(muonjax.NewtonSchulz(), gpu)
    together = jax.jit(lambda xs: map_groups(f, xs, gpu), compiler_options=EMULATED)(arrays)
    alone = jax.jit(lambda x: f(x.mT).mT if x.shape[-2] > x.shape[-1] else f(x), compiler_options=EMULATED)
    for x, y in zip(arrays, together, strict=True):
        assert y.dtype == x.dtype
        apart = jnp.linalg.norm(y - alone(x), axis=(-2, -1)) / jnp.linalg.norm(y, axis=(-2, -1))
        assert apart.max() < 0.05  # one different rounding at the beginning makes 0.03


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((1, 1, 1, 1), [2, 2]),  # even, and not three and one
        ((4, 1, 1), [4, 2]),  # a large one stays alone
        ((32, 1, 1, 1, 1), [32, 3, 1]),
        ((1, 4, 1), [1, 4, 1]),
        ((2, 2, 1, 2, 1), [2, 3, 3]),
        ((3, 3), [3, 3]),
    ],
)
def test_no_stack_but_a_lone_array_is_larger_than_the_bound(counts, expected, monkeypatch):
    monkeypatch.setattr(Policy, "stack_elements", 3 * 4 * 8)
    monkeypatch.setattr(Policy, "chunk_size", lambda self, count, shape: count)
    leaves = [jax.ShapeDtypeStruct((count, 4, 8), "float32") for count in counts]
    program = jax.make_jaxpr(lambda xs: map_groups(jnp.sin, xs, Policy("gpu")))(leaves)
    sines = [e.outvars[0].aval for e in program.eqns if e.primitive.name == "jit"]
    assert [sine.size // (4 * 8) for sine in sines] == expected


@pytest.mark.parametrize(
    ("count", "shape", "size"),
    [(12, (768, 768), 1), (7, (8, 8), 7), (12, (128, 512), 4), (12, (512, 512), 1)],
)
def test_chunks_divide_the_stack(count, shape, size):
    assert Policy("cpu").chunk_size(count, shape) == size
    assert Policy("gpu").chunk_size(count, shape) == count


def products(tree, **settings):
    """Symmetric and plain products in the traced update, those inside of a loop's body counted once."""

    def count(part):
        if not hasattr(part, "eqns"):
            return 0
        inner = [value for equation in part.eqns for value in equation.params.values()]
        parts = jax.tree.leaves(inner, is_leaf=lambda x: hasattr(x, "eqns"))
        return sum(e.primitive.name == "dot_general" for e in part.eqns) + sum(map(count, parts))

    return count(jax.make_jaxpr(lambda t: update(t, **settings))(tree))


def test_equal_leaves_share_one_compiled_loop():
    one = {"0": normal(32, 64)}
    many = {str(i): normal(*((32, 64) if i % 2 else (64, 32)), seed=i) for i in range(24)}
    two_shapes = {**many, "x": normal(48, 48)}
    assert products(many) == products(one)
    assert products(two_shapes) <= 2 * products(one)


def test_neighbors_share_a_program_with_columns_of_zeros():
    """But no matrix changes its form for its neighbors, and none gets zeros that take longer than a program."""
    tree = {"a": normal(32, 64), "b": normal(96, 32), "c": normal(2, 32, 128), "tiny": 1e-20 * normal(32, 60)}
    numbers = MuonDimensionNumbers(-2, -1)
    assert products(tree, dimension_numbers=numbers) == products({"a": tree["c"]}, dimension_numbers=numbers)
    together = update(tree, dimension_numbers=numbers)
    for name, x in tree.items():
        np.testing.assert_allclose(together[name], muonjax.newton_schulz(x), atol=1e-5)
    assert products({"a": normal(32, 64), "b": normal(32, 48)}) > products({"a": normal(32, 64)})
    batched = products({"a": normal(96, 32, 128)})  # 97 matrices would run one by one
    assert products({"a": normal(96, 32, 128), "b": normal(1, 32, 160)}) > batched
    for platform in ("cpu", "gpu"):
        assert Policy(platform).pads(128, 4096)
        assert not Policy(platform).pads(4096, 4096)
    tpu = Policy("tpu")
    apart = [normal(1, 8, 16), normal(1, 24, 8)]
    assert len(jax.eval_shape(lambda xs: map_groups(polar_function(EXACT, tpu), xs, tpu), apart)) == 2
    assert not tpu.pads(128, 1)


def test_no_retrace_over_steps():
    traces = []
    tx = muonjax.orthogonalize()

    @jax.jit
    def step(x):
        traces.append(1)
        return tx.update(x, optax.EmptyState())[0]

    for seed in range(4):
        step({"w": normal(8, 12, seed=seed)})
    assert len(traces) == 1


@pytest.mark.thorough
@pytest.mark.nan
def test_nan_stays_in_its_matrix_of_the_group():
    tree = {"a": normal(8, 12), "b": normal(12, 8).at[0, 0].set(jnp.nan), "c": normal(8, 12, seed=2)}
    y = update(tree)
    assert np.isnan(y["b"]).any()
    assert np.isfinite(y["a"]).all()
    assert np.isfinite(y["c"]).all()


@pytest.mark.parametrize(("tree", "numbers", "error", "message"), [
    ({"b": jnp.ones(3)}, None, ValueError, r"orthogonalize needs matrices, but the leaf 'b' has shape \(3,\)"),
    ({"w": jnp.ones((3, 3), jnp.int32)}, None, TypeError, "int32"),
    ({"w": jnp.ones((3, 3))}, {"v": None}, ValueError, "neither the tree"),
    ({"w": jnp.ones((3, 3))}, {"w": MuonDimensionNumbers(0, 0)}, ValueError, "disjoint"),
])  # fmt: skip
def test_bad_trees(tree, numbers, error, message):
    with pytest.raises(error, match=message):
        update(tree, dimension_numbers=numbers)


@pytest.mark.parametrize(("shapes", "times"), [([(3, 32, 48)], 1), ([(3, 32, 48), (3, 32, 64)], 2)])
def test_a_single_stack_is_rounded_once_on_a_gpu(shapes, times):
    """Between the passes over several stacks, what is rounded would stay in memory."""
    f = polar_function(muonjax.NewtonSchulz(), Policy("gpu"))
    text = str(jax.make_jaxpr(lambda xs: map_groups(f, xs, Policy("gpu")))([jnp.ones(s) for s in shapes]))
    assert len(re.findall(r":f16\[3,32,48\] = convert_element_type", text)) == times
