"""Shard the example's model over a mesh, and connect the processes of several hosts."""

import argparse
import math
import re
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import muonjax

# The first rule that matches the end of a parameter's path. Heads and the hidden width are sharded over "tensor".
RULES = [
    (r"(query|key|value)/kernel", P("fsdp", "tensor", None)),
    (r"out/kernel", P("tensor", None, "fsdp")),
    (r"(up|head)/kernel", P("fsdp", "tensor")),
    (r"down/kernel", P("tensor", "fsdp")),
    (r"embedding/embedding", P(None, "fsdp")),
    (r".*", P()),
]


def parse(text: str) -> dict[str, int]:
    """Read the size of each mesh axis: "fsdp=4,tensor=2" -> {"fsdp": 4, "tensor": 2}."""
    parts = [re.fullmatch(r"(fsdp|tensor)=([1-9]\d*)", part) for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form fsdp=4,tensor=2")
    return {"fsdp": 1, "tensor": 1} | {part[1]: int(part[2]) for part in parts if part}


def start(args: argparse.Namespace) -> None:
    """Set up virtual CPU devices and connect the processes; call it before JAX is used."""
    if args.mesh:  # only the CPU's settings; accelerators are not affected
        jax.config.update("jax_num_cpu_devices", math.prod(args.mesh.values()) // args.processes)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if args.coordinator == "auto":
        jax.distributed.initialize()
    elif args.coordinator:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)


class Layout:
    """The shardings of parameters, batches and optimizer state; without a mesh, a single device."""

    def __init__(self, sizes: dict[str, int] | None, params: Any):
        self.mesh: Mesh | None = None
        self.distribution: muonjax.Distribution | None = None
        if sizes:
            self.mesh = jax.make_mesh(
                tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
            )
            self.shardings = jax.tree_util.tree_map_with_path(self._sharding, params)
            self.distribution = muonjax.Distribution(self.mesh, self.shardings)

    def _sharding(self, path: Any, leaf: Any) -> NamedSharding:
        name = "/".join(str(getattr(key, "key", key)) for key in path)
        return NamedSharding(
            self.mesh, next(spec for rule, spec in RULES if re.fullmatch(f".*{rule}", name))
        )

    def params(self, params: Any) -> Any:
        """Sharded parameters. Each process computed all of them and keeps its shards."""
        return jax.tree.map(_place, params, self.shardings) if self.mesh else params

    def batch(self, tokens: np.ndarray) -> Any:
        """A batch sharded over "fsdp"."""
        return _place(tokens, NamedSharding(self.mesh, P("fsdp"))) if self.mesh else tokens

    def init(self, optimizer: Any, params: Any) -> Any:
        """The optimizer's state, created with its parameters' shardings."""
        if self.mesh is None:
            return jax.jit(optimizer.init)(params)
        shardings = muonjax.state_shardings(optimizer, params, self.distribution)
        return jax.jit(optimizer.init, out_shardings=shardings)(params)


def _place(x: Any, sharding: NamedSharding) -> jax.Array:
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def whole(tree: Any) -> Any:
    """Gather a tree of sharded arrays: the whole arrays, in every process."""
    return multihost_utils.process_allgather(tree, tiled=True) if jax.process_count() > 1 else tree
