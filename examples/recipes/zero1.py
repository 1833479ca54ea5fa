"""Divide the optimizer's state over eight devices that all hold the whole model: the first stage of ZeRO.

pip install -e . && python examples/recipes/zero1.py   # a CPU simulates the devices
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonjax

SHAPES = {"up": (32, 64), "down": (64, 32), "head": (32, 8)}


def loss_fn(params: dict, x: jax.Array) -> jax.Array:
    return jnp.mean(((x + jnp.tanh(x @ params["up"]) @ params["down"]) @ params["head"]) ** 2)


def train(count: int, kind: AxisType = AxisType.Explicit, steps: int = 5) -> list[float]:
    mesh = jax.make_mesh((count,), ("data",), (kind,), devices=jax.devices()[:count])
    whole, divided = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params = {
        n: jax.random.normal(jax.random.key(i), s) / 8 for i, (n, s) in enumerate(SHAPES.items())
    }
    params = jax.device_put(params, whole)
    x = jax.device_put(jax.random.normal(jax.random.key(9), (64, 32)), divided)
    program = muonjax.inspect(loss_fn, params, x)
    # With explicit axis types the arrays say how they are sharded.
    distribution = None if kind == AxisType.Explicit else muonjax.Distribution(mesh, whole)
    tx = muonjax.muon(1e-2, program, distribution=distribution)
    state = jax.eval_shape(tx.init, params)
    shardings = jax.tree.map(lambda leaf: divided if leaf.ndim else whole, state)
    state = jax.jit(tx.init, out_shardings=shardings)(params)

    def step(params: dict, state: optax.OptState, x: jax.Array) -> tuple:
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    outputs = jax.tree.map(lambda _: whole, params), shardings, whole
    compiled = jax.jit(step, donate_argnums=(0, 1), out_shardings=outputs)
    losses = []
    for _ in range(steps):
        params, state, loss = compiled(params, state, x)
        losses.append(float(loss))
    momentum = max(jax.tree.leaves(state), key=lambda leaf: leaf.size)
    print(
        f"each device has {momentum.addressable_shards[0].data.shape} of a momentum {momentum.shape}"
    )
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # accelerators are not affected
    print("losses", *(f"{loss:.4f}" for loss in train(8)))
