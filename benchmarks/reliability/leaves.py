"""Three steps of `muon` and of `optax.adamw` on trees with unusual leaves, and what comes of each.

python -m benchmarks.reliability.leaves
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import muonjax
from benchmarks.common import measure


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A dataclass of a user's."""

    kernel: jax.Array
    bias: jax.Array


def _kernel(dtype: str = "float32") -> jax.Array:
    return jnp.linspace(-1, 1, 64).reshape(8, 8).astype(dtype)


def _layer() -> dict[str, jax.Array]:
    return {"kernel": _kernel(), "bias": jnp.ones(8)}


# What stands in the tree beside an ordinary layer.
LEAVES: dict[str, Callable[[], Any]] = {
    "`None`": lambda: None,
    "`optax.MaskedNode`": optax.MaskedNode,
    "bfloat16": lambda: {"kernel": _kernel("bfloat16")},
    "float16": lambda: {"kernel": _kernel("float16")},
    "complex64": lambda: {"kernel": _kernel("complex64")},
    "float8": lambda: {"kernel": _kernel("float8_e4m3fn")},
    "int8": lambda: {"kernel": _kernel("int8")},
    "int4": lambda: {"kernel": _kernel("int4")},
    "bool": lambda: {"mask": jnp.ones((8, 8), bool)},
    "a random key": lambda: {"rng": jax.random.key(0)},
    "a Python scalar": lambda: {"scale": 1.0},
    "an empty tree": dict,
    "an array of size 0": lambda: {"kernel": jnp.zeros((0, 8))},
    "names with a slash": lambda: {"a/b": _layer(), "a": {"b": _layer()}},
    "whole numbers as keys": lambda: {0: _layer(), 1: _layer()},
    "a dataclass": lambda: Layer(_kernel(), jnp.ones(8)),
    "an Equinox module": lambda: eqx.filter(eqx.nn.Linear(8, 8, key=jax.random.key(0)), eqx.is_array),
    "`nnx.State` with other variables": lambda: nnx.state(nnx.BatchNorm(8, rngs=nnx.Rngs(0))),
}


def _gradient(p: Any) -> Any:
    """Of the shape and dtype that `jax.grad(allow_int=True)` gives."""
    dtype = getattr(p, "dtype", jnp.result_type(p))
    return jnp.asarray(p) if jnp.issubdtype(dtype, jnp.inexact) else np.zeros(p.shape, jax.dtypes.float0)


def three_steps(tx: optax.GradientTransformation, params: Any) -> str:
    """ "works", or the error."""
    try:
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(jax.tree.map(_gradient, params), state, params)
            params = optax.apply_updates(params, updates)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"[:250]
    return "works"


def main() -> None:
    optimizers = {"muonjax": muonjax.muon(1e-3), "adamw": optax.adamw(1e-3)}
    rows = []
    for leaf, make in LEAVES.items():
        params = {"dense": _layer(), "other": make()}
        rows.append({"leaf": leaf} | {name: three_steps(tx, params) for name, tx in optimizers.items()})
    measure.write("leaves", {"leaves": rows}, rows)


if __name__ == "__main__":
    main()
