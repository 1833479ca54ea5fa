"""Every matrix has one owner, and the devices have equal work."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import muonjax
from benchmarks.optimizer import sharding
from muonjax._matrix_view import MatrixView, MuonDimensionNumbers
from muonjax._mesh.assignment import Assignment, ModeCost, assign_owners
from muonjax._mesh.cost_model import Work
from muonjax._mesh.layout import ShardedLeaf, unit_axes
from tests.mesh.layouts import make_mesh
from tests.tools.tiers import quick
from tests.tools.views import matrix_view

SPECS = [((), ()), (("fsdp",), ()), ((), ("fsdp",)), (("fsdp",), ("tensor",)), (("tensor", "fsdp"), ())]


def view(*shape) -> MatrixView:
    return matrix_view(jax.ShapeDtypeStruct(shape, "float32"), MuonDimensionNumbers(-2, -1), call="")


def cubes(dtype, m, columns, devices) -> Work:
    """A cost that any reader can check."""
    return Work(float(m * m * columns))


def make(leaves, mesh_shape, mode="owner", chunks=1) -> Assignment:
    return assign_owners(leaves, mesh_shape, axes=tuple(mesh_shape), mode=mode, chunks=chunks, cost=cubes)


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
    ),
    st.integers(1, 3),
)
def test_every_matrix_has_one_owner_and_no_load_is_far_above_the_rest(drawn, chunks):
    leaves = [ShardedLeaf(view(b, m, n), ((), *spec), np.dtype(dtype)) for b, m, n, spec, dtype in drawn]
    plan = make(leaves, {"fsdp": 4, "tensor": 2}, chunks=chunks)
    seen = []
    for one in plan.rounds:
        seen += [(run.leaf, run.start + i) for owned in one.owned for run in owned for i in range(run.count)]
    assert sorted(seen) == [(i, j) for i, leaf in enumerate(leaves) for j in range(leaf.view.batch)]
    # Graham: where every matrix can go to every owner, none is more than one matrix above the mean.
    costs = [leaf.view.batch * cubes(None, *sorted(leaf.view.shape[1:]), 1).flops for leaf in leaves]
    assert plan.cost.flops >= max(sum(costs) / 8, 0) * (1 - 1e-9)
    any_owner = all(set(sum(leaf.sharding, ())) in ({"fsdp", "tensor"}, set()) for leaf in leaves)
    if any_owner:
        largest = max(c / leaf.view.batch for c, leaf in zip(costs, leaves, strict=True))
        assert plan.cost.flops <= sum(costs) / 8 + largest + 1e-6


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
    assert make(leaves, {"fsdp": 4, "tensor": 2}).cost.imbalance == 1.0


def test_units_count_experts_and_layers_but_not_fused_parts():
    fused = matrix_view(
        jax.ShapeDtypeStruct((5, 16, 48), "float32"), muonjax.FusedDimensionNumbers(1, 2, axis=2), call=""
    )
    assert unit_axes(fused) == ((0,), (1, 2))
    assert unit_axes(view(2, 3, 4, 5)) == ((0, 1), (2, 3))


def test_an_axis_left_out_repeats_the_work_and_gathers_nothing():
    leaves = [ShardedLeaf(view(8, 32, 64), ((), ("fsdp",), ()), np.dtype("float32"))]
    mesh_shape = {"replica": 2, "fsdp": 4}
    shared = make(leaves, mesh_shape)
    alone = assign_owners(leaves, mesh_shape, axes=("fsdp",), mode="owner", chunks=1, cost=cubes)
    assert (shared.cost.redundancy, shared.cost.collectives) == (1.0, 3)
    assert (alone.cost.redundancy, alone.cost.collectives) == (2.0, 2)
    # Half the matrices each, and the other half from the other replica: what is exchanged shrinks by as much.
    assert alone.cost.sent == 2 * (shared.cost.sent - 4 * 32 * 64 * 4 / 4)


def test_chunks_make_more_rounds_of_smaller_buffers():
    leaves = [ShardedLeaf(view(24, 32, 64), ((), ("fsdp",), ()), np.dtype("float32"))]
    one, three = (make(leaves, {"fsdp": 8}, chunks=chunks) for chunks in (1, 3))
    assert three.cost == one.cost._replace(collectives=3 * one.cost.collectives, held=one.cost.held / 3)


def test_no_round_is_larger_than_an_index_reaches():
    leaves = [ShardedLeaf(view(384, 8192, 32768), ((), ("fsdp",), ()), np.dtype("bfloat16"))]
    plan = make(leaves, {"fsdp": 4})
    assert len(plan.rounds) == 6
    assert max(one.size for one in plan.rounds) < 2**31
    assert plan.cost.collectives == 12


def test_few_matrices_reach_many_replicas_without_padding():
    """An all-gather would pad three matrices to eight."""
    leaves = [ShardedLeaf(view(3, 32, 64), ((), (), ()), np.dtype("float32"))]
    few, many = make(leaves, {"data": 8}), make([*leaves, *leaves, *leaves], {"data": 8})
    assert (few.cost.sent, few.cost.collectives) == (2 * 3 * 32 * 64 * 4 * 7 / 8, 1)
    assert few.cost.held == 3 * 32 * 64 * 4
    assert many.cost.sent == 2 * 32 * 64 * 4 * 7  # nine on eight, each padded to two


@pytest.mark.thorough
def test_llama_8b_on_64_devices():
    leaves = {n: jax.ShapeDtypeStruct(s, "float32") for n, (s, _) in sharding.llama_8b(P("fsdp")).items()}
    distribution = muonjax.Distribution(AbstractMesh((64,), ("fsdp",)), P("fsdp"), mode="owner")
    plan = muonjax.plan(leaves, distribution, dimension_numbers=MuonDimensionNumbers())
    assert plan.matrices == 224
    assert plan.cost.imbalance <= 1.06
    assert plan.cost.collectives == 2


@pytest.mark.thorough
def test_the_table_shows_every_mode_and_marks_the_chosen():
    kernel = jax.ShapeDtypeStruct((64, 256), "float32")
    params = {f"layer_{i}": {"mlp": {"up": {"kernel": kernel}}} for i in range(4)}
    distribution = muonjax.Distribution(AbstractMesh((4, 2), ("fsdp", "tensor")), P("fsdp", "tensor"))
    plan = muonjax.plan(params, distribution)
    title, heads, *rows = str(plan).splitlines()
    assert title == "4 matrices on 8 devices (fsdp 4, tensor 2); * is chosen"
    assert heads.startswith("mode")
    assert [row.split()[0] for row in rows] == list(plan.modes)
    assert [row for row in rows if " * " in row] == [rows[-1]]
    assert plan.cost == plan.modes["auto"]
    assert plan.modes["owner"].redundancy == 2.0
    # Auto takes what its cost model finds cheapest: four matrices on eight devices are shared by pairs.
    assert plan.cost == plan.modes["hybrid"]
    assert plan.cost.redundancy < 2.0
    assert plan.cost.sent < plan.modes["owner"].sent


def test_the_title_counts_one_as_one():
    distribution = muonjax.Distribution(AbstractMesh((1,), ("fsdp",)), P("fsdp"))
    plan = muonjax.plan({"kernel": jax.ShapeDtypeStruct((8, 8), "float32")}, distribution)
    assert str(plan).splitlines()[0] == "1 matrix on 1 device (fsdp 1); * is chosen"


def test_a_plan_of_arrays_takes_their_own_sharding():
    mesh = make_mesh(fsdp=8)
    on_mesh = NamedSharding(mesh, P("fsdp"))
    params = {f"kernel_{i}": jax.device_put(np.ones((16, 64), np.float32), on_mesh) for i in range(8)}
    numbers = MuonDimensionNumbers()
    said = muonjax.plan(params, muonjax.Distribution(mesh, P("fsdp")), dimension_numbers=numbers)
    assert muonjax.plan(params, dimension_numbers=numbers) == said
    with pytest.raises(ValueError, match="finds 0 meshes under the parameters; give it the distribution"):
        muonjax.plan({"kernel": np.asarray(1) + jax.numpy.ones((16, 64))}, dimension_numbers=numbers)


def test_products_are_weighed_by_what_they_are_computed_in():
    """Not by the dtype that the leaves are stored and exchanged in."""
    distribution = muonjax.Distribution(AbstractMesh((8, 8), ("fsdp", "tensor")), P("fsdp", "tensor"))
    costs = {}
    for dtype in ("float32", "bfloat16"):
        leaves = {f"w_{i}": jax.ShapeDtypeStruct((1024, 4096), dtype) for i in range(4)}
        costs[dtype] = muonjax.plan(leaves, distribution, dimension_numbers=MuonDimensionNumbers(-2, -1)).cost
    assert (
        costs["bfloat16"].redundancy == costs["float32"].redundancy < 3
    )  # on a CPU both are computed in float32


@quick("owner", "tensor_parallel")
@pytest.mark.parametrize("mode", ["owner", "hybrid", "tensor_parallel", "auto"])
def test_the_plan_is_what_the_compiler_makes_of_it(mode):
    from benchmarks.common import hlo_counts

    case = sharding.CASES["four"]._replace(
        leaves={f"x_{i}": ((32, 128), P("fsdp", "tensor")) for i in range(4)}
    )
    distribution = muonjax.Distribution(case.mesh(), case.specs, mode=mode)
    plan = muonjax.plan(case.params(None), distribution, dimension_numbers=sharding.NUMBERS)
    tx = muonjax.orthogonalize(distribution=distribution)
    compiled = jax.jit(lambda x: tx.update(x, tx.init(x))[0]).lower(case.params(case.mesh())).compile()
    counts = hlo_counts.count(compiled, devices=8, unknown_trips=1)
    assert plan.cost.collectives == counts.total_collectives
    assert plan.cost.sent == counts.mebibytes * 2**20
    # XLA finds a few common subexpressions.
    assert plan.cost.flops == pytest.approx(counts.flops, rel=0.05)


@pytest.mark.parametrize("mode", ["owner", "tensor_parallel", "hybrid", "auto"])
def test_without_matrices_nothing_is_sent(mode):
    plan = make([], {"fsdp": 4, "tensor": 2}, mode)
    assert (plan.rounds, plan.cost) == ((), ModeCost(0, 1, 1, 0, 0, 0, 0))
