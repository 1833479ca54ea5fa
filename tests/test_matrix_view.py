import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from muonjax._matrices.matrix_view import (
    FusedDimensionNumbers,
    MuonDimensionNumbers,
    matrix_pieces,
    resolve_dimension_numbers,
)
from tests.tools.tiers import quick
from tests.tools.views import matrix_view


@st.composite
def leaf_and_numbers(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=5)))
    axes = draw(st.permutations(range(len(shape))))
    cut = draw(st.integers(1, len(shape) - 1))
    stop = draw(st.integers(cut + 1, len(shape)))
    signed = [a - len(shape) if draw(st.booleans()) else a for a in axes]
    return shape, MuonDimensionNumbers(tuple(signed[:cut]), tuple(signed[cut:stop]))


@given(leaf_and_numbers())
@settings(max_examples=60, deadline=None)
def test_to_leaf_inverts_to_matrices(case):
    shape, numbers = case
    leaf = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    view = matrix_view(leaf, numbers, call="test")
    matrices = view.to_matrices(
        leaf
    )  # NumPy's arrays have the same methods, and compile nothing
    assert matrices.shape == (view.batch, view.fan_in, view.fan_out)
    assert_array_equal(view.to_leaf(matrices), leaf)


def test_rows_are_what_the_layer_sums_over():
    leaf = (
        np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    )  # (heads, head_dim, features)
    view = matrix_view(leaf, MuonDimensionNumbers((0, 1), 2), call="test")
    assert_array_equal(view.to_matrices(jnp.asarray(leaf))[0], leaf.reshape(12, 5))
    stacked = matrix_view(leaf, MuonDimensionNumbers(1, 2), call="test")
    assert (stacked.batch, stacked.fan_in, stacked.fan_out) == (3, 4, 5)


@pytest.mark.parametrize("cut", [0, 1])
def test_a_fused_leaf_is_its_parts(cut):
    parts = np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)
    leaf = np.concatenate(parts, axis=cut)
    view = matrix_view(
        leaf, FusedDimensionNumbers(0, 1, parts=3, axis=cut), call="test"
    )
    assert (view.batch, view.fan_in, view.fan_out) == (3, 4, 4)
    assert_array_equal(view.to_matrices(jnp.asarray(leaf)), parts)
    assert_array_equal(view.to_leaf(jnp.asarray(parts)), leaf)


@pytest.mark.parametrize(
    ("shape", "dtype", "numbers", "error", "message"),
    [
        (
            (4,),
            np.float32,
            MuonDimensionNumbers(),
            ValueError,
            r"shape \(4,\); give it to Adam",
        ),
        (
            (4, 4),
            np.float32,
            MuonDimensionNumbers(0, 2),
            ValueError,
            "output_axis=2 names axis 2",
        ),
        ((4, 4), np.float32, MuonDimensionNumbers(0, -2), ValueError, "twice"),
        (
            (4, 4, 4),
            np.float32,
            MuonDimensionNumbers((0, 1), (1, 2)),
            ValueError,
            "disjoint",
        ),
        (
            (4, 4),
            np.float32,
            MuonDimensionNumbers((), 1),
            ValueError,
            "needs disjoint axes",
        ),
        ((4, 0), np.float32, MuonDimensionNumbers(), ValueError, "empty dimension"),
        (
            (4, 4),
            np.float32,
            FusedDimensionNumbers(0, 1, parts=3),
            ValueError,
            "fill its 4 entries",
        ),
        (
            (4, 24),
            np.float32,
            FusedDimensionNumbers(0, 1, 3, 1, 5),
            ValueError,
            "24 entries `repeats` times",
        ),
        (
            (4, 4, 9),
            np.float32,
            FusedDimensionNumbers(0, 1, 3, 2),
            ValueError,
            "one of the reduction",
        ),
        ((4, 4), np.int32, MuonDimensionNumbers(), TypeError, "int32"),
        (
            (4, 4),
            jnp.float8_e4m3fn,
            MuonDimensionNumbers(),
            TypeError,
            "float8_e4m3fn, whose few bits",
        ),
    ],
)
def test_bad_leaves(shape, dtype, numbers, error, message):
    with pytest.raises(error, match=message):
        matrix_view(jax.ShapeDtypeStruct(shape, dtype), numbers, call="orthogonalize")


TREE = {"a": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, "c": jnp.ones((2, 2))}


def test_a_prefix_spreads_over_its_subtree():
    wide = MuonDimensionNumbers(1, 0)
    assert resolve_dimension_numbers({"a": None, "c": wide}, TREE, call="t") == [
        None,
        None,
        wide,
    ]
    assert (
        resolve_dimension_numbers(None, TREE, call="t") == [MuonDimensionNumbers()] * 3
    )
    assert resolve_dimension_numbers(
        lambda tree: {"a": None, "c": wide}, TREE, call="t"
    ) == [
        None,
        None,
        wide,
    ]


def test_masked_nodes_are_no_leaves():
    masked = {"a": optax.MaskedNode(), "c": TREE["c"]}
    assert resolve_dimension_numbers(
        {"a": None, "c": MuonDimensionNumbers()}, masked, call="t"
    ) == [MuonDimensionNumbers()]
    numbers = {"a": optax.MaskedNode(), "c": MuonDimensionNumbers()}
    assert resolve_dimension_numbers(numbers, masked, call="t") == [
        MuonDimensionNumbers()
    ]


def test_a_tree_that_does_not_fit_is_refused():
    with pytest.raises(
        ValueError, match="neither the tree of the parameters nor a prefix"
    ):
        resolve_dimension_numbers({"a": None, "d": None}, TREE, call="muon")
    with pytest.raises(TypeError, match="not MuonDimensionNumbers or None"):
        resolve_dimension_numbers({"a": None, "c": 3}, TREE, call="muon")


@quick("equal")
@pytest.mark.parametrize("parts", [3, (2, 1, 3)], ids=["equal", "unequal"])
def test_parts_that_repeat_are_the_stretches_of_one_matrix_each(parts):
    """Query, key and value of one head after the other: the columns of one part of all heads are one matrix."""
    heads, period = 4, 6
    leaf = np.random.default_rng(0).normal(size=(5, heads * period)).astype(np.float32)
    numbers = FusedDimensionNumbers(0, 1, parts=parts, axis=1, repeats=heads)
    tree = {"w": leaf}
    pieces = matrix_pieces({"w": numbers}, tree, call="test")
    taken = [np.asarray(piece.take([leaf])) for piece in pieces]
    start = 0
    for piece, size in zip(taken, (2, 2, 2) if parts == 3 else parts, strict=True):
        columns = [
            head * period + start + i for head in range(heads) for i in range(size)
        ]
        assert_array_equal(piece, leaf[:, columns])
        start += size
    back = pieces.replaced(tree, taken)["w"]
    assert_array_equal(back, leaf)
    update, _ = jax.jit(muonjax.orthogonalize(dimension_numbers={"w": numbers}).update)(
        tree, None
    )
    for piece, out in zip(pieces, taken, strict=True):
        u, _, vh = np.linalg.svd(out.astype(np.float64), full_matrices=False)
        assert_allclose(piece.take([update["w"]]), u @ vh, atol=0.35)
