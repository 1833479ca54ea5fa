"""Time how long it takes to trace and compile the orthogonalization of many leaves of equal shape, ours and Optax's."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import measure
from benchmarks.common.accelerator_model import PRESETS, optax_update, ours


def compile_times(leaves: int, width: int, rounds: int) -> dict[str, Any]:
    """Seconds to trace and compile, in units of Optax's."""
    leaf = jax.ShapeDtypeStruct((width, width), jnp.float32)
    tree = {f"layer_{i}": leaf for i in range(leaves)}
    functions = {"optax": optax_update}
    for name in ("fast", "balanced"):
        functions[name] = ours(PRESETS[name])
    calls = {name: (f, tree) for name, f in functions.items()}
    seconds = measure.compilations(calls, rounds=rounds)
    rows = {
        name: measure.summary(times, seconds["optax"])
        for name, times in seconds.items()
    }
    return {"leaves": leaves, "width": width, "optimizers": rows}


def main() -> None:
    args = measure.options(__doc__, leaves=96, width=768, rounds=7)
    compiled = compile_times(args.leaves, args.width, args.rounds)
    measure.write("batching", {"compile": compiled}, compiled["optimizers"])


if __name__ == "__main__":
    main()
