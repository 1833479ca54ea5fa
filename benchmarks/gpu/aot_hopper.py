"""Does the Hopper kernel compile to machine code without spills, for every choice of tiles?

    python -m benchmarks.gpu.aot_hopper [--quick] [--target TARGET] [--out benchmarks/results]

No GPU is needed, but `pip install "muonjax[cuda13]"` on Python 3.12. Reports, for each case, the registers and
spilled bytes that ptxas prints, and how many wgmma, TMA and transposing stores there are in the PTX.
`--target` is a file with the description of a GPU, `target_config` of JAX's topology; without it, an H100's published
figures.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.common.ahead_of_time import H100
from benchmarks.gpu.tiles import candidates
from pallas_kernels import _mosaic_gpu, _mosaic_gpu_sm90
from pallas_kernels._kernel_batch import by_batch
from pallas_kernels._tiles import Tiles, pick

COUNTED = {
    "wgmma": r"wgmma\.mma_async",
    "tma_loads": r"cp\.async\.bulk\.tensor\S*shared::c\S+\.global",
    "tma_stores": r"cp\.async\.bulk\.tensor\S*global\.shared::cta",
    "transposing_stores": r"stmatrix\S*\.trans",
    "register_changes": r"setmaxnreg",
}


@contextlib.contextmanager
def captured(result):
    """What the compiler, which is C++, prints."""
    with tempfile.TemporaryFile("w+") as file:
        kept = [os.dup(number) for number in (1, 2)]
        sys.stdout.flush()
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)
            file.seek(0)
            result.append(file.read())


def compile_case(sharding, shape, tiles, *, addend, dtype):
    batch, m, _ = shape

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def run(x, c, scale):
        return _mosaic_gpu_sm90.launch(x, None, c, scale, tiles=tiles, cores=132)

    c = struct((batch, m, m), dtype) if addend else None
    printed = []
    start = time.perf_counter()
    with captured(printed):
        jax.jit(run).lower(
            struct(shape, dtype), c, struct((batch, 2), jnp.float32)
        ).compile()
    (text,) = printed
    spills = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
        text,
    )
    registers = re.search(r"Used (\d+) registers", text)
    return {
        "shape": shape,
        "dtype": jnp.dtype(dtype).name,
        "tiles": vars(tiles.with_addend() if addend else tiles),
        "addend": addend,
        "seconds": round(time.perf_counter() - start, 2),
        "registers": int(registers.group(1)) if registers else None,
        "stack_bytes": int(spills.group(1)) if spills else None,
        "spilled_bytes": int(spills.group(2)) + int(spills.group(3))
        if spills
        else None,
        "serialized_wgmma": "wgmma.mma_async instructions are serialized" in text,
        "ptx_instructions": {
            name: len(re.findall(pattern, text)) for name, pattern in COUNTED.items()
        },
    }


def shared_out(target):
    """A bare `jit` on four GPUs that share out a batch of eight: what each of them launches, and sends."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology="1x1x4"
    )
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(4,), axis_names=("x",))
    shapes = (8, 512, 512), (8, 2)
    arguments = [
        jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, PartitionSpec("x"))
        )
        for shape, dtype in zip(shapes, (jnp.bfloat16, jnp.float32), strict=True)
    ]
    run = by_batch(functools.partial(_mosaic_gpu.launched, 132), "hopper")
    with captured([]):
        text = (
            jax.jit(lambda x, scale: run(x, None, None, scale))
            .lower(*arguments)
            .compile()
            .as_text()
        )
    return {
        "devices": 4,
        "shape": shapes[0],
        "launched_on_each": re.findall(r"= (\w+\[[\d,]+\])\S* custom-call\(", text),
        "collectives": re.findall(
            r"all-gather|all-to-all|all-reduce|collective-permute", text
        ),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one case")
    parser.add_argument(
        "--target",
        type=pathlib.Path,
        help="a file with the target_config of a GPU's topology",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path(__file__).parents[1] / "results",
    )
    arguments = parser.parse_args()
    target = arguments.target.read_text() if arguments.target else H100
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology="1x1x1"
    )
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    sharding = NamedSharding(mesh, PartitionSpec())

    shapes = [(1, 4096, 4096), (8, 2048, 2048)]
    cases = [
        (shape, tiles) for shape in shapes for tiles in candidates() if tiles.group == 8
    ]
    for shape in [
        (1, 256, 64),
        (8, 1024, 1024),
        (1, 8192, 8192),
        (1, 1088, 1152),
        (1, 4096, 16384),
    ]:
        cases.append((shape, pick(shape[1], shape[0])))
    rows = []
    for shape, tiles in cases[:1] if arguments.quick else cases:
        for addend in (False, True):
            for dtype in (
                (jnp.bfloat16, jnp.float16) if shape == shapes[0] else (jnp.bfloat16,)
            ):
                row = compile_case(sharding, shape, tiles, addend=addend, dtype=dtype)
                rows.append(row)
                counts = " ".join(
                    f"{name} {n}" for name, n in row["ptx_instructions"].items()
                )
                size = Tiles(**row["tiles"])
                print(
                    f"{shape!s:18} {row['dtype']:8} {size.rows * size.block}x{size.block} "
                    f"stages {size.stages} slots {size.slots} addend {addend:d}: "
                    f"{row['registers']} registers, {row['spilled_bytes']} spilled; {counts}",
                    flush=True,
                )
    mesh_row = shared_out(target)
    print(mesh_row)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    ptxas = subprocess.run(
        ["ptxas", "--version"], capture_output=True, text=True, check=False
    )
    report = {
        "question": "registers, spills and instructions of the Hopper kernel, compiled without a GPU",
        "provenance": {
            "device": f"compiled ahead of time for {topology.devices[0].device_kind}; not run",
            "commit": commit.stdout.strip(),
            "date": time.strftime("%Y-%m-%d"),
            "versions": {
                "python": platform.python_version(),
                "jax": jax.__version__,
                "ptxas": (re.findall(r"V[\d.]+", ptxas.stdout) or [None])[0],
            },
        },
        "every_case_without_spills": all(row["spilled_bytes"] == 0 for row in rows),
        "mesh": mesh_row,
        "results": rows,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "aot_hopper.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
