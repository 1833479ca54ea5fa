"""Optimizer state in host memory: the same updates to the bit, from wherever the state is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from benchmarks.common import hlo_counts
from tests.mesh.layouts import make_mesh
from tests.tools.optimizers import optimizer
from tests.tools.oracles import normal, normal_tree
from tests.tools.tiers import thorough

SHAPES = {
    "attention": {name: {"kernel": (64, 2, 32)} for name in ("query", "key", "value")},
    "gate": {"kernel": (1, 64)},
    "up": {"kernel": (16, 64), "bias": (64,)},
    "embedding": {"embedding": (32, 16)},
}
STATISTICS = {"attention": jnp.array([400.0, 50.0])}
OPTIMIZERS = {
    name: functools.partial(optimizer, name, rate=0.1)
    for name in ("muon", "muonclip", "normuon", "muonh", "adamclip")
}
OPTIMIZERS |= {
    "int8": functools.partial(optimizer, "muon", rate=0.1, mu_dtype=jnp.int8),
    "ema_nesterov": lambda: muonjax.ema_nesterov(optimizer("muon", rate=0.1), 0.5),
    "offload(adamw)": lambda: muonjax.offload(optax.adamw(0.1)),
    "offload(MultiSteps)": lambda: muonjax.offload(
        optax.MultiSteps(optax.adam(0.1), 2)
    ),
}


def params(mesh):
    """The parameters on the mesh, and their distribution."""
    tree = normal_tree(SHAPES)
    specs = jax.tree.map(
        lambda p: P("fsdp") if p.ndim > 1 and len(p) > 1 else P(), tree
    )
    tree = jax.tree.map(
        lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), tree, specs
    )
    return tree, muonjax.Distribution(mesh, specs)


def kinds(state):
    return {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.ndim}


def program(tx, tree, shardings):
    def step(tree, state, gradients):
        extra = (
            {"max_logits": STATISTICS}
            if "QKClip" in repr(jax.tree.structure(state))
            else {}
        )
        updates, state = tx.update(gradients, state, tree, **extra)
        return optax.apply_updates(tree, updates), state

    like = jax.tree.map(lambda p: p.sharding, tree)
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(like, shardings))


def trained(tx, tree, distribution, memory_kind, steps=2):
    shardings = muonjax.state_shardings(tx, tree, distribution, memory_kind=memory_kind)
    state = jax.jit(tx.init, out_shardings=shardings)(tree)
    step = program(tx, tree, shardings)
    tree = jax.tree.map(jnp.copy, tree)
    for count in range(steps):
        gradients = jax.tree.map(
            lambda p, c=count: p * 0 + normal(*p.shape, seed=c), tree
        )
        tree, state = step(tree, state, gradients)
    return tree, state


def same(a, b):
    jax.tree.map(assert_array_equal, a, b)


def same_but_for_fused_products(a, b):
    """XLA decides by what else it fuses whether a product and a sum round once or twice; int8 by one unit then."""

    def compare(x, y):
        x = np.asarray(x)
        y = np.asarray(y)
        if x.dtype == np.int8:
            assert_allclose(x.astype(int), y.astype(int), atol=1)
        else:
            assert_allclose(x, y, rtol=1e-5, atol=1e-6)

    jax.tree.map(compare, a, b)


SAME = dict.fromkeys(OPTIMIZERS, same) | {"int8": same_but_for_fused_products}


@pytest.mark.parametrize("name", [
    "muonclip",
    "int8",
    "offload(MultiSteps)",
        *(thorough(n) for n in OPTIMIZERS if n not in ("muonclip", "int8", "offload(MultiSteps)")),
])  # fmt: skip
def test_the_place_of_the_state_changes_nothing(name):
    tree, distribution = params(make_mesh(fsdp=1))
    tx = OPTIMIZERS[name]()
    on_device, on_host = (
        trained(tx, tree, distribution, kind) for kind in (None, "pinned_host")
    )
    assert "pinned_host" in kinds(on_host[1])
    assert "pinned_host" not in kinds(on_device[1])
    SAME[name](on_host, on_device)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["muon", thorough("int8"), thorough("muonclip")])
def test_no_collective_is_added_on_a_mesh(name):
    tree, distribution = params(make_mesh(fsdp=8))
    tx = OPTIMIZERS[name](distribution=distribution)
    counts = []
    results = []
    for kind in (None, "pinned_host"):
        shardings = muonjax.state_shardings(tx, tree, distribution, memory_kind=kind)
        state = jax.jit(tx.init, out_shardings=shardings)(tree)
        compiled = program(tx, tree, shardings).lower(tree, state, tree).compile()
        counts.append(hlo_counts.count(compiled, unknown_trips=1))
        results.append(trained(tx, tree, distribution, kind))
    assert counts[0].collectives == counts[1].collectives
    assert counts[0].sent == counts[1].sent
    SAME[name](*results)


def test_a_checkpoint_goes_to_either_memory(tmp_path):
    tree, distribution = params(make_mesh(fsdp=1))
    tx = OPTIMIZERS["int8"]()
    _, state = trained(tx, tree, distribution, "pinned_host")
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        for kind in (None, "pinned_host"):
            shardings = muonjax.state_shardings(
                tx, tree, distribution, memory_kind=kind
            )
            like = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                state,
                shardings,
            )
            restored = saver.restore(tmp_path / "state", like)
            assert ("pinned_host" in kinds(restored)) == (kind is not None)
            same(restored, state)


def test_outside_of_jit_the_state_stays_where_it_is():
    tree, distribution = params(make_mesh(fsdp=1))
    tx = muonjax.trace(0.9)
    shardings = muonjax.state_shardings(
        tx, tree, distribution, memory_kind="pinned_host"
    )
    _, state = tx.update(tree, jax.device_put(tx.init(tree), shardings))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"pinned_host"}


def test_a_state_of_other_parameters_is_refused():
    """Leaf by leaf, the momentum of one leaf would go to another."""
    tx = muonjax.trace(0.9)
    x = jnp.ones((2, 3))
    for other in ({"b": x, "z": x}, {"a": x}):
        with pytest.raises(ValueError, match=r"[Kk]ey"):
            tx.update(other, tx.init({"a": x, "b": x}))


def test_a_memory_that_is_not_there_is_named_with_those_that_are():
    tree, distribution = params(make_mesh(fsdp=1))
    with pytest.raises(ValueError, match=r"pinned_host.*memory kind: hbm"):
        muonjax.state_shardings(
            muonjax.muon(0.1), tree, distribution, memory_kind="hbm"
        )
