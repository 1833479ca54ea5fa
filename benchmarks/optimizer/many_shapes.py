"""Orthogonalize the matrices of a convolutional network, which have many shapes: compile time, step and launches.

python -m benchmarks.optimizer.many_shapes                # on this machine's CPU
python -m benchmarks.optimizer.many_shapes --launches 1   # on an H100, which is compiled for and not run
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import muonjax
from benchmarks.common import ahead_of_time, measure
from benchmarks.common.hlo_launches import launches

WIDTHS = (64, 128, 256, 512)  # of a U-Net's levels


def shapes() -> dict[str, tuple[int, ...]]:
    """Kernels by name: on each level two blocks on the way down, one on the way up, which gets the channels of both."""
    found: dict[str, tuple[int, ...]] = {}
    for i, c in enumerate(WIDTHS):
        before = WIDTHS[max(i - 1, 0)]
        found |= {f"down{i}/first": (3, 3, before, c), f"down{i}/second": (3, 3, c, c)}
        found |= {f"down{i}/third": (3, 3, c, c), f"up{i}/second": (3, 3, c, c)}
        found |= {f"{way}{i}/time": (256, c) for way in ("down", "up")}
        found |= {f"up{i}/first": (3, 3, 2 * c, c), f"up{i}/shortcut": (2 * c, c)}
        found |= {f"{way}{i}/scale": (256, 2 * c) for way in ("down", "up")}
        if i:
            found |= {
                f"down{i}/shortcut": (before, c),
                f"up{i}/third": (3, 3, c + before, c),
            }
    found |= {
        "time/first": (64, 256),
        "time/second": (256, 256),
        "attention/qkv": (512, 1536),
    }
    return found | {"attention/out": (512, 512)}


def updates(
    most: int | None = None,
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, Callable[[Any], Any]]]:
    """The shapes of the gradients, all or the first few, and both orthogonalizations of them."""
    tree = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in [*shapes().items()][:most]
    }
    kernel, dense = (
        muonjax.MuonDimensionNumbers((0, 1, 2), 3),
        muonjax.MuonDimensionNumbers(),
    )
    numbers = {name: kernel if len(x.shape) == 4 else dense for name, x in tree.items()}

    def ours(grads: Any) -> Any:
        return muonjax.orthogonalize(dimension_numbers=numbers).update(
            grads, optax.EmptyState()
        )[0]

    def theirs(grads: Any) -> Any:
        tx = optax.contrib.scale_by_muon(
            weight_dimension_numbers=numbers, nesterov=False
        )
        return tx.update(grads, tx.init(grads))[0]

    return tree, {"optax": theirs, "balanced": ours}


def on_cpu(rounds: int) -> dict[str, Any]:
    tree, functions = updates()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    compiled = {}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            jax.clear_caches()
            start = time.process_time()
            compiled[name] = jax.jit(function).lower(tree).compile()
            seconds[name].append(time.process_time() - start)
    rng = np.random.default_rng(0)
    grads = {
        name: jnp.asarray(rng.standard_normal(x.shape), x.dtype)
        for name, x in tree.items()
    }
    steps = measure.interleave(
        {n: lambda f=f: f(grads) for n, f in compiled.items()}, rounds=4 * rounds
    )
    return {
        # The first round also fills caches of Python and of the compiler.
        "compile": {
            n: measure.summary(s[1:], seconds["optax"][1:]) for n, s in seconds.items()
        },
        "step": {n: measure.summary(s, steps["optax"]) for n, s in steps.items()},
    }


def on_an_h100() -> dict[str, int]:
    tree, functions = updates()
    chip = ahead_of_time.CHIPS["H100"]
    texts = {
        name: ahead_of_time.compile_for(chip, f, tree).text
        for name, f in functions.items()
    }
    return {
        name: sum(launch.count for launch in launches(text))
        for name, text in texts.items()
    }


def main() -> None:
    args = measure.options(__doc__, rounds=5, launches=0)
    known = measure.read("many_shapes")
    known.pop("provenance", None)
    found = {"launches": on_an_h100()} if args.launches else on_cpu(args.rounds)
    known |= {"leaves": len(shapes()), "shapes": len(set(shapes().values()))} | found
    measure.write("many_shapes", known)


if __name__ == "__main__":
    main()
