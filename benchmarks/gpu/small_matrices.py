"""Count an update of many small matrices, such as heads and experts, on an H100: compiled ahead of time, not run.

    python -m benchmarks.gpu.small_matrices [--trees "heads, 7168 x 128"] [--again]

Needs `pip install "muonjax[cuda13]"` on Python 3.12; writes benchmarks/results/small_matrices.json.
"""

import argparse
import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
from optax.contrib import _muon as optax_muon

import muonjax
from benchmarks.common import ahead_of_time, hlo_launches, measure, roofline

# Shapes [matrices, fan_in, fan_out] of the leaves, and how many leaves there are of each.
TREES: dict[str, dict[tuple[int, int, int], int]] = {
    "heads, 7168 x 128": {(64, 7168, 128): 1},
    "heads, 512 x 128": {(64, 512, 128): 2},
    "heads of GPT-2-small": {(12, 768, 64): 36, (12, 64, 768): 12},
    "experts, 2048 x 768": {(128, 2048, 768): 1},
}
NUMBERS = muonjax.MuonDimensionNumbers(1, 2)


def _ours(settings: muonjax.NewtonSchulz) -> Any:
    tx = muonjax.orthogonalize(newton_schulz=settings, dimension_numbers=NUMBERS)
    return lambda tree: tx.update(tree, tx.init(tree))[0]


def _optax(tree: Any) -> Any:
    coefficients = jnp.asarray(muonjax.JORDAN[0])
    numbers = optax_muon.MuonDimensionNumbers(1, 2)
    one = optax_muon.orthogonalize_via_newton_schulz
    return jax.tree.map(lambda x: one(x, coefficients, dimension_numbers=numbers), tree)


METHODS = {
    "Optax, float32": (_optax, jnp.float32),
    "Optax, bfloat16": (_optax, jnp.bfloat16),
    "fast": (_ours(muonjax.NewtonSchulz.fast()), jnp.float32),
    "balanced": (_ours(muonjax.NewtonSchulz()), jnp.float32),
    'fast, "hopper"': (
        _ours(dataclasses.replace(muonjax.NewtonSchulz.fast(), implementation="hopper")),
        jnp.float32,
    ),
    'balanced, "hopper"': (_ours(muonjax.NewtonSchulz(implementation="hopper")), jnp.float32),
}


def count(tree: str, method: str) -> dict[str, Any]:
    """One row: what one update launches, moves and takes by the model."""
    update, dtype = METHODS[method]
    leaves = [shape for shape, number in TREES[tree].items() for _ in range(number)]
    arrays = {f"x{i:02}": jax.ShapeDtypeStruct(shape, dtype) for i, shape in enumerate(leaves)}
    compiled = ahead_of_time.compile_for(ahead_of_time.CHIPS["H100"], update, arrays)
    launches = hlo_launches.launches(compiled.text)
    return {
        "chip": "H100",
        "tree": tree,
        "method": method,
        "milliseconds": [seconds * 1e3 for seconds in roofline.total_seconds("H100", launches)],
        "launches": sum(launch.count for launch in launches),
        "gigabytes": sum(launch.count * launch.moved for launch in launches) / 1e9,
        "temporary_megabytes": compiled.temporary / 1e6,
        "compile_processor_seconds": compiled.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trees", default=";".join(TREES), help="with semicolons between")
    parser.add_argument("--methods", default=";".join(METHODS), help="with semicolons between")
    parser.add_argument("--again", action="store_true", help="compile what stands in the JSON too")
    arguments = parser.parse_args()
    path = measure.RESULTS / "small_matrices.json"
    rows = json.loads(path.read_text())["results"] if path.exists() else []
    for tree in arguments.trees.split(";"):
        for method in arguments.methods.split(";"):
            same = [row for row in rows if (row["tree"], row["method"]) == (tree, method)]
            if same and not arguments.again:
                continue
            rows = [row for row in rows if row not in same] + [count(tree, method)]
            print(json.dumps(rows[-1]), flush=True)
            device = "no device: compiled ahead of time, counted and modelled"
            content = {"provenance": {**measure.provenance(), "device": device}, "results": rows}
            path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
