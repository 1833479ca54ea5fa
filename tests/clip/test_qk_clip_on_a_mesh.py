"""QK-Clip on several devices: replicas agree, and one number per head is exchanged."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonjax
from tests.mesh.layouts import make_mesh

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit]),
]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 64, 16), np.float32)
X[5] *= 3  # the largest logits on one device
KERNELS = [
    {
        n: {"kernel": RNG.standard_normal((16, 4, 8), np.float32)}
        for n in ("query", "key")
    }
    for _ in range(3)
]
PARAMS = KERNELS[0]
THRESHOLD = 5.0


def put(tree, mesh, *spec):
    return jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, P(*spec[: x.ndim]))), tree
    )


@jax.jit
def maxima(params, x):
    q, k = (
        jnp.einsum("btd,dhe->bthe", x, params[n]["kernel"]) for n in ("query", "key")
    )
    return muonjax.max_logits(q, k, is_causal=True, block=16)


def stepper(axis_name=None):
    """The update at learning rate zero, of the parameters, the state and a batch."""
    tx = muonjax.qk_clip(THRESHOLD, muonjax.mha_site(), axis_name=axis_name)

    def step(params, state, x):
        layers = {"max_logits": params} if "query" in params else params
        logits = {name: maxima(layer, x) for name, layer in layers.items()}
        updates, state = tx.update(
            jax.tree.map(jnp.zeros_like, params), state, params, max_logits=logits
        )
        return optax.apply_updates(params, updates), state

    return tx.init, step


def compiled(step, *arguments):
    """The program, and its collectives."""
    program = jax.jit(step).lower(*arguments).compile()
    names = r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    return program, re.findall(names, program.as_text())


def check(params):
    assert maxima(jax.device_get(params), X).max() <= THRESHOLD * (1 + 3e-6)


def test_a_sharded_batch_costs_one_all_reduce_of_the_maxima_outside_of_the_loop(
    axis_type,
):
    mesh, (init, step) = make_mesh(axis_type, data=4), stepper()
    arguments = put(PARAMS, mesh), init(PARAMS), put(X, mesh, "data")
    program, collectives = compiled(step, *arguments)
    assert collectives == ["all-reduce"]
    (line,) = (
        line for line in program.as_text().splitlines() if " all-reduce(" in line
    )
    assert re.search(r"f32\[(4|1,4|4,1)\b", line), line
    assert " all-reduce(" in program.as_text().split("ENTRY")[1], "inside the loop"
    check(program(*arguments)[0])


def test_sharded_heads_cost_no_collective(axis_type):
    mesh, (init, step) = make_mesh(axis_type, tensor=4), stepper()
    sharded = put(PARAMS, mesh, None, "tensor")
    arguments = sharded, put(init(PARAMS), mesh, "tensor"), put(X, mesh)
    program, collectives = compiled(step, *arguments)
    assert not collectives
    params, state = program(*arguments)
    assert muonjax.metrics(state)["qk_clip/num_clipped"] == int(
        (maxima(PARAMS, X) > THRESHOLD).sum()
    )
    assert params["query"]["kernel"].sharding.spec[1] == "tensor"
    check(params)


def test_heads_and_batch_on_two_axes_cost_one_for_the_maxima_of_all_layers(axis_type):
    mesh, (init, step) = make_mesh(axis_type, data=2, tensor=2), stepper()
    layers = {f"layer_{i}": layer for i, layer in enumerate(KERNELS)}
    sharded = put(layers, mesh, None, "tensor")
    arguments = sharded, put(init(layers), mesh, "tensor"), put(X, mesh, "data")
    program, collectives = compiled(step, *arguments)
    assert collectives == ["all-reduce"]
    for layer in program(*arguments)[0].values():
        check(layer)


def test_replicas_under_shard_map_agree_where_the_axis_is_named(axis_type):
    """Without its name JAX refuses, or has to be told not to look."""
    mesh = make_mesh(axis_type, data=4)

    def run(axis_name, **settings):
        init, step = stepper(axis_name)
        f = jax.shard_map(
            lambda params, x: step(params, init(params), x)[0],
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            **settings,
        )
        return jax.jit(f)(put(PARAMS, mesh), put(X, mesh, "data"))

    check(run("data"))
    diverged = run(None, check_vma=False)["query"]["kernel"]
    shards = [np.asarray(shard.data) for shard in diverged.addressable_shards]
    assert any((shard != shards[0]).any() for shard in shards)
    with pytest.raises(ValueError, match=r"out_specs|varying"):
        run(None)
