"""Time the GPU kernels and whole updates on an H100 or H200, beside the modeled figures.

    python -m benchmarks.gpu.run [--sections step queue] [--out benchmarks/results] [--dry-run]

In this order, unless sections are named: whole updates ("step") by four to six steps, with and without the kernel, by
Optax in both types and by ours of bfloat16 gradients; the kernel with an addend in a long queue; stacks of 32 and 64
Mi; polar errors ("accuracy") and hostile matrices; the time to compile.

Writes `gpu_<device>.json` after each result, in at most ten minutes, and keeps what it does not measure again.
`XLA_FLAGS=--xla_gpu_enable_triton_gemm=false` makes rows of their own. `--dry-run` runs the same code anywhere, on
small matrices and with "blocked" in the kernel's place. Whether the kernel is right is for its tests, which take the
GPU where there is one: `pytest tests/pallas_kernels`.
"""

import argparse
import functools
import json
import math
import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import (
    accelerator_model,
    ahead_of_time,
    hlo_launches,
    hostile,
    measure,
    momentum,
    roofline,
)
from muonjax._common.platform_policy import Policy
from pallas_kernels import symmetric_product

# The names of `jax.Device.device_kind` for which the roofline of an H100 holds.
MODELED = (ahead_of_time.CHIPS["H100"].kind, "NVIDIA H200")
# With this flag in XLA_FLAGS the sections have names of their own.
NO_TRITON = "--xla_gpu_enable_triton_gemm=false"
# Products of one program, the first of which hides the launches of the others.
IN_A_ROW = 20
# So many calls wait on the device, so that the host's share of a call does not count.
QUEUED = 5

# What each section measures, in order; what time cuts off is last.
TREES = accelerator_model.DEFAULT_TREES["gpu"]
SECTIONS: dict[str, Sequence[Any]] = {
    "step": TREES,
    "queue": [
        (48, 768, 768),
        (2, 2048, 2048),
        (4, 2048, 2048),
        (12, 2048, 2048),
        (4096, 4096),
    ],
    "stacks": TREES,
    "accuracy": [(768, 768), (4096, 4096), (2048, 4096)],
    "hostile": [(768, 768), (4096, 4096)],
    "compile": TREES,
}
DRY_RUN: dict[str, Sequence[Any]] = {
    "step": ["small"],
    "queue": [(2, 64, 64)],
    "stacks": ["small"],
    "accuracy": [(192, 192)],
    "hostile": [(24, 24)],
    "compile": ["small"],
}

Row = measure.Row
Calls = dict[str, tuple[Callable[..., Any], Any]]  # a function and its argument


def draw(shape: Sequence[int], dtype: jax.typing.DTypeLike, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, "float32").astype(dtype)


class Device:
    """The GPU that is here, or a CPU in its place; a method for each section."""

    def __init__(self, dry: bool):
        self.dry = dry
        self.kernel = "blocked" if dry else "hopper"
        self.methods = accelerator_model.methods(self.kernel)

    def timed(self, calls: Calls) -> dict[str, Row]:
        """Seconds of calls in turn, the first of which is the baseline, and what the model says of them."""
        rows: dict[str, Row] = {}
        queues = {}
        for name, (function, argument) in calls.items():
            # Another method may have traced with other kernels.
            jax.clear_caches()
            try:
                program = jax.jit(function).lower(argument).compile()
            except Exception as error:
                rows[name] = measure.failure(error)
            else:
                rows[name] = modeled(program)
                queues[name] = functools.partial(queued, program, argument)
        seconds = measure.interleave(queues, rounds=2 if self.dry else 7)
        for name, times in measure.summaries(seconds).items():
            times["seconds"] /= QUEUED
            rows[name] |= times
        return rows

    def step(self, tree: str, names: Sequence[str] | None = None) -> dict[str, Row]:
        """Whole updates of a tree: all methods, or those with these names."""
        drawn = functools.cache(draw)  # The methods share their gradients.
        calls: Calls = {}
        for name in names or self.methods:
            update, dtype = self.methods[name]
            grads = {}
            shapes = accelerator_model.leaves(tree)
            for seed, (key, shape) in enumerate(shapes.items()):
                grads[key] = drawn(shape, dtype, seed)
            calls[name] = update, grads
        return self.timed(calls)

    def queue(self, shape: tuple[int, ...]) -> dict[str, Row]:
        """A S + S in float16, as the steps of an update make it; the queue hides what the host takes to launch."""

        def in_a_row(product: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
            for _ in range(IN_A_ROW):
                x = jax.lax.optimization_barrier(product(x, c=x, beta=1.0))
            return x

        def plain(x: jax.Array, c: jax.Array, beta: float) -> jax.Array:
            """X X^T + beta C, by the library."""
            product = jnp.einsum("...ik,...jk->...ij", x, x)
            return product + beta * c

        kernel = functools.partial(symmetric_product, implementation=self.kernel)
        x = draw(shape, "float16") / shape[-1] ** 0.5
        calls: Calls = {}
        for name, product in (("plain", plain), (self.kernel, kernel)):
            calls[name] = functools.partial(in_a_row, product), x
        return self.timed(calls)

    def stacks(self, tree: str) -> dict[str, dict[str, Row]]:
        """Whole updates with larger and smaller stacks."""
        rows = {}
        for mebi in (32, 64):
            with mock.patch.object(Policy, "stack_elements", mebi << 20):
                rows[f"{mebi} Mi"] = self.step(tree, ("Optax, bfloat16", "balanced"))
        return rows

    def accuracy(self, shape: tuple[int, int]) -> dict[str, Row]:
        """Polar errors of whole updates on recorded spectra, in the dtypes that are chosen for this device."""
        every = 36 if self.dry or math.prod(shape) > 4 << 20 else 9
        matrices, polars = momentum.recorded(*shape, every)
        rows = {}
        for name, (update, dtype) in self.methods.items():
            try:
                results = jax.jit(update)([jnp.asarray(x, dtype) for x in matrices])
                rows[name] = momentum.errors(results, polars)
            except Exception as error:
                rows[name] = measure.failure(error)
        return rows

    def hostile(self, shape: tuple[int, int]) -> Row:
        """The largest singular value of the update of any hostile matrix, and which gave one that is not finite."""
        matrices = hostile.matrices(*shape, np.random.default_rng(0))
        update = jax.jit(self.methods["balanced"][0])
        largest = 0.0
        not_finite = []
        for name, x in matrices.items():
            y = update({"x": jnp.asarray(x)})["x"]
            if bool(jnp.isfinite(y).all()):
                largest = max(largest, float(jnp.linalg.norm(y, 2)))
            else:
                not_finite.append(name)
        return {"count": len(matrices), "largest": largest, "not_finite": not_finite}

    def compile(self, tree: str) -> dict[str, float]:
        """Seconds to trace and compile with nothing cached, the timing of candidates for products included."""
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        context = multiprocessing.get_context("spawn")
        rows = {}
        for name in ("Optax, bfloat16", "balanced", "6 Polar Express steps"):
            with ProcessPoolExecutor(1, context) as pool:
                job = pool.submit(accelerator_model.seconds_to_compile, tree, name)
                rows[name] = job.result()
        return rows


def modeled(program: Any) -> Row:
    """What the model gives a program, where it knows the device."""
    if jax.devices()[0].device_kind not in MODELED:
        return {}
    launches = hlo_launches.launches(program.as_text())
    ends = roofline.total_seconds("H100", launches)
    count = sum(launch.count for launch in launches)
    return {"modelled_ms": [1e3 * end for end in ends], "launches": count}


def queued(program: Callable[[Any], Any], argument: Any) -> list[Any]:
    """Call a program so often that the device always has the next call in its queue."""
    return [program(argument) for _ in range(QUEUED)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=pathlib.Path, default=measure.RESULTS)
    add("--budget", type=float, default=540, help="seconds until no case is begun")
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    add("--dry-run", action="store_true", help="small matrices, no GPU needed")
    args = parser.parse_args()
    kind = jax.devices()[0].device_kind
    if not args.dry_run and jax.default_backend() != "gpu":
        parser.error(f"the device is {kind!r}. --dry-run runs anywhere.")
    device = Device(args.dry_run)
    name = "dry_run" if args.dry_run else kind.lower().replace(" ", "_")
    rows = measure.read(f"gpu_{name}", args.out).get("rows", [])
    without = ", no Triton" if NO_TRITON in os.environ.get("XLA_FLAGS", "") else ""
    commit = measure.provenance()["commit"]
    start = time.monotonic()
    for section in args.sections:
        for case in (DRY_RUN if args.dry_run else SECTIONS)[section]:
            if time.monotonic() - start > args.budget:
                print(section, case, "skipped: out of budget", flush=True)
                continue
            try:
                result = getattr(device, section)(case)
            except Exception as error:
                result = measure.failure(error)
            key = {"section": section + without, "what": json.loads(json.dumps(case))}
            rows = measure.replaced(rows, key, {"result": result, "commit": commit})
            passed = f"{time.monotonic() - start:.0f} s"
            print(section, case, passed, json.dumps(result), flush=True)
            measure.write(f"gpu_{name}", {"rows": rows}, folder=args.out)


if __name__ == "__main__":
    main()
