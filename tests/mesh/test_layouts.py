"""However the leaves are sharded, the results are those of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from muonjax import NewtonSchulz
from muonjax._common.platform_policy import Policy
from muonjax._mesh.map_on_mesh import exchange
from tests.mesh.layouts import (
    LAYOUTS,
    NUMBERS,
    QUICK,
    SPECS,
    first_update,
    make_mesh,
    on_mesh,
    on_one_device,
    orthogonalize,
    put,
    tree,
    under,
)
from tests.tools.tiers import nightly, quick, thorough

MESHES = [{"fsdp": 1, "tensor": 1}, {"fsdp": 2, "tensor": 2}, {"fsdp": 4, "tensor": 2}]
MESHES += [{"fsdp": 2, "tensor": 4}, {"fsdp": 8, "tensor": 1}]
MATRICES = ("rows", "both", "tall", "experts")


def check(results, values=None, newton_schulz=QUICK, atol=2e-6):
    """The results are those of one device, and lie where the values do, if these are given."""
    # Entries are about 0.3, and float32 rounds their sums in another order.
    expected = on_one_device(newton_schulz)
    for name, x in (values or results).items():
        assert_allclose(results[name], expected[name], atol=atol, rtol=0, err_msg=name)
        assert results[name].sharding.is_equivalent_to(x.sharding, x.ndim), name


@pytest.mark.parametrize(
    ("names", "newton_schulz", "meshes"),
    [
        (("rows", "tall", "fused"), QUICK, MESHES),
        thorough(tuple(LAYOUTS), QUICK, MESHES[2:4]),
        nightly(("rows", "tall", "both", "fused"), NewtonSchulz(), MESHES),
    ],
)
def test_owners_give_the_same_bits_on_every_mesh(names, newton_schulz, meshes):
    found = []
    for sizes in meshes:
        values, results = on_mesh(make_mesh(**sizes), names, newton_schulz)
        # A deflation rounds more: on one device its result is up to 4e-6 from that in float64, and without one 2e-6.
        check(
            results,
            values,
            newton_schulz,
            atol=2e-6 if newton_schulz is QUICK else 4e-6,
        )
        found.append(jax.tree.map(np.asarray, results))
    for other in found[1:]:
        for name in names:
            assert_array_equal(found[0][name], other[name], err_msg=name)


@pytest.mark.thorough
def test_replicas_divide_the_work():
    values, results = on_mesh(make_mesh(replica=2, fsdp=2, tensor=2))
    check(results, values)


@quick("sizes0", "sizes1")
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 8},
        {"replica": 8, "fsdp": 1},
        {"replica": 4, "fsdp": 2},
        {"replica": 4, "tensor": 2},
    ],
)
def test_few_matrices_on_many_replicas(sizes):
    """Fewer than half of the replicas own a matrix: the results are summed with zeros."""
    mesh = make_mesh(**sizes)
    specs = {
        "rows": P("fsdp" if "fsdp" in sizes else None),
        "tall": P("tensor" if "tensor" in sizes else None),
    }
    distribution = muonjax.Distribution(mesh, specs)
    numbers = {name: NUMBERS[name] for name in specs}
    values = put(tree(tuple(specs)), specs, mesh)
    tx = muonjax.orthogonalize(
        dimension_numbers=numbers, newton_schulz=QUICK, distribution=distribution
    )
    update = first_update(tx)
    assert "all-reduce" in update.lower(values).compile().as_text()
    results = update(values)
    check(results, values)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fsdp", "tensor", "set_mesh"),
    [(1, 1, False), (4, 2, True), nightly(1, 2, True), nightly(4, 1, False)],
)
def test_explicit_axes_need_no_distribution(fsdp, tensor, set_mesh):
    names = [
        name for name in LAYOUTS if name != "remainder" or fsdp == 1
    ]  # JAX refuses to shard it unevenly
    mesh = make_mesh(AxisType.Explicit, fsdp=fsdp, tensor=tensor)
    values, results = on_mesh(mesh, names, set_mesh=set_mesh)
    check(results, values)


@pytest.mark.thorough
def test_leaves_on_an_explicit_mesh_beside_leaves_on_none():
    mesh = make_mesh(AxisType.Explicit, fsdp=4, tensor=2)
    values = put(tree(MATRICES), SPECS, mesh) | {"replicated": tree()["replicated"]}
    results = orthogonalize(values, {n: NUMBERS[n] for n in values})
    assert set(results) == set(values)
    check(results)


@pytest.mark.thorough
def test_accelerators_take_their_matrices_in_batches(monkeypatch):
    sizes = []

    def on_gpu(f, blocks, views, rounds, policy):
        def counted(x):
            sizes.append(x.shape[0])
            return f.whole(x)

        f_counted = dataclasses.replace(f, whole=counted)
        return exchange(f_counted, blocks, views, rounds, Policy("gpu"))

    monkeypatch.setattr("muonjax._mesh.map_on_mesh.exchange", on_gpu)
    values, results = on_mesh(make_mesh(fsdp=4, tensor=2))
    check(results, values)
    values, results = on_mesh(make_mesh(fsdp=2, tensor=1), ("experts",))
    check(results, values)
    assert sizes[-1] == 4  # all eight at once, four on each device


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_wrong_specs_cost_a_reshard_and_nothing_else(axis_type):
    mesh = make_mesh(axis_type, fsdp=4, tensor=2)
    values = put(tree(MATRICES), SPECS, mesh)
    wrong = {
        "rows": P("tensor", "fsdp"),
        "both": P(),
        "tall": P(None, ("fsdp", "tensor")),
        "experts": P("tensor"),
    }
    with under(mesh):
        results = orthogonalize(
            values,
            {n: NUMBERS[n] for n in MATRICES},
            distribution=muonjax.Distribution(mesh, wrong),
        )
    # Where the axis types are Auto, the results lie as the specs say.
    check(results, values if axis_type is AxisType.Explicit else None)


@pytest.mark.thorough
def test_numpy_arrays_and_a_mesh_set_outside():
    mesh = make_mesh(fsdp=4, tensor=2)
    values = {name: np.asarray(x) for name, x in tree(MATRICES).items()}
    distribution = muonjax.Distribution(mesh, {name: SPECS[name] for name in MATRICES})
    with jax.set_mesh(mesh):
        results = orthogonalize(
            values, {n: NUMBERS[n] for n in MATRICES}, distribution=distribution
        )
    check(results)


@pytest.mark.thorough
@pytest.mark.nan
def test_dtypes_are_exchanged_apart_and_zeros_and_nan_stay_in_their_matrix():
    mesh = make_mesh(fsdp=8)
    rng = np.random.default_rng(1)
    x = {
        f"{i}": jnp.asarray(rng.standard_normal((16, 64)), jnp.float32)
        for i in range(4)
    }
    x["1"] = jnp.zeros_like(x["1"])
    x["2"] = x["2"].at[3, 5].set(jnp.nan)
    x["half"] = x["0"].astype(jnp.bfloat16)
    specs = dict.fromkeys(x, P("fsdp"))
    distribution = muonjax.Distribution(mesh, specs)
    results = orthogonalize(put(x, specs, mesh), None, distribution=distribution)
    expected = orthogonalize(x, None)
    for name in x:
        assert results[name].dtype == x[name].dtype
        assert_allclose(
            results[name].astype(jnp.float32),
            expected[name].astype(jnp.float32),
            atol=2e-6,
            err_msg=name,
        )
    assert not np.asarray(results["1"]).any()
    assert np.isnan(results["2"]).all()
