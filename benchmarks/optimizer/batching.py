"""Time the iteration on matrices of equal shape, in chunks of different sizes, and compile many of them.

Runs the default iteration on a stack of equal matrices, in chunks of 1 to 16, interleaved in one process; then traces
and compiles the orthogonalization of 96 equal leaves, ours and Optax's, in turn.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import muonjax
from benchmarks.common import measure
from benchmarks.optimizer import newton_schulz as methods
from muonjax import NewtonSchulz
from muonjax._common.platform import Policy, policy_of
from muonjax._matrices import batching

SHAPES = (
    (64, 64),
    (64, 256),
    (128, 128),
    (128, 512),
    (256, 256),
    (512, 512),
    (768, 768),
)
CHUNKS = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class FixedChunks(Policy):
    """A policy whose batches have one size."""

    size: int = 1

    def chunk_size(self, count, shape):
        return self.size


def chunked(size: int) -> Any:
    """A function of a stack of matrices that runs `size` of them at once."""

    def run(stack: jax.Array) -> jax.Array:
        return batching.map_groups(
            muonjax.newton_schulz,
            [stack],
            FixedChunks(policy_of(stack).platform, size=size),
        )[0]

    return run


def times(shape: tuple[int, int], count: int, rounds: int) -> dict[str, Any]:
    """Seconds by chunk, in units of one after the other."""
    x = jnp.asarray(
        np.random.default_rng(0).standard_normal((count, *shape)), jnp.float32
    )
    calls = {str(size): functools.partial(jax.jit(chunked(size)), x) for size in CHUNKS}
    seconds = measure.interleave(calls, rounds=rounds)
    rule = policy_of(x).chunk_size(count, shape)
    rows = {size: measure.summary(seconds[size], seconds["1"]) for size in calls}
    return {"shape": shape, "count": count, "rule": rule, "chunks": rows}


def theirs(updates: Any) -> Any:
    """As in Optax's Muon: one loop per leaf."""
    return jax.tree.map(methods.optax, updates)


def ours(settings: NewtonSchulz, updates: Any) -> Any:
    """muonjax's transformation, without momentum."""
    return muonjax.orthogonalize(newton_schulz=settings).update(
        updates, optax.EmptyState()
    )[0]


def compile_times(leaves: int, width: int, rounds: int) -> dict[str, Any]:
    """Seconds to trace and compile, in units of Optax's."""
    updates = {
        f"layer_{i}": jax.ShapeDtypeStruct((width, width), jnp.float32)
        for i in range(leaves)
    }
    functions = {
        "optax": theirs,
        "fast": functools.partial(ours, NewtonSchulz.fast()),
        "balanced": functools.partial(ours, NewtonSchulz.balanced()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            jax.clear_caches()
            start = time.perf_counter()
            jax.jit(function).lower(updates).compile()
            seconds[name].append(time.perf_counter() - start)
    # The first round also fills caches of Python and of the compiler.
    seconds = {name: values[1:] for name, values in seconds.items()}
    rows = {
        name: measure.summary(values, seconds["optax"])
        for name, values in seconds.items()
    }
    return {"leaves": leaves, "width": width, "optimizers": rows}


def main() -> None:
    args = measure.options(__doc__, rounds=15)
    shapes = [times(shape, 16, args.rounds) for shape in SHAPES]
    compiled = compile_times(96, 768, 7)
    ratios = [
        {"shape": row["shape"], "rule": row["rule"]}
        | {n: chunk["ratio"] for n, chunk in row["chunks"].items()}
        for row in shapes
    ]
    measure.write(
        "batching",
        {"shapes": shapes, "compile": compiled},
        ratios,
        compiled["optimizers"],
    )


if __name__ == "__main__":
    main()
