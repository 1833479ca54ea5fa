"""Compile a whole update for an accelerator, count its operations, and model its time with a roofline.

Times are modeled, not measured: no program runs on a device. The result of each program is written to the JSON file as
soon as it is known; a program whose result is already there is not compiled again, except with `--again`.
"""

import argparse
import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax.contrib._muon as optax_muon

import muonjax
from benchmarks.common import ahead_of_time, hlo_launches, measure, roofline
from muonjax import NewtonSchulz
from muonjax._newton_schulz import half_precision

# The shapes [fan_in, fan_out] of a model's matrices and how many there are of each, by a name. The names order the
# leaves, which matters: with Optax on GPT-2-small's matrices, XLA keeps between 9 and 51 MB, depending on their order.
Shapes = dict[str, tuple[tuple[int, int], int]]
Leaves = dict[str, tuple[int, int]]  # the shape of each matrix


def _llama(width: int, hidden: int) -> Shapes:
    """Four layers, whose keys and values have a quarter of the width."""
    return {
        "down": ((hidden, width), 4),
        "gate": ((width, hidden), 4),
        "key": ((width, width // 4), 4),
        "out": ((width, width), 4),
        "query": ((width, width), 4),
        "up": ((width, hidden), 4),
        "value": ((width, width // 4), 4),
    }


_LLAMA_8B = _llama(4096, 14336)
TREES: dict[str, Shapes] = {
    "GPT-2-small": {
        "down": ((3072, 768), 12),
        "square": ((768, 768), 48),
        "up": ((768, 3072), 12),
    },
    "Llama-8B, 4 layers": _LLAMA_8B,
    "Llama-1B, 4 layers": _llama(2048, 8192),
    "small": {
        "down": ((1024, 256), 2),
        "square": ((256, 256), 4),
        "up": ((256, 1024), 2),
    },
    # On a TPU some of Llama's groups may compile and others not: each has a row.
    "Llama-8B, 4096x4096": {name: _LLAMA_8B[name] for name in ("out", "query")},
    "Llama-8B, 1024x4096": {name: _LLAMA_8B[name] for name in ("key", "value")},
    "Llama-8B, 4096x14336": {name: _LLAMA_8B[name] for name in ("down", "gate", "up")},
}
DEFAULT_TREES = {
    "gpu": ("GPT-2-small", "Llama-1B, 4 layers", "Llama-8B, 4 layers"),
    "tpu": (
        "GPT-2-small",
        "Llama-8B, 4096x4096",
        "Llama-8B, 1024x4096",
        "Llama-8B, 4096x14336",
    ),
}
PRESETS = {
    "fast": NewtonSchulz.fast(),
    "balanced": NewtonSchulz.balanced(),
    "6 Polar Express steps": NewtonSchulz(coefficients=muonjax.polar_express(6)),
}

Tree = dict[str, Any]
Method = tuple[Callable[[Tree], Tree], jax.typing.DTypeLike]


def ours(settings: NewtonSchulz) -> Callable[[Tree], Tree]:
    """Our update of every matrix."""
    last_two = muonjax.MuonDimensionNumbers(-2, -1)
    tx = muonjax.orthogonalize(newton_schulz=settings, dimension_numbers=last_two)
    return lambda tree: tx.update(tree, tx.init(tree))[0]


def optax_matrix(x: jax.Array) -> jax.Array:
    """Optax's five steps on a matrix, in its dtype."""
    return optax_muon.orthogonalize_via_newton_schulz(
        x,
        jnp.asarray(muonjax.JORDAN[0]),
        dimension_numbers=optax_muon.MuonDimensionNumbers(0, 1),
    )


def optax_update(tree: Tree) -> Tree:
    """Optax's five steps on every matrix."""
    return jax.tree.map(optax_matrix, tree)


def methods(kernel: str | None = None) -> dict[str, Method]:
    """The updates to compare and the dtypes of their gradients, by their names in the tables.

    Args:
      kernel: An implementation of symmetric products, which each preset takes in one more row.
    """
    rows: dict[str, Method] = {
        "Optax, float32": (optax_update, jnp.float32),
        "Optax, bfloat16": (optax_update, jnp.bfloat16),
        "balanced, bfloat16 gradients": (ours(PRESETS["balanced"]), jnp.bfloat16),
    }
    for name, preset in PRESETS.items():
        rows[name] = ours(preset), jnp.float32
        rows[f"{name}, no kernel"] = _without_kernel(ours(preset)), jnp.float32
        if kernel:
            settings = dataclasses.replace(preset, implementation=kernel)
            rows[f'{name}, "{kernel}"'] = ours(settings), jnp.float32
    return rows


def _without_kernel(update: Callable[[Tree], Tree]) -> Callable[[Tree], Tree]:
    """The update as it is where no kernel was measured to be faster."""

    def plain(tree: Tree) -> Tree:
        with mock.patch.object(half_precision, "measured_kernel", return_value=None):
            return update(tree)

    return plain


def leaves(tree: str) -> Leaves:
    """The shape of every matrix of a tree."""
    shapes = {}
    for name, (shape, count) in TREES[tree].items():
        for i in range(count):
            shapes[f"{name}{i:02}"] = shape
    return shapes


def parts(tree: str, method: str, platform: str) -> list[tuple[Leaves, int]]:
    """The programs that make up one update of a tree, and how often each counts.

    On a GPU one program has all matrices. The TPU's compiler would take minutes for that, so there are several
    programs: one for each group of matrices that share their loops, or, for Optax, which has a loop per parameter, one
    for each shape.
    """
    if platform == "gpu":
        return [(leaves(tree), 1)]
    if method.startswith("Optax"):
        return [({name: shape}, count) for name, (shape, count) in TREES[tree].items()]
    groups = collections.defaultdict(dict)
    for name, shape in leaves(tree).items():
        groups[tuple(sorted(shape))][name] = shape
    return [(shapes, 1) for shapes in groups.values()]


def product_kinds(launches: Iterable[hlo_launches.Launch]) -> int:
    """How many different products a library makes, each of which XLA tunes; a Pallas kernel is no such product."""
    kinds = set()
    for launch in launches:
        if launch.flops and "symmetric" not in launch.flops:
            kinds.add(launch.kernel)
    return len(kinds)


def structs(shapes: Leaves, dtype: jax.typing.DTypeLike) -> Tree:
    """Gradients without values."""
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def seconds_to_compile(tree: str, name: str) -> float:
    """Seconds on the clock until an update of the tree is traced and compiled, in a process that did nothing before."""
    update, dtype = methods()[name]
    grads = structs(leaves(tree), dtype)
    jax.jit(jnp.sin)(1.0)  # This starts the device.
    start = time.perf_counter()
    jax.jit(update).lower(grads).compile()
    return time.perf_counter() - start


def model(chip: ahead_of_time.Chip, tree: str, name: str) -> measure.Row:
    """One row of the table: one update of a tree, by one method, on one chip."""
    update, dtype = methods()[name]
    launches = []
    temporary = 0
    for shapes, count in parts(tree, name, chip.platform):
        compiled = ahead_of_time.compile_for(chip, update, structs(shapes, dtype))
        launches += hlo_launches.launches(compiled.as_text()) * count
        temporary = max(temporary, compiled.memory_analysis().temp_size_in_bytes)
    ends = roofline.total_seconds(chip.name, launches)
    return {
        "chip": chip.name,
        "tree": tree,
        "method": name,
        "milliseconds": [1e3 * end for end in ends],
        "launches": sum(launch.count for launch in launches),
        "kernels": len({launch.kernel for launch in launches}),
        "product_kinds": product_kinds(launches),
        "gigabytes": sum(launch.count * launch.moved for launch in launches) / 1e9,
        "temporary_megabytes": temporary / 1e6,
    }


def main(platform: str, document: str) -> None:
    """The command line of benchmarks/gpu/model.py and benchmarks/tpu/model.py."""
    chips = {}
    for chip in ahead_of_time.CHIPS.values():
        if chip.platform == platform:
            chips[chip.name] = chip
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--chips", nargs="+", choices=chips, default=list(chips))
    add("--trees", nargs="+", choices=TREES, default=DEFAULT_TREES[platform])
    add("--methods", nargs="+", choices=methods(), default=list(methods()))
    add("--again", action="store_true", help="compile what the JSON has already")
    args = parser.parse_args()
    if reason := ahead_of_time.missing(platform):
        parser.error(reason)
    file = f"{platform}_model"
    rows = measure.read(file).get("results", [])
    for name, tree, method in itertools.product(args.chips, args.trees, args.methods):
        key = {"chip": name, "tree": tree, "method": method}
        if measure.matching(rows, **key) and not args.again:
            continue
        try:
            row = model(chips[name], tree, method)
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            row = key | measure.failure(error)
        row["commit"] = measure.provenance()["commit"]
        rows = measure.replaced(rows, key, row)
        measure.write(file, {"results": rows}, device=ahead_of_time.NO_DEVICE)
        print(row)
