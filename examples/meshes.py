"""Where the example's model lies on a mesh, and how its processes find each other."""

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

# The first that matches the end of a parameter's path. Heads and the perceptron's width lie along "tensor".
RULES = [
    (r"(query|key|value)/kernel", P("fsdp", "tensor", None)),
    (r"out/kernel", P("tensor", None, "fsdp")),
    (r"(up|head)/kernel", P("fsdp", "tensor")),
    (r"down/kernel", P("tensor", "fsdp")),
    (r"embedding/embedding", P(None, "fsdp")),
    (r".*", P()),
]


def parse(text: str) -> dict[str, int]:
    """ "fsdp=4,tensor=2" -> {"fsdp": 4, "tensor": 2}."""
    parts = [re.fullmatch(r"(fsdp|tensor)=([1-9]\d*)", part) for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form fsdp=4,tensor=2")
    return {"fsdp": 1, "tensor": 1} | {part[1]: int(part[2]) for part in parts if part}


def start(args: argparse.Namespace) -> None:
    """Before anything asks for a device: virtual ones on a CPU, and the other processes."""
    if args.mesh:  # of the CPU alone; an accelerator has its own
        jax.config.update("jax_num_cpu_devices", math.prod(args.mesh.values()) // args.processes)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if args.coordinator == "auto":
        jax.distributed.initialize()
    elif args.coordinator:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)


class Layout:
    """Where everything lies; without a mesh, on the one device."""

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
        return NamedSharding(self.mesh, next(spec for rule, spec in RULES if re.fullmatch(f".*{rule}", name)))

    def params(self, params: Any) -> Any:
        """Each process has made the whole, and keeps its part."""
        return jax.tree.map(_place, params, self.shardings) if self.mesh else params

    def batch(self, tokens: np.ndarray) -> Any:
        """Windows along "fsdp"."""
        return _place(tokens, NamedSharding(self.mesh, P("fsdp"))) if self.mesh else tokens

    def init(self, optimizer: Any, params: Any) -> Any:
        """The optimizer's state, born where its parameters lie."""
        if self.mesh is None:
            return jax.jit(optimizer.init)(params)
        shardings = muonjax.state_shardings(optimizer, params, self.distribution)
        return jax.jit(optimizer.init, out_shardings=shardings)(params)


def _place(x: Any, sharding: NamedSharding) -> jax.Array:
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def whole(tree: Any) -> Any:
    """NumPy arrays of all of it, in every process."""
    return multihost_utils.process_allgather(tree, tiled=True) if jax.process_count() > 1 else tree
