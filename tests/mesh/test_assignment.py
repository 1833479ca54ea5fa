"""Every matrix has one owner, and the devices have equal work."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import muonjax
from benchmarks.common import hlo_counts
from benchmarks.optimizer import sharding
from muonjax._common.platform import BYTES_A_SECOND
from muonjax._matrices.matrix_view import MatrixView, MuonDimensionNumbers
from muonjax._mesh.assignment import Assignment, ShardedLeaf, _owner_devices, assign_owners
from tests.mesh.layouts import assigned, dividing
from tests.tools.tiers import quick
from tests.tools.views import matrix_view

SPECS = [((), ()), (("fsdp",), ()), ((), ("fsdp",)), (("fsdp",), ("tensor",)), (("tensor", "fsdp"), ())]


def view(*shape) -> MatrixView:
    return matrix_view(jax.ShapeDtypeStruct(shape, "float32"), MuonDimensionNumbers(-2, -1), call="")


def cubes(dtype, m, columns, devices) -> float:
    """A cost that any reader can check."""
    return float(m * m * columns)


def make(leaves, mesh_shape, divided="owner") -> Assignment:
    with dividing(divided):
        return assign_owners(leaves, mesh_shape, cubes)


def loads(found, mesh_shape) -> np.ndarray:
    """The work of every device."""
    work = np.zeros(int(np.prod(list(mesh_shape.values()))))
    for one in found.rounds:
        for devices, owned in zip(
            _owner_devices(one.group, mesh_shape), itertools.chain(*one.owned), strict=True
        ):
            for run in owned:
                matrices, m, columns = run.layout.matrices
                work[devices] += run.count * matrices * cubes(None, m, columns, 1)
    return work


def sent(found) -> float:
    return sum(one.sent for one in found.rounds)


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
    leaves = [ShardedLeaf(view(b, m, n), ((), *spec), np.dtype(dtype)) for b, m, n, spec, dtype in drawn]
    mesh_shape = {"fsdp": 4, "tensor": 2}
    found = make(leaves, mesh_shape)
    seen = []
    for one in found.rounds:
        seen += [
            (run.leaf, run.start + i)
            for owned in itertools.chain(*one.owned)
            for run in owned
            for i in range(run.count)
        ]
    assert sorted(seen) == [(i, j) for i, leaf in enumerate(leaves) for j in range(leaf.view.batch)]
    # Graham: where every matrix can go to every owner, none is more than one matrix above the mean.
    costs = [leaf.view.batch * cubes(None, *sorted(leaf.view.shape[1:]), 1) for leaf in leaves]
    assert loads(found, mesh_shape).max() >= max(sum(costs) / 8, 0) * (1 - 1e-9)
    any_owner = all(set(sum(leaf.sharding, ())) in ({"fsdp", "tensor"}, set()) for leaf in leaves)
    if any_owner:
        largest = max(c / leaf.view.batch for c, leaf in zip(costs, leaves, strict=True))
        assert loads(found, mesh_shape).max() <= sum(costs) / 8 + largest + 1e-6


def test_loads_are_summed_over_shapes_shardings_and_dtypes():
    rows, both = ((), ("fsdp", "tensor"), ()), ((), ("fsdp",), ("tensor",))
    leaves = [
        ShardedLeaf(view(4, 64, 64), rows, np.dtype("float32")),
        ShardedLeaf(view(4, 64, 64), both, np.dtype("float32")),
    ]
    leaves += [
        ShardedLeaf(view(8, 32, 64), rows, np.dtype("bfloat16")),
        ShardedLeaf(view(8, 8, 64), ((), (), ()), np.dtype("float32")),
    ]
    work = loads(make(leaves, {"fsdp": 4, "tensor": 2}), {"fsdp": 4, "tensor": 2})
    assert (work == work[0]).all()


def test_units_count_experts_and_layers_but_not_fused_parts():
    fused = matrix_view(
        jax.ShapeDtypeStruct((5, 16, 48), "float32"), muonjax.FusedDimensionNumbers(1, 2, axis=2), call=""
    )
    assert fused.unit_axes == ((0,), (1, 2))
    assert view(2, 3, 4, 5).unit_axes == ((0, 1), (2, 3))


def test_replicas_divide_the_work():
    leaves = [ShardedLeaf(view(8, 32, 64), ((), ("fsdp",), ()), np.dtype("float32"))]
    found = make(leaves, {"replica": 2, "fsdp": 4})
    assert (loads(found, {"replica": 2, "fsdp": 4}) == cubes(None, 32, 64, 1)).all()
    # To the owners and back, 4 of 8 matrices, of which a quarter stays; then the other replica's shards.
    assert sent(found) == (2 * 3 / 4 + 1) * 4 * 32 * 64 * 4 / 4


def test_no_round_is_larger_than_an_index_reaches():
    leaves = [ShardedLeaf(view(384, 8192, 32768), ((), ("fsdp",), ()), np.dtype("bfloat16"))]
    with pytest.raises(ValueError, match=r"would get \d+ numbers from another; use more devices"):
        make(leaves, {"fsdp": 4})
    assert len(make(leaves, {"fsdp": 16}).rounds) == 1


def test_few_matrices_reach_many_replicas_without_padding():
    """An all-gather would pad three matrices to eight."""
    leaves = [ShardedLeaf(view(3, 32, 64), ((), (), ()), np.dtype("float32"))]
    few, many = make(leaves, {"data": 8}), make([*leaves, *leaves, *leaves], {"data": 8})
    assert sent(few) == 2 * 3 * 32 * 64 * 4 * 7 / 8
    assert sent(many) == 2 * 32 * 64 * 4 * 7  # nine on eight, each padded to two


def test_llama_8b_on_64_devices():
    sizes = {"query": (4096, 4096), "key": (4096, 1024), "value": (4096, 1024), "out": (4096, 4096)}
    sizes |= {"gate": (4096, 14336), "up": (4096, 14336), "down": (14336, 4096)}
    leaves = [
        ShardedLeaf(view(*shape), (("fsdp",), ()), np.dtype("float32")) for shape in 32 * list(sizes.values())
    ]
    found = make(leaves, {"fsdp": 64})
    assert len(found.rounds) == 1
    # 96 of the largest for 64 devices: no assignment has less work on the busiest one.
    assert loads(found, {"fsdp": 64}).max() == 2 * cubes(None, 4096, 14336, 1)


def test_few_matrices_are_shared_by_some_devices_and_many_are_not():
    def leaves(count):
        return [ShardedLeaf(view(count, 1024, 4096), ((), ("fsdp",), ("tensor",)), np.dtype("float32"))]

    def cost(dtype, m, columns, devices):
        return 2.0 * m * m * columns / 5e13 + 8.0 * m * m * (devices > 1) / BYTES_A_SECOND

    four, many = (assign_owners(leaves(n), {"fsdp": 4, "tensor": 2}, cost) for n in (4, 64))
    assert [one.group.tensor for one in four.rounds] == [("tensor",)]
    assert [one.group.tensor for one in many.rounds] == [()]
    # "tensor" shards the shorter side of this one, and "fsdp" that of the others.
    turned = ShardedLeaf(view(1, 128, 32), ((), ("fsdp",), ("tensor",)), np.dtype("float32"))
    mixed = assign_owners([*leaves(4), turned], {"fsdp": 4, "tensor": 2}, cost)
    assert [one.group.tensor for one in mixed.rounds] == [()]


@quick("owner", "tensor_parallel")
@pytest.mark.parametrize("divided", ["owner", "hybrid", "tensor_parallel", "auto"])
def test_the_predicted_time_is_that_of_the_compiled_program(divided):
    case = sharding.CASES["four"]._replace(
        leaves={f"x_{i}": ((32, 128), P("fsdp", "tensor")) for i in range(4)}
    )
    tx = muonjax.orthogonalize(distribution=muonjax.Distribution(case.mesh(), case.specs))
    with dividing(divided):
        found = assigned(tx, case.params(None))
        compiled = jax.jit(lambda x: tx.update(x, tx.init(x))[0]).lower(case.params(case.mesh())).compile()
    counts = hlo_counts.count(compiled, devices=8, unknown_trips=1)
    exchange = counts.mebibytes * 2**20 / BYTES_A_SECOND
    # XLA finds a few common subexpressions.
    assert found.seconds == pytest.approx(counts.flops / 5e13 + exchange, rel=0.05)
    if divided == "owner":
        assert sent(found) == counts.mebibytes * 2**20
