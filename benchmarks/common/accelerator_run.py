"""Check and time the kernels and whole updates on the accelerator that is here, beside the modeled figures."""

import argparse
import functools
import json
import pathlib
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import accelerator_model, hlo_launches, measure, roofline
from pallas_kernels import symmetric_product

# The names of `jax.Device.device_kind`, and the chip whose figures are modeled.
CHIPS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU v6e": "v6e"}
CHIPS |= {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H100"}
CHECKS = [(64, 64), (200, 136), (3, 320, 192), (1000, 1000), (4, 2048, 2048), (8192, 1024), (2, 37, 5)]
PRODUCTS = [(768, 768), (48, 768, 768), (2048, 2048), (4096, 4096), (4096, 14336), (8192, 8192)]


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
        np.asarray(run(x, c, name), np.float64) for name in (implementation,) * 2 + ("reference",)
    )
    error, plain_error = (np.linalg.norm(a - want) / np.linalg.norm(want) for a in (out, plain))
    symmetric = bool((out == out.swapaxes(-1, -2)).all())
    repeats = bool((out == again).all())
    return {
        "relative_error": error,
        "reference_error": plain_error,
        "symmetric": symmetric,
        "repeats_bit_for_bit": repeats,
        "ok": bool(error <= 2 * plain_error + 1e-6 and symmetric and repeats),
    }


def timed(calls, chip, rounds):
    """Milliseconds of each jitted call, in turn, beside what the model has for the compiled program."""
    seconds = measure.interleave(
        {name: functools.partial(f, *arguments) for name, (f, *arguments) in calls.items()}, rounds=rounds
    )
    baseline = next(iter(seconds.values()))
    return {
        name: measure.summary(own, baseline) | {"modelled_ms": modeled(chip, *calls[name])}
        for name, own in seconds.items()
    }


def modeled(chip, f, *arguments):
    if chip is None:
        return None
    text = f.lower(*arguments).compile().as_text()
    found = hlo_launches.launches(text)
    return [seconds * 1e3 for seconds in roofline.total_seconds(chip, found)]


def product(implementations, shape, chip, rounds):
    x = draw(shape, "bfloat16", 0)

    @jax.jit
    def plain(x):
        return jnp.einsum("...ik,...jk->...ij", x, x, preferred_element_type=x.dtype)

    def by(name):
        return jax.jit(functools.partial(symmetric_product, implementation=name))

    calls = {"plain": (plain, x)} | {name: (by(name), x) for name in (*implementations, "reference")}
    return timed(calls, chip, rounds)


def step(implementations, tree, chip, rounds):
    """Whole updates of a tree, by each method: the sum of the programs that the model counts."""
    totals: dict[str, dict[str, float]] = {}
    chosen = accelerator_model.methods()
    for name in implementations:
        chosen |= accelerator_model.kernel_methods(name)
    for name, (update, dtype) in chosen.items():
        total = {"ms": 0.0, "modelled_ms": 0.0}
        for shapes, count in accelerator_model.parts(tree, name, jax.default_backend()):
            arrays = {key: draw(shape, dtype, i) for i, (key, shape) in enumerate(shapes.items())}
            ((_, own),) = timed({name: (jax.jit(update), arrays)}, chip, rounds).items()
            total["ms"] += count * own["seconds"] * 1e3
            total["modelled_ms"] += count * (own["modelled_ms"] or [0.0])[-1]
        totals[name] = total
    return totals


def main(platform: str, kernels: list[str], document: str) -> None:
    """The command line of benchmarks/gpu/run.py and benchmarks/tpu/run.py; what time cuts off is last."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=measure.RESULTS)
    parser.add_argument("--budget", type=float, default=540, help="seconds, after which no case is begun")
    parser.add_argument("--dry-run", action="store_true", help="small matrices, no accelerator needed")
    arguments = parser.parse_args()
    kind = jax.devices()[0].device_kind
    chip = CHIPS.get(kind)
    if arguments.dry_run:
        implementations, rounds, trees = ["blocked"], 2, ["small"]
        checks, products = CHECKS[:3], [(128, 64), (2, 64, 64)]
    elif jax.default_backend() != platform:
        parser.error(f"the device is {kind!r}, which is no {platform.upper()}. --dry-run runs anywhere.")
    else:
        implementations, rounds, trees = kernels, 7, list(accelerator_model.DEFAULT_TREES[platform])
        checks, products = CHECKS, PRODUCTS
    cases = [
        ("check", [name, shape], functools.partial(check, name, shape))
        for shape in checks
        for name in implementations
    ]
    cases += [
        (run.__name__, what, functools.partial(run, implementations, what, chip, rounds))
        for run, whats in ((product, products), (step, trees))
        for what in whats
    ]
    name = "dry_run" if arguments.dry_run else kind.lower().replace(" ", "_")
    path = arguments.out / f"{platform}_{name}.json"
    head = {"provenance": measure.provenance(), "question": "are the kernels right, and how fast"}
    start, rows = time.monotonic(), []
    for section, what, case in cases:
        try:
            late = time.monotonic() - start > arguments.budget
            result = {"skipped": "out of budget"} if late else case()
        except Exception as error:
            result = {
                "error": f"{type(error).__name__}: {error}"[:2000],
                "where": traceback.format_exc()[-1500:],
            }
        rows.append({"section": section, "what": what, "result": result})
        print(section, what, json.dumps(result)[:400], flush=True)
        path.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
