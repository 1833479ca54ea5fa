"""Orthogonalize the matrices of a convolutional network, which have many shapes: compile time and step on a CPU."""

import functools
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


def updates() -> tuple[
    dict[str, jax.ShapeDtypeStruct], dict[str, Callable[[Any], Any]]
]:
    """The shapes of the gradients, and both orthogonalizations of them."""
    tree = {}
    numbers = {}
    for name, shape in shapes().items():
        tree[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
        # A convolution's output channels are the columns of its matrix, all other axes the rows.
        rows = tuple(range(len(shape) - 1))
        numbers[name] = muonjax.MuonDimensionNumbers(rows, len(shape) - 1)
    transformations = {
        "optax": optax.contrib.scale_by_muon(
            weight_dimension_numbers=numbers, nesterov=False
        ),
        "balanced": muonjax.orthogonalize(dimension_numbers=numbers),
    }

    def update(tx: optax.GradientTransformation, grads: Any) -> Any:
        return tx.update(grads, tx.init(grads))[0]

    functions = {}
    for name, tx in transformations.items():
        functions[name] = functools.partial(update, tx)
    return tree, functions


def main() -> None:
    tree, functions = updates()
    rng = np.random.default_rng(0)
    grads = {}
    for name, leaf in tree.items():
        grads[name] = jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)
    content = {
        "leaves": len(tree),
        "shapes": len(set(shapes().values())),
        "compile": measure.compare_compilation(functions, tree),
        "step": measure.compare(functions, grads, rounds=20),
    }
    measure.write("many_shapes", content)


if __name__ == "__main__":
    main()
