"""Hyperball and NorMuon on meshes: norms are those of whole matrices, and their sums cost few collectives."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import muonjax
from benchmarks.common import hlo_counts
from tests.mesh.layouts import NUMBERS, SPECS, make_mesh, put, tree, under

MEMBERS = {
    "hyperball": lambda numbers: muonjax.hyperball(0.1, dimension_numbers=numbers),
    "normalize_neurons": lambda numbers: muonjax.normalize_neurons(
        dimension_numbers=numbers
    ),
}


def make(member, names):
    return MEMBERS[member]({name: NUMBERS[name] for name in names})


def step(tx):
    def run(updates, state, params):
        found, state = tx.update(updates, state, params)
        return optax.apply_updates(params, found), state

    return jax.jit(run)


@functools.cache
def on_one_device(member):
    """What every mesh must give."""
    params = tree()
    tx = make(member, NUMBERS)
    return jax.jit(lambda u, p: step(tx)(u, tx.init(p), p)[0])(turned(params), params)


def turned(params):
    return {name: np.asarray(x)[::-1] for name, x in params.items()}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("member", "sizes", "axis_type"),
    [
        ("hyperball", {"fsdp": 2, "tensor": 4}, AxisType.Explicit),
        ("normalize_neurons", {"fsdp": 4, "tensor": 2}, AxisType.Auto),
    ],
    ids=str,
)
def test_every_layout_gives_what_one_device_gives(member, sizes, axis_type):
    params = tree()
    tx = make(member, NUMBERS)
    mesh = make_mesh(axis_type, **sizes)
    with under(mesh):
        sharded = put(params, SPECS, mesh)
        found, _ = step(tx)(
            put(turned(params), SPECS, mesh), jax.jit(tx.init)(sharded), sharded
        )
    for name, want in on_one_device(member).items():
        np.testing.assert_allclose(
            found[name], want, rtol=1e-6, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("member", MEMBERS)
def test_collectives_of_a_step(member):
    mesh = make_mesh(fsdp=4, tensor=2)
    names = ("rows", "columns", "tall", "both", "both_turned")
    params = put(tree(names), SPECS, mesh)
    tx = make(member, names)
    compiled = step(tx).lower(params, tx.init(params), params).compile()
    counts = hlo_counts.count(compiled, devices=8)
    # One all-reduce for each set of mesh axes that matrices are sharded over: fsdp, tensor, and both.
    assert counts.collectives == {"all-reduce": 3}
