import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from benchmarks.optimizer.half_precision import EMULATED
from muonjax import MuonDimensionNumbers, NewtonSchulz
from muonjax._common.platform_policy import Policy
from muonjax._matrices.batching import Function, map_groups
from muonjax._newton_schulz.polar_factor import polar_function
from tests.tools import oracles
from tests.tools.oracles import normal
from tests.tools.products import equations
from tests.tools.tiers import thorough

EXACT = NewtonSchulz.accurate()


def update(tree, **settings):
    tx = muonjax.orthogonalize(**settings)
    return jax.jit(tx.update)(tree, tx.init(tree))[0]


def test_every_axis_order_gives_the_same_matrix():
    x = normal(8, 3, 5)  # (features, heads, size)
    expected = oracles.polar(np.asarray(x).reshape(8, 15)).reshape(8, 3, 5)
    y = update(
        {"w": x},
        dimension_numbers={"w": MuonDimensionNumbers(0, (1, 2))},
        newton_schulz=EXACT,
    )["w"]
    assert_allclose(y, expected, atol=1e-5)
    out = jnp.transpose(x, (1, 2, 0))
    y = update(
        {"w": out},
        dimension_numbers={"w": MuonDimensionNumbers((0, 1), -1)},
        newton_schulz=EXACT,
    )["w"]
    assert_allclose(y, np.transpose(expected, (1, 2, 0)), atol=1e-5)


def test_leaves_without_dimension_numbers_pass_through():
    tree = {"w": normal(4, 6), "b": normal(6)}
    y = update(tree, dimension_numbers={"w": MuonDimensionNumbers(), "b": None})
    assert_array_equal(y["b"], tree["b"])
    assert not np.array_equal(y["w"], tree["w"])


@pytest.mark.rounding
@pytest.mark.thorough
def test_a_stack_in_chunks_equals_the_stack_at_once(monkeypatch):
    exact = Function(lambda x: muonjax.newton_schulz(x, EXACT))
    x = normal(6, 4, 8)
    once = map_groups(exact, [x], Policy("cpu"))[0]
    for size, count in ((2, 4), (1, 3)):  # in batches, and one after the other
        monkeypatch.setattr(Policy, "chunk_size", lambda *_, size=size: size)
        parts = map_groups(exact, [x], Policy("cpu"))[0]
        assert_allclose(parts, once, atol=1e-6)
        whole, part = map_groups(exact, [x, x[:count]], Policy("cpu"))
        assert_allclose(whole, once, atol=1e-6)
        assert_allclose(part, once[:count], atol=1e-6)


@pytest.mark.thorough
def test_stacks_that_share_small_operations_get_what_each_gets_alone(monkeypatch):
    """Stacks of several shapes and ranks, one in chunks, a matrix too small for a deflation, another dtype."""
    monkeypatch.setattr(Policy, "stack_elements", 4 * 24 * 40)
    monkeypatch.setattr(
        Policy,
        "chunk_size",
        lambda self, count, shape: 1 if shape == (32, 32) else count,
    )
    gpu = Policy("gpu")
    shapes = [
        (3, 24, 40),
        (2, 24, 40),
        (2, 24, 40),
        (1, 16, 16),
        (1, 4, 8),
        (2, 32, 32),
        (2, 16, 56),
    ]
    shapes.append((1, 16, 48))
    arrays = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    arrays.append(arrays[0].astype(jnp.bfloat16))
    f = polar_function(muonjax.NewtonSchulz(), gpu)
    together = jax.jit(lambda xs: map_groups(f, xs, gpu), compiler_options=EMULATED)(
        arrays
    )
    alone = jax.jit(
        f.whole,
        compiler_options=EMULATED,
    )
    for x, y in zip(arrays, together, strict=True):
        assert y.dtype == x.dtype
        apart = jnp.linalg.norm(y - alone(x), axis=(-2, -1)) / jnp.linalg.norm(
            y, axis=(-2, -1)
        )
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
def test_no_stack_but_a_lone_array_is_larger_than_the_bound(
    counts, expected, monkeypatch
):
    monkeypatch.setattr(Policy, "stack_elements", 3 * 4 * 8)
    monkeypatch.setattr(Policy, "chunk_size", lambda self, count, shape: count)
    leaves = [jax.ShapeDtypeStruct((count, 4, 8), "float32") for count in counts]
    program = jax.make_jaxpr(
        lambda xs: map_groups(Function(jnp.sin), xs, Policy("gpu"))
    )(leaves)
    sines = [e.outvars[0].aval for e in program.eqns if e.primitive.name == "jit"]
    assert [sine.size // (4 * 8) for sine in sines] == expected


def products(tree, **settings):
    """Symmetric and plain products in the traced update, those inside of a loop's body counted once."""
    program = jax.make_jaxpr(lambda t: update(t, **settings))(tree)
    return sum(e.primitive.name == "dot_general" for e in equations(program))


def test_equal_leaves_share_one_compiled_loop():
    one = {"0": normal(32, 64)}
    many = {
        str(i): normal(*((32, 64) if i % 2 else (64, 32)), seed=i) for i in range(24)
    }
    two_shapes = {**many, "x": normal(48, 48)}
    assert products(many) == products(one)
    assert products(two_shapes) <= 2 * products(one)


def test_neighbors_share_a_program_with_columns_of_zeros():
    """But no matrix changes its form for its neighbors, and none gets zeros that take longer than a program."""
    gpu = Policy("gpu")
    tpu = Policy("tpu")

    def stacks(policy, *shapes):
        """The results, and how many stacks there are."""
        f = polar_function(NewtonSchulz(deflation=0), policy)
        xs = [normal(*shape) for shape in shapes]
        seen: list = []
        whole = dataclasses.replace(
            f, whole=lambda x, *rest: seen.append(x.shape) or f.whole(x, *rest)
        )
        return jax.jit(
            lambda xs: (map_groups(whole, xs, policy), len(seen)),
            compiler_options=EMULATED,
        )(xs)

    shapes = (1, 32, 64), (1, 32, 96), (2, 32, 128)
    together, number = stacks(gpu, *shapes)
    assert number == 1
    for shape, y in zip(shapes, together, strict=True):
        (alone,), _ = stacks(gpu, shape)
        assert_allclose(y, alone, atol=2e-2)
    assert stacks(gpu, (1, 32, 64), (1, 32, 48))[1] == 2
    assert stacks(tpu, *shapes)[1] == 3
    assert gpu.pads(128, 4096)
    assert not gpu.pads(4096, 4096)


@pytest.mark.nan
@pytest.mark.parametrize("dtype", [thorough("float32"), "bfloat16"])
def test_matrices_of_one_short_side_share_a_program(dtype):
    """Matrices of any longer side, tall or wide, zero, tiny or NaN, share a loop; squares have their own."""
    tree = {
        "a": normal(72, 144),
        "b": normal(400, 72),
        "zero": jnp.zeros((72, 144)),
        "tiny": 1e-30 * normal(400, 72, seed=1),
        "bad": normal(72, 144, seed=2).at[3, 100].set(jnp.nan),
    }
    tree = jax.tree.map(lambda x: x.astype(dtype), tree)
    numbers = MuonDimensionNumbers(-2, -1)
    two = {name: tree[name] for name in "ab"}
    assert products(tree, dimension_numbers=numbers) == products(
        two, dimension_numbers=numbers
    )
    squares = {"c": normal(72, 72), "d": normal(72, 100)}
    assert products(tree | squares, dimension_numbers=numbers) > products(
        tree, dimension_numbers=numbers
    )
    together = update(tree, dimension_numbers=numbers)
    for name, x in tree.items():
        assert together[name].dtype == x.dtype
        alone = jax.jit(muonjax.newton_schulz)(x)
        last_digit = jnp.finfo(dtype).eps if dtype == "bfloat16" else 0
        assert_allclose(
            np.float32(together[name]), np.float32(alone), rtol=last_digit, atol=1e-5
        )
    assert np.isnan(together["bad"]).all()
    assert not together["zero"].any()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings",
    [NewtonSchulz(form="standard"), EXACT, NewtonSchulz(compute_dtype="bfloat16")],
)
def test_neighbors_take_any_settings_and_complex_matrices(settings):
    a, b = (
        jax.lax.complex(normal(*s), normal(*s, seed=1)) for s in [(72, 80), (100, 72)]
    )
    for tree in {"a": a, "b": b}, {"a": a.real, "b": b.real, "c": normal(72, 300)}:
        for name, y in update(tree, newton_schulz=settings).items():
            alone = jax.jit(lambda x: muonjax.newton_schulz(x, settings))(tree[name])
            # Where products are rounded to half precision, sums in another order round differently.
            assert_allclose(
                y, alone, atol=2e-2 if settings.compute_dtype == jnp.bfloat16 else 2e-5
            )


@pytest.mark.thorough
@jax.enable_x64(True)
def test_an_update_with_neighbors_or_transposed_has_derivatives_both_ways():
    shapes = {"a": (72, 144), "b": (200, 72), "c": (40, 16), "d": (16, 40)}
    tree = {name: normal(*shape).astype("float64") for name, shape in shapes.items()}

    def total(function):
        return lambda tree: sum(
            jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(function(tree))
        )

    alone = total(lambda tree: jax.tree.map(muonjax.newton_schulz, tree))
    want = jax.jit(jax.grad(alone))(tree)
    got = jax.jit(jax.grad(total(update)))(tree)
    for name in tree:
        assert_allclose(got[name], want[name], rtol=0, atol=1e-11)
    _, tangent = jax.jit(lambda tree: jax.jvp(total(update), (tree,), (tree,)))(tree)
    assert abs(tangent) < 1e-10  # a scale changes nothing
