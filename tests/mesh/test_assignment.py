"""Every matrix has one owner, and the devices have equal work."""

import itertools
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import muonjax
from muonjax._common.platform_policy import Policy
from muonjax._matrices.matrix_view import MuonDimensionNumbers
from muonjax._mesh.assignment import _owner_devices, assign_owners, multiply_adds
from muonjax._mesh.matrix_shards import ShardedLeaf, matrix_kind
from muonjax._newton_schulz.polar_factor import polar_function
from tests.mesh.layouts import sent
from tests.tools.products import flops_of
from tests.tools.views import matrix_view

SPECS = [
    ((), ()),
    (("fsdp",), ()),
    ((), ("fsdp",)),
    (("fsdp",), ("tensor",)),
    (("tensor", "fsdp"), ()),
]


def leaf(shape, *sharding, dtype="float32") -> ShardedLeaf:
    """Matrices along the last two axes of a leaf of this shape; `sharding` is that of these two."""
    struct = jax.ShapeDtypeStruct(shape, "float32")
    view = matrix_view(struct, MuonDimensionNumbers(-2, -1), call="")
    return ShardedLeaf(view, (*[()] * (len(shape) - 2), *sharding), np.dtype(dtype))


def cubes(layout) -> float:
    """A cost that any reader can check."""
    m, n = layout.shape
    return float(m * m * n)


def make(leaves, **mesh_shape):
    """One owner for each matrix, by the cost `cubes`."""
    with mock.patch("muonjax._mesh.assignment.multiply_adds", cubes):
        return assign_owners(leaves, mesh_shape)


def loads(rounds, **mesh_shape) -> np.ndarray:
    """The work of every device."""
    work = np.zeros(int(np.prod(list(mesh_shape.values()))))
    for one in rounds:
        owners = itertools.chain(*one.replicas)
        for devices, owned in zip(
            _owner_devices(one.group, mesh_shape), owners, strict=True
        ):
            for matrices in owned:
                work[devices] += matrices.count * cubes(matrices.layout)
    return work


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 3]),
            st.sampled_from([8, 16, 32]),
            st.sampled_from([8, 32]),
            st.sampled_from(SPECS),
            st.sampled_from(["float32", "bfloat16"]),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_every_matrix_has_one_owner_and_no_load_is_far_above_the_rest(drawn):
    leaves = [leaf((b, m, n), *spec, dtype=dtype) for b, m, n, spec, dtype in drawn]
    rounds = make(leaves, fsdp=4, tensor=2)
    seen = []
    for one in rounds:
        for owned in itertools.chain(*itertools.chain(*one.replicas)):
            seen += [(owned.leaf, owned.start + i) for i in range(owned.count)]
    assert sorted(seen) == [(i, j) for i, (b, *_) in enumerate(drawn) for j in range(b)]
    costs = [m * n * min(m, n) for _, m, n, _, _ in drawn]
    mean = sum(b * cost for (b, *_), cost in zip(drawn, costs, strict=True)) / 8
    busiest = loads(rounds, fsdp=4, tensor=2).max()
    assert busiest >= mean * (1 - 1e-9)
    # Graham: if every matrix can go to every owner, no owner has more than the mean and one matrix.
    if all(set(sum(one.sharding, ())) in ({"fsdp", "tensor"}, set()) for one in leaves):
        assert busiest <= mean + max(costs) + 1e-6


def test_loads_are_summed_over_shapes_shardings_and_dtypes():
    rows = ("fsdp", "tensor"), ()
    leaves = [leaf((4, 64, 64), *rows), leaf((4, 64, 64), ("fsdp",), ("tensor",))]
    leaves += [leaf((8, 32, 64), *rows, dtype="bfloat16"), leaf((8, 8, 64), (), ())]
    work = loads(make(leaves, fsdp=4, tensor=2), fsdp=4, tensor=2)
    assert (work == work[0]).all()


def test_replicas_divide_the_work():
    rounds = make([leaf((8, 32, 64), ("fsdp",), ())], replica=2, fsdp=4)
    assert (loads(rounds, replica=2, fsdp=4) == 32 * 32 * 64).all()
    # To the owners and back, 4 of 8 matrices, of which a quarter stays; then the other replica's shards.
    assert sent(rounds) == (2 * 3 / 4 + 1) * 4 * 32 * 64 * 4 / 4


def test_no_round_is_larger_than_an_index_reaches():
    leaves = [leaf((384, 8192, 32768), ("fsdp",), (), dtype="bfloat16")]
    with pytest.raises(
        ValueError, match=r"would get \d+ numbers from another; use more devices"
    ):
        make(leaves, fsdp=4)
    assert len(make(leaves, fsdp=16)) == 1


def test_few_matrices_reach_many_replicas_without_padding():
    """An all-gather would pad three matrices to eight."""
    three = leaf((3, 32, 64), (), ())
    assert sent(make([three], data=8)) == 2 * 3 * 32 * 64 * 4 * 7 / 8
    assert (
        sent(make([three] * 3, data=8)) == 2 * 32 * 64 * 4 * 7
    )  # nine on eight, each padded to two


def test_llama_8b_on_64_devices():
    attention = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)]
    layer = [*attention, (4096, 14336), (4096, 14336), (14336, 4096)]
    rounds = make([leaf(shape, ("fsdp",), ()) for shape in 32 * layer], fsdp=64)
    assert len(rounds) == 1
    # 96 of the largest for 64 devices: no assignment has less work on the busiest one.
    assert loads(rounds, fsdp=64).max() == 2 * 4096 * 4096 * 14336


@pytest.mark.parametrize(
    ("platform", "dtype"), [("cpu", "float32"), ("gpu", "bfloat16")]
)
def test_the_cost_of_a_matrix_is_in_proportion_to_the_products(platform, dtype):
    f = polar_function(muonjax.NewtonSchulz(), Policy(platform))
    ratios = []
    for n in (1024, 2048, 4096):
        kind = matrix_kind(leaf((1024, n), (), (), dtype=dtype), {"fsdp": 8})
        flops = flops_of(f.whole, jax.ShapeDtypeStruct((1024, n), "float32"))
        ratios.append(flops / multiply_adds(kind.layout))
    assert max(ratios) < 1.4 * min(ratios)
