"""Measure the memory that gradients of LoHa adapters need.

24 layers of 1024 × 1024 with rank-16 adapters, float32, x ← tanh(x · (W + ΔW)): temporary memory from the
compiler, for layers under `lax.scan` and unrolled layers.

    python -m benchmarks.adapters.hadamard    # with JAX 0.12 or later: an older CPU compiler drops barriers
"""

import jax
import jax.numpy as jnp

from benchmarks.common import measure
from muonjax import hadamard_linear

LAYERS, WIDTH, RANK = 24, 1024, 16
TOKENS = (64, 1024, 4096)
MIB = 2**20


def plain(x, w, a, b, c, d):
    return x @ (w + (a @ b) * (c @ d))


VARIANTS = {
    "plain": plain,
    "jax.checkpoint": jax.checkpoint(plain),
    "hadamard_linear": hadamard_linear,
}


def gradient(linear, layout):
    """The gradient with respect to the adapters, of a loop over stacked layers or of a list of layers."""

    def scanned(adapters, kernels, x):
        x, _ = jax.lax.scan(
            lambda x, layer: (jnp.tanh(linear(x, *layer)), None),
            x,
            (kernels, *adapters),
        )
        return jnp.mean(x**2)

    def unrolled(adapters, kernels, x):
        for w, *factors in zip(kernels, *adapters, strict=True):
            x = jnp.tanh(linear(x, w, *factors))
        return jnp.mean(x**2)

    return jax.grad(scanned if layout == "scan" else unrolled)


def layers(layout, *shape):
    """The shape of a parameter of every layer: a stack, or a list."""
    if layout == "scan":
        return jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32)
    return [jax.ShapeDtypeStruct(shape, jnp.float32)] * LAYERS


def memory():
    rows = []
    for layout in ("scan", "unrolled"):
        adapters = [
            layers(layout, *shape) for shape in [(WIDTH, RANK), (RANK, WIDTH)] * 2
        ]
        for tokens in TOKENS:
            row = {"layers": layout, "tokens": tokens}
            x = jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32)
            for name, linear in VARIANTS.items():
                lowered = jax.jit(gradient(linear, layout)).lower(
                    adapters, layers(layout, WIDTH, WIDTH), x
                )
                row[name] = lowered.compile().memory_analysis().temp_size_in_bytes / MIB
            rows.append(row)
            print(row, flush=True)
    return rows


if __name__ == "__main__":
    measure.run_parts(__doc__, "hadamard", {"memory": memory})
