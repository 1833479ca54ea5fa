"""Train an NNX model that its metadata shards over eight devices: FSDP over four, tensor parallel over two.

pip install -e . && python examples/recipes/nnx_fsdp.py normuon   # a CPU simulates the devices
"""

import sys

import jax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import muonjax


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        def linear(rows: int, columns: int, *axes: str | None) -> nnx.Linear:
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
            return nnx.Linear(rows, columns, kernel_init=init, rngs=rngs)

        self.up = linear(32, 64, "fsdp", "tensor")
        self.down = linear(64, 32, "tensor", "fsdp")
        self.head = linear(32, 8, "fsdp", None)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(x + self.down(nnx.gelu(self.up(x))))


def loss_fn(model: Model, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    return loss


def train(fsdp: int, tensor: int, name: str = "muon", steps: int = 5) -> list[float]:
    devices = jax.devices()[: fsdp * tensor]
    mesh = jax.make_mesh((fsdp, tensor), ("fsdp", "tensor"), (AxisType.Auto,) * 2, devices=devices)
    with jax.set_mesh(mesh):
        model = nnx.jit(lambda: Model(nnx.Rngs(0)))()  # its parameters are made on their shards
        x = jax.device_put(jax.random.normal(jax.random.key(1), (64, 32)), P("fsdp"))
        specs = nnx.get_partition_spec(nnx.state(model, nnx.Param))
        distribution = muonjax.Distribution(mesh, nnx.as_pure(specs))
        program = muonjax.inspect(loss_fn, model, x)
        rates = {"adam_learning_rate": 1e-2} if name == "muonh" else {}
        tx = getattr(muonjax, name)(1e-2, program, distribution=distribution, **rates)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        losses = [float(step(model, optimizer, x)) for _ in range(steps)]
        print(f"each device has {model.up.kernel.addressable_shards[0].data.shape} of up/kernel")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # accelerators are not affected
    print("losses", *(f"{loss:.4f}" for loss in train(4, 2, *sys.argv[1:2])))
