"""Distributions as values, and the errors and warnings for those that are wrong or missing."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import muonjax
from muonjax import Distribution
from muonjax._common.arguments import warn_once
from muonjax._mesh.distribution import spread_specs
from tests.mesh.layouts import QUICK, make_mesh
from tests.tools.tiers import examples

X = jax.random.normal(jax.random.key(0), (16, 64))


def update(tree, **settings):
    tx = muonjax.orthogonalize(newton_schulz=QUICK, **settings)
    return jax.jit(lambda x: tx.update(x, tx.init(x))[0])(tree)


@pytest.mark.parametrize(
    "spec", [P("data"), P(None, ("fsdp", "data")), P(P.UNCONSTRAINED)]
)
def test_axes_that_the_mesh_lacks(spec):
    with pytest.raises(
        ValueError,
        match=r"at \['a'\] names the axis ('data'|UNCONSTRAINED), but the mesh has only",
    ):
        Distribution(make_mesh(fsdp=8), {"a": spec})


def test_values_that_are_no_mesh():
    for mesh in (jax.devices(), AbstractMesh((8,), ("fsdp",))):
        with pytest.raises(TypeError, match=r"needs a jax.sharding.Mesh"):
            Distribution(mesh, P())  # pyright: ignore


@pytest.mark.parametrize(
    "call",
    [
        lambda given: muonjax.muon(1e-3, distribution=given),
        lambda given: muonjax.muonclip(1e-3, muonjax.mha_site(), distribution=given),
        lambda given: muonjax.orthogonalize(distribution=given),
        lambda given: muonjax.state_shardings(optax.sgd(0.1), {"w": X}, given),
    ],
)
def test_a_mesh_or_a_tree_of_specs_is_no_distribution(call):
    with pytest.raises(
        TypeError,
        match=r"\(distribution=Mesh\(...\)\) must be a muonjax.Distribution.*\(mesh, specs\)",
    ):
        call(make_mesh(fsdp=8))
    with pytest.raises(TypeError, match=r"\(distribution=dict\(...\)\) must be"):
        call({"w": P("fsdp")})


def test_specs_that_do_not_fit_the_tree():
    mesh = make_mesh(fsdp=8)
    with pytest.raises(
        ValueError,
        match=r"orthogonalize: the Distribution's param_specs.*neither the tree",
    ):
        update({"a": X}, distribution=Distribution(mesh, {"b": P("fsdp")}))
    with pytest.raises(
        ValueError,
        match=r"at \['a'\] shards more axes than the leaf of shape \(16, 64\)",
    ):
        update({"a": X}, distribution=Distribution(mesh, {"a": P(None, None, "fsdp")}))


def test_a_prefix_of_specs_is_broadcast():
    tree = {"a": {"b": X, "c": X}, "d": X, "e": optax.MaskedNode()}
    specs = {"a": P("fsdp"), "d": None, "e": P("fsdp")}
    assert spread_specs(specs, tree) == [P("fsdp"), P("fsdp"), P()]


def test_arrays_on_another_mesh():
    few = make_mesh(fsdp=4)
    there = jax.device_put(X, NamedSharding(make_mesh(fsdp=8), P("fsdp")))
    with pytest.raises(
        ValueError,
        match=r"has 4 devices, but the arrays are on 8.*make the Distribution with",
    ):
        update({"a": there}, distribution=Distribution(few, {"a": P("fsdp")}))


def test_inside_of_another_shard_map():
    mesh = make_mesh(fsdp=8)
    distribution = Distribution(mesh, {"a": P("fsdp")})
    inside = jax.shard_map(
        lambda x: update({"a": x}, distribution=distribution)["a"],
        mesh=mesh,
        in_specs=P("fsdp"),
        out_specs=P("fsdp"),
    )
    with pytest.raises(ValueError, match="can't run inside of another shard_map"):
        inside(X)


def test_an_auto_mesh_without_a_distribution_warns_once_and_runs_locally():
    mesh = make_mesh(fsdp=4, tensor=2)
    x = jax.device_put(X, NamedSharding(mesh, P("fsdp", "tensor")))
    warn_once.cache_clear()
    with pytest.warns(
        UserWarning,
        match=r"pass distribution=muonjax.Distribution.*its axis types are Auto",
    ) as warned:
        y = update({"a": x})["a"]
    assert warned[0].filename == __file__  # the user's line, not ours
    assert jnp.allclose(y, update({"a": X})["a"], atol=2e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update({"b": x})


def test_parts_of_matrices_inside_of_a_shard_map_are_warned_about():
    mesh = make_mesh(fsdp=4)

    def inside(x, spec):
        shards = jax.device_put(x, NamedSharding(mesh, spec))
        return jax.shard_map(update, mesh=mesh, in_specs=spec, out_specs=spec)(shards)

    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="each device orthogonalizes its own"):
        inside({"a": X}, P("fsdp"))
    # The same on each device
    warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside({"a": X}, P())


def test_one_device_never_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_once.cache_clear()
        update({"a": X})
        update({"a": jax.device_put(X, NamedSharding(make_mesh(fsdp=1), P("fsdp")))})


SIZES = st.sampled_from([1, 8, 24])
SPEC = st.sampled_from([P("fsdp"), P(None, "fsdp"), P()])


@examples(30)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(SIZES, SIZES, SPEC), min_size=1),
    st.data(),
)
def test_only_what_has_path_and_shape_of_a_parameter_is_sharded(leaves, data):
    mesh = make_mesh(fsdp=8)
    params = {
        "layer": {
            name: jax.ShapeDtypeStruct((m, n), "float32")
            for name, (m, n, _) in leaves.items()
        }
    }
    specs = {"layer": {name: spec for name, (_, _, spec) in leaves.items()}}
    shapes = {
        name: data.draw(st.sampled_from([(m, n), (1, n), (n, m), (m,)]))
        for name, (m, n, _) in leaves.items()
    }

    def init(params):
        other = {name: jnp.zeros(shapes[name]) for name in params["layer"]}
        return {
            "momentum": optax.EmptyState(),
            "inside": (
                {"layer": {"layer": jax.tree.map(jnp.zeros_like, params["layer"])}},
                {"layer": other},
            ),
            "alone": {name: jnp.zeros(x.shape) for name, x in params["layer"].items()},
        }

    tx = optax.GradientTransformation(init, lambda *_: None)  # pyright: ignore
    found = muonjax.state_shardings(tx, params, Distribution(mesh, specs))
    like, other = found["inside"]
    for name, (m, n, spec) in leaves.items():
        # An axis that the mesh does not divide is not sharded.
        own = [
            axis if size % 8 == 0 else None
            for axis, size in zip([*spec, None, None], (m, n), strict=False)
        ]
        assert [*like["layer"]["layer"][name].spec] == own
        assert [*other["layer"][name].spec] == (own if shapes[name] == (m, n) else [])
        assert [*found["alone"][name].spec] == []


def test_arrays_say_how_they_are_sharded():
    mesh = make_mesh(fsdp=8)
    params = {"w": jax.device_put(X, NamedSharding(mesh, P("fsdp"))), "b": jnp.ones(3)}
    found = muonjax.state_shardings(optax.sgd(0.1, momentum=0.9), params)
    assert found[0].trace == {
        "w": NamedSharding(mesh, P("fsdp", None)),
        "b": NamedSharding(mesh, P(None)),
    }
    with pytest.raises(
        ValueError,
        match=r"state_shardings\(params\) finds 0 meshes.*give it the distribution",
    ):
        muonjax.state_shardings(optax.sgd(0.1), {"w": np.ones(3)})
