"""Compile a whole update for an accelerator, count its operations, and model its time with a roofline.

Times are modeled, not measured: no program runs on a device. The result of each program is written to the JSON file as
soon as it is known; a program whose result is already there is not compiled again, except with `--again`.
"""

import argparse
import gzip
import json
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax.contrib._muon as optax_muon

import muonjax
from benchmarks.common import ahead_of_time, hlo_launches, measure, roofline
from muonjax._newton_schulz import half_precision

# The shapes [fan_in, fan_out] of a model's matrices and how many there are of each, by a name. The leaves are in the
# order of the names. The order matters: with Optax on GPT-2-small's matrices, XLA keeps between 9 and 51 MB, depending
# on it.
TREES: dict[str, dict[str, tuple[tuple[int, int], int]]] = {
    "GPT-2-small": {
        "down": ((3072, 768), 12),
        "square": ((768, 768), 48),
        "up": ((768, 3072), 12),
    },
    "Llama-8B, 4 layers": {
        "down": ((14336, 4096), 4),
        "gate": ((4096, 14336), 4),
        "key": ((4096, 1024), 4),
        "out": ((4096, 4096), 4),
        "query": ((4096, 4096), 4),
        "up": ((4096, 14336), 4),
        "value": ((4096, 1024), 4),
    },
    "Llama-1B, 4 layers": {
        "down": ((8192, 2048), 4),
        "gate": ((2048, 8192), 4),
        "key": ((2048, 512), 4),
        "out": ((2048, 2048), 4),
        "query": ((2048, 2048), 4),
        "up": ((2048, 8192), 4),
        "value": ((2048, 512), 4),
    },
    "small": {
        "down": ((1024, 256), 2),
        "square": ((256, 256), 4),
        "up": ((256, 1024), 2),
    },
}
_LLAMA = TREES["Llama-8B, 4 layers"]
# On a TPU some of Llama's groups may compile and others not: each has a row of its own.
TREES |= {
    f"Llama-8B, {title}": {name: _LLAMA[name] for name in names}
    for title, names in (
        ("4096x4096", ("out", "query")),
        ("1024x4096", ("key", "value")),
        ("4096x14336", ("down", "gate", "up")),
    )
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

Tree = dict[str, Any]
Method = tuple[Callable[[Tree], Tree], jax.typing.DTypeLike]


def ours(**settings: Any) -> Method:
    """Our update of every matrix, with `NewtonSchulz(**settings)`, float32 in and out."""
    newton_schulz = muonjax.NewtonSchulz(**settings)
    last_two = muonjax.MuonDimensionNumbers(-2, -1)
    tx = muonjax.orthogonalize(newton_schulz=newton_schulz, dimension_numbers=last_two)
    return lambda tree: tx.update(tree, tx.init(tree))[0], jnp.float32


def optax_update(tree: Tree) -> Tree:
    """Optax's five steps on every matrix."""

    def one(x):
        dimensions = optax_muon.MuonDimensionNumbers(0, 1)
        coefficients = jnp.asarray(muonjax.JORDAN[0])
        return optax_muon.orthogonalize_via_newton_schulz(
            x, coefficients, dimension_numbers=dimensions
        )

    return jax.tree.map(one, tree)


def methods() -> dict[str, Method]:
    """The methods to compare, by their names in the tables."""
    return {
        "Optax, float32": (optax_update, jnp.float32),
        "Optax, bfloat16": (optax_update, jnp.bfloat16),
        "fast": ours(coefficients=muonjax.NewtonSchulz.fast().coefficients),
        "balanced": ours(),
        "balanced, bfloat16 gradients": (ours()[0], jnp.bfloat16),
        "6 Polar Express steps": ours(coefficients=muonjax.polar_express(6)),
    }


def kernel_methods(implementation: str | None) -> dict[str, Method]:
    """Our methods with the named implementation of symmetric products; without a kernel for "no kernel"."""
    presets = {"fast": muonjax.NewtonSchulz.fast(), "balanced": muonjax.NewtonSchulz()}
    presets["6 Polar Express steps"] = muonjax.NewtonSchulz(
        coefficients=muonjax.polar_express(6)
    )
    rows: dict[str, Method] = {}
    for name, settings in presets.items():
        if implementation == "no kernel":
            rows[f"{name}, no kernel"] = _without_kernels(
                ours(coefficients=settings.coefficients)
            )
        elif implementation is not None:
            update = ours(
                coefficients=settings.coefficients, implementation=implementation
            )
            rows[f'{name}, "{implementation}"'] = update
    return rows


def _without_kernels(method: Method) -> Method:
    """The method as it is where no kernel was measured to be faster."""
    update, dtype = method

    def plain(tree: Tree) -> Tree:
        with mock.patch.object(half_precision, "measured_kernel", return_value=None):
            return update(tree)

    return plain, dtype


def parts(
    tree: str, method: str, platform: str
) -> list[tuple[dict[str, tuple[int, int]], int]]:
    """The programs that make up one update of a tree, and how often each counts.

    On a GPU one program has all matrices. The TPU's compiler would take minutes for that, so there are several
    programs: one for each group of matrices that share their loops, or, for methods with a loop per parameter, one for
    each shape.
    """
    matrices = TREES[tree]
    if platform == "gpu":
        groups = [list(matrices)]
    elif method.startswith("Optax"):
        counts: dict[tuple[int, int], int] = {}
        for shape, count in matrices.values():
            counts[shape] = counts.get(shape, 0) + count
        return [({"x": shape}, count) for shape, count in counts.items()]
    else:
        sides = dict.fromkeys(tuple(sorted(shape)) for shape, _ in matrices.values())
        groups = [
            [name for name, (shape, _) in matrices.items() if tuple(sorted(shape)) == s]
            for s in sides
        ]
    return [
        (
            {
                f"{name}{i:02}": matrices[name][0]
                for name in group
                for i in range(matrices[name][1])
            },
            1,
        )
        for group in groups
    ]


def product_kinds(launches: Iterable[hlo_launches.Launch]) -> int:
    """How many different products a library makes, each of which XLA tunes; a Pallas kernel is no such product."""
    kinds = {
        re.sub(r"metadata=\{[^}]*\}", "", x.kernel)
        for x in launches
        if x.flops and "symmetric" not in x.flops
    }
    return len(kinds)


def model(
    chip: ahead_of_time.Chip,
    tree: str,
    name: str,
    method: Method,
    texts: pathlib.Path | None = None,
) -> dict[str, Any]:
    """One row of the table: one update of a tree, by one method, on one chip.

    Args:
      chip: One of `ahead_of_time.CHIPS`.
      tree: One of `TREES`.
      name: The name of the method.
      method: One of `methods`.
      texts: A folder where the optimized HLO is kept, and taken from.
    """
    update, dtype = method
    launches, temporary, seconds = [], 0, 0.0
    for number, (shapes, count) in enumerate(parts(tree, name, chip.platform)):
        path = (
            texts / f"{chip.name}_{tree}_{name}_{number}.gz".replace(" ", "_")
            if texts
            else None
        )
        if path and path.exists():
            compiled = ahead_of_time.Compiled(
                *json.loads(gzip.decompress(path.read_bytes()))
            )
        else:
            arguments = {
                key: jax.ShapeDtypeStruct(shape, dtype) for key, shape in shapes.items()
            }
            compiled = ahead_of_time.compile_for(chip, update, arguments)
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(gzip.compress(json.dumps(compiled).encode()))
        own = hlo_launches.launches(compiled.text)
        launches += [hlo_launches.repeated(launch, count) for launch in own]
        temporary = max(temporary, compiled.temporary)
        seconds += compiled.seconds * count
    flops: dict[str, float] = {}
    for launch in launches:
        for kind, value in launch.flops.items():
            flops[kind] = flops.get(kind, 0.0) + launch.count * value / 1e12
    return {
        "chip": chip.name,
        "tree": tree,
        "method": name,
        "milliseconds": [
            seconds * 1e3 for seconds in roofline.total_seconds(chip.name, launches)
        ],
        "launches": sum(launch.count for launch in launches),
        "kernels": len({launch.kernel for launch in launches}),
        "product_kinds": product_kinds(launches),
        "factorizations": sum(
            launch.count for launch in launches if launch.factorization
        ),
        "gigabytes": sum(launch.count * launch.moved for launch in launches) / 1e9,
        "teraflops": flops,
        "temporary_megabytes": temporary / 1e6,
        "compile_processor_seconds": seconds,
    }


def main(platform: str, implementation: str | None, document: str) -> None:
    """The command line of benchmarks/gpu/model.py and benchmarks/tpu/model.py."""
    chips = [
        chip.name for chip in ahead_of_time.CHIPS.values() if chip.platform == platform
    ]
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--chips", default=",".join(chips))
    parser.add_argument(
        "--trees",
        default=";".join(DEFAULT_TREES[platform]),
        help="with semicolons between",
    )
    parser.add_argument("--methods", help="with semicolons between; all if left out")
    parser.add_argument(
        "--again", action="store_true", help="compile what stands in the JSON too"
    )
    parser.add_argument(
        "--texts",
        type=pathlib.Path,
        help="a folder that keeps the programs, to count them again",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=measure.RESULTS / f"{platform}_model.json"
    )
    arguments = parser.parse_args()
    rows = (
        json.loads(arguments.out.read_text())["results"]
        if arguments.out.exists()
        else []
    )
    if reason := ahead_of_time.missing(platform):
        parser.error(reason)
    available = methods() | kernel_methods(implementation)
    chosen = arguments.methods.split(";") if arguments.methods else list(available)
    # Compile a small program first, so that what is loaded only once does not count in the compile time of another.
    warm_up = {"x": jax.ShapeDtypeStruct((256, 256), jnp.float32)}
    for chip in arguments.chips.split(","):
        ahead_of_time.compile_for(ahead_of_time.CHIPS[chip], optax_update, warm_up)
        for tree in arguments.trees.split(";"):
            for name in chosen:
                key = {"chip": chip, "tree": tree, "method": name}
                same = [row for row in rows if key.items() <= row.items()]
                if same and not arguments.again:
                    continue
                try:
                    row = model(
                        ahead_of_time.CHIPS[chip],
                        tree,
                        name,
                        available[name],
                        texts=arguments.texts,
                    )
                except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
                    row = {**key, "error": f"{type(error).__name__}: {error}"[:500]}
                row |= {"commit": measure.provenance()["commit"]}
                rows = [other for other in rows if other not in same] + [row]
                _write(arguments.out, platform, rows)
                print(json.dumps(row), flush=True)


def _place(row: dict[str, Any]) -> tuple[int, int, int]:
    """Where a row comes in the table: by chip, by tree, Optax first."""
    places = (
        list(ahead_of_time.CHIPS).index(row["chip"]),
        list(TREES).index(row["tree"]),
    )
    return (*places, not row["method"].startswith("Optax"))


def _write(path: pathlib.Path, platform: str, rows: list[dict[str, Any]]) -> None:
    device = "no device: compiled ahead of time, counted and modeled"
    content = {
        "provenance": {**measure.provenance(), "device": device},
        "question": f"what one update launches, moves and takes on a {platform.upper()}, by compiling and counting",
        "results": sorted(rows, key=_place),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
