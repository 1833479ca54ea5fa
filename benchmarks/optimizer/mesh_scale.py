"""Plan and compile the update of large models on 64 to 1,024 devices, none of which is needed.

    python -m benchmarks.optimizer.mesh_scale                       # all; about an hour
    python -m benchmarks.optimizer.mesh_scale --plan                # only plans, a minute
    python -m benchmarks.optimizer.mesh_scale --compile 256 --model "Llama-3-70B"

Writes results/mesh_scale.json; with options, it replaces the rows that it measures and keeps the others. Only matrices:
embeddings, norms and routers go to Adam. The step is `muon`'s, in bfloat16, as on accelerators; it is compiled by
XLA's CPU compiler for virtual devices.
"""

import argparse
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import muonjax
from benchmarks.common import measure
from benchmarks.optimizer import sharding
from benchmarks.optimizer.sharding import Case

# In half precision, as accelerators compute.
SETTINGS = muonjax.NewtonSchulz(compute_dtype=jnp.bfloat16)

Leaves = dict[str, tuple[tuple[int, ...], P]]


def llama_70b(axes: tuple[str, ...]) -> Leaves:
    """Llama-3-70B: 80 layers of seven matrices, FSDP on the side of the model's width, tensor on the other."""
    tensor = "tensor" if "tensor" in axes else None
    column, row = P("fsdp", tensor), P(tensor, "fsdp")
    shapes = {
        "query": ((8192, 8192), column),
        "key": ((8192, 1024), column),
        "value": ((8192, 1024), column),
        "out": ((8192, 8192), row),
        "gate": ((8192, 28672), column),
        "up": ((8192, 28672), column),
        "down": ((28672, 8192), row),
    }
    return {f"layer_{i}/{name}": leaf for i in range(80) for name, leaf in shapes.items()}


def kimi_k2(axes: tuple[str, ...]) -> Leaves:
    """A tree like Kimi K2's: 61 layers with multi-head latent attention, 384 experts in all but the first."""
    tensor = "tensor" if "tensor" in axes else None
    dense = ("expert", "fsdp")  # what is not an expert is sharded over both
    column, row = P(dense, tensor), P(tensor, dense)
    attention = {
        "query_a": ((7168, 1536), column),
        "query_b": ((1536, 64 * 192), column),
        "key_value_a": ((7168, 576), P(dense, None)),
        "key_value_b": ((512, 64 * 256), P("fsdp", tensor)),
        "out": ((64 * 128, 7168), row),
    }

    def mlp(width: int) -> Leaves:
        return {
            "gate": ((7168, width), column),
            "up": ((7168, width), column),
            "down": ((width, 7168), row),
        }

    experts = {
        "gate": ((384, 7168, 2048), P("expert", "fsdp", tensor)),
        "up": ((384, 7168, 2048), P("expert", "fsdp", tensor)),
        "down": ((384, 2048, 7168), P("expert", tensor, "fsdp")),
    }
    leaves: Leaves = {}
    for i in range(61):
        parts = {"attention": attention, "mlp": mlp(18432)} if i == 0 else {}
        parts = parts or {"attention": attention, "shared": mlp(2048), "experts": experts}
        leaves |= {
            f"layer_{i}/{part}/{name}": leaf for part, own in parts.items() for name, leaf in own.items()
        }
    return leaves


MODELS = {"Llama-3-70B": llama_70b, "like Kimi K2": kimi_k2}
MESHES: dict[str, list[dict[str, int]]] = {
    "Llama-3-70B": [
        {"fsdp": 64},
        {"fsdp": 8, "tensor": 8},
        {"fsdp": 256},
        {"fsdp": 32, "tensor": 8},
        {"fsdp": 1024},
        {"fsdp": 128, "tensor": 8},
    ],
    "like Kimi K2": [
        {"expert": 16, "fsdp": 4},
        {"expert": 32, "fsdp": 8},
        {"expert": 32, "fsdp": 4, "tensor": 2},
        {"expert": 64, "fsdp": 16},
        {"expert": 64, "fsdp": 4, "tensor": 4},
    ],
}


def case(model: str, sizes: dict[str, int]) -> Case:
    """The model's parameters, in float32."""
    return Case(model, sizes, MODELS[model](tuple(sizes)))


def plan(model: str, sizes: dict[str, int]) -> dict[str, Any]:
    """What one update costs the busiest device in the mode that "auto" takes, beside the owner mode."""
    own = case(model, sizes)
    distribution = muonjax.Distribution(own.abstract_mesh(), own.specs)
    start = time.perf_counter()
    found = muonjax.plan(
        own.params(None), distribution, dimension_numbers=sharding.NUMBERS, newton_schulz=SETTINGS
    )
    seconds = time.perf_counter() - start
    entries = sum(math.prod(shape) for shape, _ in own.leaves.values())
    return {
        "model": model,
        "mesh": sizes,
        "devices": own.devices,
        "matrices": found.matrices,
        "share_mebibytes": entries * 4 / own.devices / 2**20,
        "modes": {
            mode: {
                "imbalance": cost.imbalance,
                "redundancy": cost.redundancy,
                "sent_mebibytes": cost.sent / 2**20,
                "buffer_mebibytes": cost.held / 2**20,
                "collectives": cost.collectives,
                "predicted_seconds": cost.seconds,
            }
            for mode, cost in found.modes.items()
        },
        "plan_seconds": seconds,
    }


def compile_update(model: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Seconds to trace and compile one step."""
    own = case(model, sizes)
    tx = sharding.muon(own, AxisType.Auto, newton_schulz=SETTINGS)
    start = time.perf_counter()
    compiled = sharding.compile_step(tx, own, AxisType.Auto)
    seconds = time.perf_counter() - start
    temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
    return {"compile_seconds": seconds, "temporary_mebibytes": temporary}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", action="store_true", help="plan, and compile nothing")
    parser.add_argument("--compile", type=int, help="compile for this many devices, and plan nothing")
    parser.add_argument("--model", choices=list(MODELS))
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.compile or (1 if arguments.plan else 1024))
    rows = measure.read("mesh_scale").get("rows", [])
    found = {(row["model"], str(row["mesh"])): row for row in rows}
    for model in [arguments.model] if arguments.model else MODELS:
        for sizes in MESHES[model]:
            if arguments.compile not in (None, math.prod(sizes.values())):
                continue
            row = found.setdefault((model, str(sizes)), {})
            if not arguments.compile:
                row |= plan(model, sizes)
            if not arguments.plan:
                row |= compile_update(model, sizes)
            print(
                {key: value for key, value in row.items() if key != "modes"}, row["modes"]["auto"], flush=True
            )
    measure.write("mesh_scale", {"rows": list(found.values())})


if __name__ == "__main__":
    main()
