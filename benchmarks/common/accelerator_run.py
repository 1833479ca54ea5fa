"""Check and time the kernels and whole updates on the accelerator that is here, and model them."""

import argparse
import functools
import json
import multiprocessing
import os
import pathlib
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import (
    accelerator_model,
    hlo_launches,
    hostile,
    measure,
    momentum,
    roofline,
)
from benchmarks.optimizer import many_shapes
from muonjax._common.platform import Policy
from pallas_kernels import symmetric_product

# The names of `jax.Device.device_kind`, and the chip whose figures are modeled.
CHIPS = {
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}
CHIPS |= {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H100"}
CHECKS = [
    (64, 64),
    (200, 136),
    (3, 320, 192),
    (1000, 1000),
    (4, 2048, 2048),
    (8192, 1024),
    (2, 37, 5),
]
PRODUCTS = [
    (64, 256, 256),
    (64, 512, 512),
    (48, 768, 768),
    (24, 768, 3072),
    (8, 1024, 4096),
]
PRODUCTS += [(2048, 2048), (4096, 4096), (4096, 14336), (8192, 8192)]
QUEUES = [(48, 768, 768), (2, 2048, 2048), (4, 2048, 2048), (12, 2048, 2048)]
NO_TRITON = "--xla_gpu_enable_triton_gemm=false"  # in XLA_FLAGS: sections of their own
IN_A_ROW = (
    20  # products of one program, the first of which hides the launches of the others
)
QUEUED = 5  # calls that are waiting on the device, so that the host's share of a call does not count

Call = tuple[Callable[..., Any], Any]  # a function and its only argument


def draw(shape, dtype, seed):
    return jax.random.normal(jax.random.key(seed), shape, "float32").astype(dtype)


def check(implementation, shape):
    """Against float64: error beside XLA's, exact symmetry, the same bits twice."""
    x = draw(shape, "bfloat16", 0)
    c = draw((*shape[:-1], shape[-2]), "bfloat16", 1)

    @functools.partial(jax.jit, static_argnums=2)
    def run(x, c, name):
        return symmetric_product(x, c=c, alpha=0.7, beta=-1.3, implementation=name)

    exact, addend = (np.asarray(a, np.float64) for a in (x, c))
    lower = np.tril(0.7 * exact @ exact.swapaxes(-1, -2) - 1.3 * addend)
    want = lower + np.tril(lower, -1).swapaxes(-1, -2)
    out, again, plain = (
        np.asarray(run(x, c, name), np.float64)
        for name in (implementation,) * 2 + ("reference",)
    )
    error, plain_error = (
        np.linalg.norm(a - want) / np.linalg.norm(want) for a in (out, plain)
    )
    symmetric = bool((out == out.swapaxes(-1, -2)).all())
    repeats = bool((out == again).all())
    return {
        "relative_error": error,
        "reference_error": plain_error,
        "symmetric": symmetric,
        "repeats_bit_for_bit": repeats,
        "ok": bool(error <= 2 * plain_error + 1e-6 and symmetric and repeats),
    }


def timed(
    calls: dict[str, list[tuple[Call, int]]], chip: str | None, rounds: int
) -> dict[str, Any]:
    """Seconds of methods in turn, each a sum of programs that count so often; the first is the baseline.

    With the time that the model gives the compiled programs.
    """
    programs, rows = {}, {}
    for name, parts in calls.items():
        try:
            jax.clear_caches()  # of traces with other kernels
            compiled = [
                jax.jit(f).lower(argument).compile() for (f, argument), _ in parts
            ]
            rows[name] = {}
        except Exception as error:  # what the other methods take is still worth knowing
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            continue
        if chip:
            found = [hlo_launches.launches(c.as_text()) for c in compiled]
            ends = [roofline.total_seconds(chip, own) for own in found]
            counts = [count for _, count in parts]
            rows[name]["modelled_ms"] = [
                sum(1e3 * n * s for n, s in zip(counts, end, strict=True))
                for end in zip(*ends, strict=True)
            ]
            rows[name]["launches"] = sum(
                n * x.count for n, own in zip(counts, found, strict=True) for x in own
            )
        for i, (program, ((_, argument), count)) in enumerate(
            zip(compiled, parts, strict=True)
        ):
            programs[name, i] = (
                count,
                lambda p=program, a=argument: [p(a) for _ in range(QUEUED)],
            )
    seconds = measure.interleave(
        {key: call for key, (_, call) in programs.items()}, rounds=rounds
    )
    totals = {
        name: [
            sum(programs[key][0] * s / QUEUED for key, s in zip(own, each, strict=True))
            for each in zip(*(seconds[key] for key in own), strict=True)
        ]
        for name in rows
        if (own := [key for key in programs if key[0] == name])
    }
    baseline = totals[next(iter(calls))]
    for name, own in totals.items():
        rows[name] |= measure.summary(own, baseline)
    return rows


def product(kernels, shape, chip, rounds):
    """One symmetric product by each implementation, and by `einsum`."""
    x = draw(shape, "bfloat16", 0)

    def plain(x):
        return jnp.einsum("...ik,...jk->...ij", x, x, preferred_element_type=x.dtype)

    by = {
        name: functools.partial(symmetric_product, implementation=name)
        for name in (*kernels, "reference")
    }
    return timed(
        {name: [((f, x), 1)] for name, f in ({"plain": plain} | by).items()},
        chip,
        rounds,
    )


def queued_product(kernels, shape, chip, rounds):
    """A S + S in float16, as the steps of an update make it: a queue that hides what the host takes to launch."""
    x = draw(shape, "float16", 0) / shape[-1] ** 0.5

    def plain(x):
        return x + jnp.einsum(
            "...ik,...jk->...ij", x, x, preferred_element_type=x.dtype
        )

    functions = {"plain": plain}
    for name in kernels:
        functions[name] = functools.partial(_with_addend, name)

    def in_a_row(f, x):
        for _ in range(IN_A_ROW):
            x = jax.lax.optimization_barrier(f(x))
        return x

    calls = {
        name: [((functools.partial(in_a_row, f), x), 1)]
        for name, f in functions.items()
    }
    return timed(calls, chip, rounds)


def _with_addend(name, x):
    return symmetric_product(x, c=x, beta=1.0, implementation=name)


def stacks(tree, chip, rounds):
    """Whole updates with larger and smaller stacks."""
    rows, every = {}, accelerator_model.methods()
    chosen = {name: every[name] for name in ("Optax, bfloat16", "balanced")}
    for mebi in (32, 64):
        with mock.patch.object(Policy, "stack_elements", mebi << 20):
            rows[f"{mebi} Mi"] = step(chosen, tree, chip, rounds)
    return rows


def hostile_errors(shape):
    """The largest singular value of the update of any hostile matrix, and which gave one that is not finite."""
    matrices = hostile.matrices(*shape, np.random.default_rng(0))
    update, dtype = accelerator_model.methods()["balanced"]
    one = jax.jit(update)
    largest, not_finite = 0.0, []
    for name, x in matrices.items():
        y = one({"x": jnp.asarray(x, dtype)})["x"]
        if bool(jnp.isfinite(y).all()):
            largest = max(largest, float(jnp.linalg.norm(y, 2)))
        else:
            not_finite.append(name)
    return {"count": len(matrices), "largest": largest, "not_finite": not_finite}


def methods(kernels):
    """Optax's updates, and ours by default, without a kernel and with each."""
    chosen = accelerator_model.methods()
    for name in ("no kernel", *kernels):
        chosen |= accelerator_model.kernel_methods(name)
    return chosen


def step(chosen, tree, chip, rounds):
    """Whole updates of a tree, by each of these methods: the sum of the programs that the model counts."""
    drawn = functools.cache(draw)  # the methods share their gradients
    calls = {
        name: [
            (
                (
                    update,
                    {
                        key: drawn(shape, dtype, i)
                        for i, (key, shape) in enumerate(shapes.items())
                    },
                ),
                count,
            )
            for shapes, count in accelerator_model.parts(
                tree, name, jax.default_backend()
            )
        ]
        for name, (update, dtype) in chosen.items()
    }
    return timed(calls, chip, rounds)


def shapes(most, chip, rounds):
    """The many shapes of a convolutional network, or a few of them."""
    tree, functions = many_shapes.updates(most)
    grads = {
        name: draw(x.shape, x.dtype, i) for i, (name, x) in enumerate(tree.items())
    }
    return timed(
        {name: [((f, grads), 1)] for name, f in functions.items()}, chip, rounds
    )


def accuracy(kernels, shape, every):
    """Polar errors of whole updates on recorded spectra, in the dtypes that are chosen for this device."""
    rng = np.random.default_rng(0)
    matrices = [momentum.matrix(s, *shape, rng) for s in momentum.spectra()[::every]]
    rows = {}
    for name, (update, dtype) in methods(kernels).items():
        try:
            found = [
                np.asarray(y, np.float64)
                for y in jax.jit(update)([jnp.asarray(x, dtype) for x, _ in matrices])
            ]
        except Exception as error:
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            continue
        pairs = [(y, polar) for y, (_, polar) in zip(found, matrices, strict=True)]
        errors = [momentum.polar_error(*pair) for pair in pairs]
        largest = max(float(np.linalg.norm(y, 2)) for y in found)
        rows[name] = {"mean": float(np.mean(errors)), "worst": max(errors)}
        rows[name] |= {
            "worst_cosine": min(momentum.cosine(*pair) for pair in pairs),
            "largest": largest,
        }
    return rows


def seconds_to_compile(tree, name):
    """Seconds on the clock until an update of the tree is traced and compiled; call it in a process of its own."""
    update, dtype = accelerator_model.methods()[name]
    ((shapes, _),) = accelerator_model.parts(tree, name, "gpu")
    jax.jit(jnp.sin)(1.0)  # starts the device
    start = time.perf_counter()
    jax.jit(update).lower(
        {k: jax.ShapeDtypeStruct(s, dtype) for k, s in shapes.items()}
    ).compile()
    return time.perf_counter() - start


def compile_time(tree):
    """With nothing cached, the timing of candidates for products included."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    rows = {}
    for name in ("Optax, bfloat16", "balanced", "6 Polar Express steps"):
        with ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn")
        ) as pool:
            rows[name] = pool.submit(seconds_to_compile, tree, name).result()
    return rows


def tiles(shape, rounds):
    """Seconds of the Hopper kernel by its tiles."""
    from benchmarks.gpu.tiles import candidates
    from pallas_kernels import _mosaic_gpu, _mosaic_gpu_sm90

    *batch, m, k = shape
    x = draw((*(batch or [1]), m, k), "bfloat16", 0)
    scale = jnp.tile(jnp.asarray([[1.0, 0.0]]), (len(x), 1))
    cores = _mosaic_gpu.require(x.dtype)

    def launch(chosen):
        return lambda x: _mosaic_gpu_sm90.launch(
            x, None, None, scale, tiles=chosen, cores=cores
        )

    calls = {str(chosen): [((launch(chosen), x), 1)] for chosen in candidates()}
    return {
        name: row.get("seconds", row)
        for name, row in timed(calls, None, rounds).items()
    }


def main(platform: str, kernels: list[str], document: str) -> None:
    """The command line of benchmarks/gpu/run.py and benchmarks/tpu/run.py; what time cuts off is last."""
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, default=measure.RESULTS)
    parser.add_argument(
        "--budget",
        type=float,
        default=540,
        help="seconds, after which no case is begun",
    )
    parser.add_argument(
        "--sections",
        help="of check, step, queue, stacks, accuracy, hostile, compile, shapes, product, tiles, in order",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="small matrices, no accelerator needed"
    )
    arguments = parser.parse_args()
    kind = jax.devices()[0].device_kind
    chip = CHIPS.get(kind)
    if arguments.dry_run:
        kernels, rounds, trees = ["blocked"], 2, ["small"]
        checks, products, sizes = (
            CHECKS[:3],
            [(128, 64), (2, 64, 64)],
            [((192, 192), 24)],
        )
        queues, hostile_shapes = [(2, 64, 64)], [(24, 24)]
    elif jax.default_backend() != platform:
        parser.error(
            f"the device is {kind!r}, which is no {platform.upper()}. --dry-run runs anywhere."
        )
    else:
        rounds, trees = 7, accelerator_model.DEFAULT_TREES[platform]
        checks, products, sizes = (
            CHECKS,
            PRODUCTS,
            [((768, 768), 9), ((4096, 4096), 36), ((2048, 4096), 36)],
        )
        queues, hostile_shapes = QUEUES, [(768, 768), (4096, 4096)]
    cases = [
        ("check", [name, shape], check, (name, shape))
        for shape in checks
        for name in kernels
    ]
    cases += [
        ("step", tree, step, (methods(kernels), tree, chip, rounds)) for tree in trees
    ]
    cases += [
        ("queue", shape, queued_product, (kernels, shape, chip, rounds))
        for shape in queues
    ]
    cases += [("stacks", tree, stacks, (tree, chip, rounds)) for tree in trees]
    cases += [
        ("accuracy", shape, accuracy, (kernels, shape, every)) for shape, every in sizes
    ]
    cases += [("hostile", shape, hostile_errors, (shape,)) for shape in hostile_shapes]
    if platform == "gpu":
        cases += [("compile", tree, compile_time, (tree,)) for tree in trees]
    cases += [
        ("shapes", "U-Net", shapes, (2 if arguments.dry_run else None, chip, rounds))
    ]
    cases += [
        ("product", shape, product, (kernels, shape, chip, rounds))
        for shape in products
    ]
    if platform == "gpu":
        cases += [
            ("tiles", shape, tiles, (shape, rounds))
            for shape in products
            if not arguments.dry_run
        ]
    name = "dry_run" if arguments.dry_run else kind.lower().replace(" ", "_")
    path = arguments.out / f"{platform}_{name}.json"
    head = {
        "provenance": measure.provenance(),
        "question": "are the kernels right, and how fast",
    }
    start, rows = (
        time.monotonic(),
        json.loads(path.read_text())["rows"] if path.exists() else [],
    )
    if arguments.sections:
        chosen = arguments.sections.split(",")
        cases = [case for section in chosen for case in cases if case[0] == section]
    without = ", no Triton" if NO_TRITON in os.environ.get("XLA_FLAGS", "") else ""
    for section, what, run, given in cases:
        if time.monotonic() - start > arguments.budget:
            print(section, what, "skipped: out of budget", flush=True)
            continue
        try:
            result = run(*given)
        except Exception as error:
            result = {
                "error": f"{type(error).__name__}: {error}"[:2000],
                "where": traceback.format_exc()[-1500:],
            }
        row = {"section": section + without, "what": json.loads(json.dumps(what))}
        rows = [other for other in rows if not row.items() <= other.items()]
        rows.append(row | {"result": result, "commit": head["provenance"]["commit"]})
        print(
            section,
            what,
            f"{time.monotonic() - start:.0f} s",
            json.dumps(result)[:3000],
            flush=True,
        )
        path.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
