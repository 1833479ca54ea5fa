"""Train on one mesh, save, and continue on another one: eight devices of FSDP, then FSDP by tensor parallel.

pip install -e ".[examples]" && python examples/recipes/another_mesh.py   # a CPU simulates the devices
"""

import pathlib
import tempfile

import jax
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from zero1 import SHAPES, loss_fn

import muonjax

SPECS = {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp"), "head": P("fsdp")}


def train(
    fsdp: int, tensor: int, folder: pathlib.Path, restore: bool = False, steps: int = 3
) -> list[float]:
    devices = jax.devices()[: fsdp * tensor]
    mesh = jax.make_mesh((fsdp, tensor), ("fsdp", "tensor"), (AxisType.Auto,) * 2, devices=devices)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = {
        n: jax.random.normal(jax.random.key(i), s) / 8 for i, (n, s) in enumerate(SHAPES.items())
    }
    params = jax.device_put(params, shardings)
    x = jax.device_put(
        jax.random.normal(jax.random.key(9), (64, 32)), NamedSharding(mesh, P("fsdp"))
    )
    distribution = muonjax.Distribution(mesh, shardings)
    tx = muonjax.muon(1e-2, muonjax.inspect(loss_fn, params, x), distribution=distribution)
    state_shardings = muonjax.state_shardings(tx, params, distribution)
    state = jax.jit(tx.init, out_shardings=state_shardings)(params)

    @jax.jit
    def step(params: dict, state: optax.OptState, x: jax.Array) -> tuple:
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    with ocp.StandardCheckpointer() as checkpointer:
        if restore:  # into arrays of the new mesh
            params, state = checkpointer.restore(folder, (params, state))
        for _ in range(steps):
            params, state, loss = step(params, state, x)
            losses.append(float(loss))
        if not restore:
            checkpointer.save(folder, (params, state))
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # accelerators are not affected
    checkpoint = pathlib.Path(tempfile.mkdtemp()) / "checkpoint"
    losses = train(8, 1, checkpoint) + train(2, 4, checkpoint, restore=True)
    print("losses", *(f"{loss:.4f}" for loss in losses))
