"""Orthogonalize the matrices of a convolutional network, which have many shapes: compile time and step on a CPU."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import muonjax
from benchmarks.common import measure

WIDTHS = (64, 128, 256, 512)  # of a U-Net's levels


def shapes() -> dict[str, tuple[int, ...]]:
    """Kernels by name: on each level two blocks on the way down, one on the way up, which gets the channels of both."""
    kernels: dict[str, tuple[int, ...]] = {
        "time/first": (64, 256),
        "time/second": (256, 256),
        "attention/qkv": (512, 1536),
        "attention/out": (512, 512),
    }
    for i, c in enumerate(WIDTHS):
        before = WIDTHS[max(i - 1, 0)]
        kernels |= {
            f"down{i}/first": (3, 3, before, c),
            f"down{i}/second": (3, 3, c, c),
            f"down{i}/third": (3, 3, c, c),
            f"down{i}/time": (256, c),
            f"down{i}/scale": (256, 2 * c),
            f"up{i}/first": (3, 3, 2 * c, c),
            f"up{i}/second": (3, 3, c, c),
            f"up{i}/shortcut": (2 * c, c),
            f"up{i}/time": (256, c),
            f"up{i}/scale": (256, 2 * c),
        }
        if i:
            kernels[f"down{i}/shortcut"] = (before, c)
            kernels[f"up{i}/third"] = (3, 3, c + before, c)
    return kernels


def updates(
    most: int | None = None,
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, Callable[[Any], Any]]]:
    """The shapes of the gradients, all or the first few, and both orthogonalizations of them."""
    kernel, dense = (
        muonjax.MuonDimensionNumbers((0, 1, 2), 3),
        muonjax.MuonDimensionNumbers(),
    )
    tree, numbers = {}, {}
    for name, shape in list(shapes().items())[:most]:
        tree[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
        numbers[name] = kernel if len(shape) == 4 else dense
    ours = muonjax.orthogonalize(dimension_numbers=numbers)
    theirs = optax.contrib.scale_by_muon(
        weight_dimension_numbers=numbers, nesterov=False
    )

    def update(tx: optax.GradientTransformation, grads: Any) -> Any:
        return tx.update(grads, tx.init(grads))[0]

    both = {"optax": theirs, "balanced": ours}
    return tree, {name: functools.partial(update, tx) for name, tx in both.items()}


def main() -> None:
    args = measure.options(__doc__, rounds=5)
    tree, functions = updates()
    rng = np.random.default_rng(0)
    grads = {
        name: jnp.asarray(rng.standard_normal(x.shape), x.dtype)
        for name, x in tree.items()
    }
    calls = {name: (f, tree) for name, f in functions.items()}
    seconds = measure.compilations(calls, rounds=args.rounds, clock=time.process_time)
    steps = {n: functools.partial(jax.jit(f), grads) for n, f in functions.items()}
    content: dict[str, Any] = {
        "leaves": len(tree),
        "shapes": len(set(shapes().values())),
    }
    for what, times in (
        ("compile", seconds),
        ("step", measure.interleave(steps, rounds=4 * args.rounds)),
    ):
        content[what] = {
            n: measure.summary(s, times["optax"]) for n, s in times.items()
        }
    measure.write("many_shapes", content)


if __name__ == "__main__":
    main()
