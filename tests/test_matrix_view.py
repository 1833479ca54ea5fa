import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from muonjax._matrices.matrix_view import (
    FusedDimensionNumbers,
    MuonDimensionNumbers,
    matrix_pieces,
    resolve_dimension_numbers,
)
from tests.tools.oracles import normal
from tests.tools.tiers import quick
from tests.tools.views import leaf, matrix_view


def test_rows_are_what_the_layer_sums_over():
    kernel = normal(3, 4, 5)
    view = matrix_view(kernel, MuonDimensionNumbers((2, 0), 1), call="test")
    matrices = view.to_matrices(kernel)
    assert_array_equal(matrices[0], kernel.transpose(2, 0, 1).reshape(15, 4))
    assert_array_equal(view.to_leaf(matrices), kernel)
    stacked = matrix_view(kernel, MuonDimensionNumbers(1, 2), call="test")
    assert (stacked.batch, stacked.fan_in, stacked.fan_out) == (3, 4, 5)


@pytest.mark.parametrize("cut", [0, 1])
def test_a_fused_leaf_is_its_parts(cut):
    parts = np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)
    fused = np.concatenate(parts, axis=cut)
    numbers = FusedDimensionNumbers(0, 1, parts=3, axis=cut)
    pieces = matrix_pieces({"w": numbers}, {"w": fused})
    assert_array_equal([piece.take([fused]) for piece in pieces], parts)
    assert_array_equal(pieces.replaced({"w": fused}, list(parts))["w"], fused)


@pytest.mark.parametrize(
    ("shape", "numbers", "message"),
    [
        ((4,), MuonDimensionNumbers(), r"shape \(4,\); give it to Adam"),
        ((4, 4), MuonDimensionNumbers(0, 2), "output_axis=2 names axis 2"),
        ((4, 4), MuonDimensionNumbers(0, -2), "twice"),
        ((4, 4, 4), MuonDimensionNumbers((0, 1), (1, 2)), "disjoint"),
        ((4, 4), MuonDimensionNumbers((), 1), "needs disjoint axes"),
        ((4, 0), MuonDimensionNumbers(), "empty dimension"),
        ((4, 4), FusedDimensionNumbers(0, 1, parts=3), "fill its 4 entries"),
        ((4, 24), FusedDimensionNumbers(0, 1, 3, 1, 5), "24 entries `repeats` times"),
        ((4, 4, 9), FusedDimensionNumbers(0, 1, 3, 2), "one of the reduction"),
    ],
)
def test_bad_leaves(shape, numbers, message):
    with pytest.raises(ValueError, match=message):
        matrix_view(leaf(*shape), numbers, call="orthogonalize")


@pytest.mark.parametrize("dtype", [np.int32, jnp.float8_e4m3fn])
def test_bad_dtypes(dtype):
    with pytest.raises(TypeError, match=np.dtype(dtype).name):
        matrix_view(
            leaf(4, 4, dtype=dtype), MuonDimensionNumbers(), call="orthogonalize"
        )


TREE = {"a": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, "c": jnp.ones((2, 2))}


def test_a_tree_that_does_not_fit_is_refused():
    with pytest.raises(TypeError, match="not MuonDimensionNumbers or None"):
        resolve_dimension_numbers({"a": None, "c": 3}, TREE)


def test_an_entry_that_optax_masks_is_none():
    numbers = {"a": optax.MaskedNode(), "c": MuonDimensionNumbers(1, 0)}
    expected = [None, None, numbers["c"]]
    assert resolve_dimension_numbers(numbers, TREE) == expected


@quick("equal")
@pytest.mark.parametrize("parts", [3, (2, 1, 3)], ids=["equal", "unequal"])
def test_parts_that_repeat_are_the_stretches_of_one_matrix_each(parts):
    """Query, key and value of one head after the other: the columns of one part of all heads are one matrix."""
    heads = 4
    period = 6
    fused = np.asarray(normal(5, heads * period))
    numbers = FusedDimensionNumbers(0, 1, parts=parts, axis=1, repeats=heads)
    tree = {"w": fused}
    pieces = matrix_pieces({"w": numbers}, tree)
    taken = [np.asarray(piece.take([fused])) for piece in pieces]
    start = 0
    for piece, size in zip(taken, (2, 2, 2) if parts == 3 else parts, strict=True):
        columns = [
            head * period + start + i for head in range(heads) for i in range(size)
        ]
        assert_array_equal(piece, fused[:, columns])
        start += size
    back = pieces.replaced(tree, taken)["w"]
    assert_array_equal(back, fused)
    update, _ = jax.jit(muonjax.orthogonalize(dimension_numbers={"w": numbers}).update)(
        tree, None
    )
    for piece, out in zip(pieces, taken, strict=True):
        u, _, vh = np.linalg.svd(out.astype(np.float64), full_matrices=False)
        assert_allclose(piece.take([update["w"]]), u @ vh, atol=0.35)
