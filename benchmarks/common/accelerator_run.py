"""Time the kernels and whole updates on the accelerator that is here, and model them."""

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
from typing import Any, NamedTuple
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
from benchmarks.optimizer import many_shapes
from muonjax._common.platform import Policy
from pallas_kernels import symmetric_product

# The chip whose figures are modeled, by the names of `jax.Device.device_kind`.
CHIPS = {chip.kind: name for name, chip in ahead_of_time.CHIPS.items()} | {
    "NVIDIA H200": "H100"
}
NO_TRITON = "--xla_gpu_enable_triton_gemm=false"  # in XLA_FLAGS: sections with names of their own
IN_A_ROW = (
    20  # products of one program, the first of which hides the launches of the others
)
# So many calls wait on the device, so that the host's share of a call does not count.
QUEUED = 5

# What each section measures, in order; what time cuts off is last. A tree of `accelerator_model.TREES`, or a shape.
WHOLE = {
    "step": [],
    "queue": [(48, 768, 768), (2, 2048, 2048), (4, 2048, 2048), (12, 2048, 2048)],
    "stacks": [],
    "accuracy": [(768, 768), (4096, 4096), (2048, 4096)],
    "hostile": [(768, 768), (4096, 4096)],
    "compile": [],
    "shapes": ["U-Net"],
    "product": [
        (64, 256, 256),
        (64, 512, 512),
        (48, 768, 768),
        (24, 768, 3072),
        (8, 1024, 4096),
        (2048, 2048),
        (4096, 4096),
        (4096, 14336),
        (8192, 8192),
    ],
}
DRY_RUN = {
    "queue": [(2, 64, 64)],
    "accuracy": [(192, 192)],
    "hostile": [(24, 24)],
    "product": [(128, 64), (2, 64, 64)],
}

Row = dict[str, Any]


class Part(NamedTuple):
    """A function and its argument, which an update calls so often."""

    function: Callable[..., Any]
    argument: Any
    count: int = 1


def draw(shape: Sequence[int], dtype: jax.typing.DTypeLike, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, "float32").astype(dtype)


class Device:
    """The accelerator that is here, or a CPU in its place."""

    def __init__(self, platform: str, kernels: list[str], dry: bool):
        self.platform, self.dry = platform, dry
        self.kernels = ["blocked"] if dry else kernels
        self.chip = CHIPS.get(jax.devices()[0].device_kind)

    def sections(self) -> dict[str, Sequence[Any]]:
        """What each section measures here."""
        trees = (
            ["small"] if self.dry else accelerator_model.DEFAULT_TREES[self.platform]
        )
        of_trees = {name: trees for name, every in WHOLE.items() if not every}
        if self.platform != "gpu":
            of_trees["compile"] = []
        return WHOLE | of_trees | (DRY_RUN if self.dry else {})

    def timed(self, methods: dict[str, list[Part]]) -> dict[str, Row]:
        """Seconds of methods in turn, the first of which is the baseline, and what the model says of them."""
        rows: dict[str, Row] = {}
        calls = {}
        for name, parts in methods.items():
            jax.clear_caches()  # of traces with other kernels
            try:
                programs = [
                    jax.jit(part.function).lower(part.argument).compile()
                    for part in parts
                ]
            except Exception as error:
                rows[name] = measure.failure(error)
                continue
            rows[name] = self.modeled(programs, parts)
            calls[name] = functools.partial(queue, programs, parts)
        seconds = measure.interleave(calls, rounds=2 if self.dry else 7)
        baseline = seconds[next(iter(seconds))]
        for name in calls:
            rows[name] |= measure.summary(seconds[name], baseline)
            rows[name]["seconds"] /= QUEUED
        return rows

    def modeled(self, programs: list[Any], parts: list[Part]) -> Row:
        """What the model gives these programs, where it knows the device."""
        if not self.chip:
            return {}
        launches = []
        for program, part in zip(programs, parts, strict=True):
            launches += hlo_launches.launches(program.as_text()) * part.count
        ends = roofline.total_seconds(self.chip, launches)
        count = sum(launch.count for launch in launches)
        return {"modelled_ms": [1e3 * end for end in ends], "launches": count}

    def step(self, tree: str, names: Sequence[str] | None = None) -> dict[str, Row]:
        """Whole updates of a tree: all methods, or those with these names."""
        drawn = functools.cache(draw)  # the methods share their gradients
        methods = accelerator_model.methods(self.kernels)
        calls = {}
        for name in names or methods:
            update, dtype = methods[name]
            calls[name] = []
            for shapes, count in accelerator_model.parts(tree, name, self.platform):
                keys = enumerate(shapes.items())
                grads = {key: drawn(shape, dtype, i) for i, (key, shape) in keys}
                calls[name].append(Part(update, grads, count))
        return self.timed(calls)

    def queue(self, shape: tuple[int, ...]) -> dict[str, Row]:
        """A S + S in float16, as the steps of an update make it; the queue hides what the host takes to launch."""

        def in_a_row(product: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
            for _ in range(IN_A_ROW):
                x = jax.lax.optimization_barrier(product(x, c=x, beta=1.0))
            return x

        functions = {"plain": einsum}
        for name in self.kernels:
            functions[name] = functools.partial(symmetric_product, implementation=name)
        x = draw(shape, "float16") / shape[-1] ** 0.5
        rows = {
            name: [Part(functools.partial(in_a_row, f), x)]
            for name, f in functions.items()
        }
        return self.timed(rows)

    def product(self, shape: tuple[int, ...]) -> dict[str, Row]:
        """One symmetric product by each implementation, and by `einsum`."""
        functions = {"plain": einsum}
        for name in (*self.kernels, "reference"):
            functions[name] = functools.partial(symmetric_product, implementation=name)
        x = draw(shape, "bfloat16")
        return self.timed({name: [Part(f, x)] for name, f in functions.items()})

    def stacks(self, tree: str) -> dict[str, dict[str, Row]]:
        """Whole updates with larger and smaller stacks."""
        rows = {}
        for mebi in (32, 64):
            with mock.patch.object(Policy, "stack_elements", mebi << 20):
                rows[f"{mebi} Mi"] = self.step(tree, ("Optax, bfloat16", "balanced"))
        return rows

    def shapes(self, what: str) -> dict[str, Row]:
        """The many shapes of a convolutional network."""
        tree, functions = many_shapes.updates(2 if self.dry else None)
        grads = {
            name: draw(x.shape, x.dtype, i) for i, (name, x) in enumerate(tree.items())
        }
        return self.timed({name: [Part(f, grads)] for name, f in functions.items()})

    def accuracy(self, shape: tuple[int, int]) -> dict[str, Row]:
        """Polar errors of whole updates on recorded spectra, in the dtypes that are chosen for this device."""
        rng = np.random.default_rng(0)
        every = 36 if self.dry or math.prod(shape) > 4 << 20 else 9
        matrices = [
            momentum.matrix(s, *shape, rng) for s in momentum.spectra()[::every]
        ]
        polars = [polar for _, polar in matrices]
        rows = {}
        for name, (update, dtype) in accelerator_model.methods(self.kernels).items():
            try:
                results = jax.jit(update)([jnp.asarray(x, dtype) for x, _ in matrices])
                rows[name] = momentum.errors(results, polars)
            except Exception as error:
                rows[name] = measure.failure(error)
        return rows

    def hostile(self, shape: tuple[int, int]) -> Row:
        """The largest singular value of the update of any hostile matrix, and which gave one that is not finite."""
        matrices = hostile.matrices(*shape, np.random.default_rng(0))
        update = jax.jit(accelerator_model.methods()["balanced"][0])
        largest, not_finite = 0.0, []
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
        rows = {}
        for name in ("Optax, bfloat16", "balanced", "6 Polar Express steps"):
            with ProcessPoolExecutor(
                1, mp_context=multiprocessing.get_context("spawn")
            ) as pool:
                rows[name] = pool.submit(seconds_to_compile, tree, name).result()
        return rows


def queue(programs: list[Any], parts: list[Part]) -> list[Any]:
    """Call the programs of `QUEUED` updates."""
    results = []
    for _ in range(QUEUED):
        for program, part in zip(programs, parts, strict=True):
            results += [program(part.argument) for _ in range(part.count)]
    return results


def einsum(x: jax.Array, c: jax.Array | None = None, beta: float = 0.0) -> jax.Array:
    """X X^T + beta C, by the library."""
    product = jnp.einsum("...ik,...jk->...ij", x, x, preferred_element_type=x.dtype)
    return product if c is None else product + beta * c


def seconds_to_compile(tree: str, name: str) -> float:
    """Seconds on the clock until an update of the tree is traced and compiled, in a process that did nothing before."""
    update, dtype = accelerator_model.methods()[name]
    ((shapes, _),) = accelerator_model.parts(tree, name, "gpu")
    jax.jit(jnp.sin)(1.0)  # starts the device
    start = time.perf_counter()
    jax.jit(update).lower(
        {k: jax.ShapeDtypeStruct(s, dtype) for k, s in shapes.items()}
    ).compile()
    return time.perf_counter() - start


def main(platform: str, kernels: list[str], document: str) -> None:
    """The command line of benchmarks/gpu/run.py and benchmarks/tpu/run.py."""
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=pathlib.Path, default=measure.RESULTS)
    add(
        "--budget",
        type=float,
        default=540,
        help="seconds, after which no case is begun",
    )
    add(
        "--sections",
        nargs="+",
        choices=WHOLE,
        default=WHOLE,
        help="only these, in this order",
    )
    add("--dry-run", action="store_true", help="small matrices, no accelerator needed")
    args = parser.parse_args()
    kind = jax.devices()[0].device_kind
    if not args.dry_run and jax.default_backend() != platform:
        parser.error(f"the device is {kind!r}. --dry-run runs anywhere.")
    device = Device(platform, kernels, args.dry_run)
    name = "dry_run" if args.dry_run else kind.lower().replace(" ", "_")
    path = args.out / f"{platform}_{name}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    without = ", no Triton" if NO_TRITON in os.environ.get("XLA_FLAGS", "") else ""
    made, start = measure.provenance(), time.monotonic()
    for section in args.sections:
        for what in device.sections()[section]:
            if time.monotonic() - start > args.budget:
                print(section, what, "skipped: out of budget", flush=True)
                continue
            try:
                result = getattr(device, section)(what)
            except Exception as error:
                result = measure.failure(error)
            key = {"section": section + without, "what": json.loads(json.dumps(what))}
            rows = [row for row in rows if not key.items() <= row.items()]
            rows.append(key | {"result": result, "commit": made["commit"]})
            seconds = time.monotonic() - start
            print(section, what, f"{seconds:.0f} s", json.dumps(result), flush=True)
            measure.save(path, {"provenance": made, "rows": rows})
