"""Time symmetric products in plain XLA.

    python -m benchmarks.optimizer.symmetric_product

For each shape: XLA's own X Xᵀ ("plain", the baseline) and the op's "reference" and "blocked", interleaved in one
process. Ratios are medians of each round's own ratio.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import measure
from pallas_kernels import symmetric_product
from pallas_kernels._api import _choose
from pallas_kernels._platform import platform_of

SHAPES = [(256, 256), (512, 512), (768, 768), (1024, 1024), (2048, 2048)]
SHAPES += [(512, 2048), (768, 3072), (1024, 4096)]
SHAPES += [(8, 512, 512), (8, 512, 2048), (8, 768, 768), (8, 1024, 1024)]


def plain(x: jax.Array) -> jax.Array:
    return jnp.matmul(x, x.mT, precision="highest")


VARIANTS = {
    "plain": plain,
    "reference": functools.partial(symmetric_product, implementation="reference"),
    "blocked": functools.partial(symmetric_product, implementation="blocked"),
}


def main() -> None:
    args = measure.options(__doc__, rounds=51)
    results = []
    for shape in SHAPES:
        x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
        calls = {name: functools.partial(jax.jit(f), x) for name, f in VARIANTS.items()}
        seconds = measure.interleave(calls, rounds=args.rounds)
        rows = {
            name: measure.summary(times, seconds["plain"])
            for name, times in seconds.items()
        }
        row = {"shape": shape, "dtype": "float32", "rule": _choose(platform_of(x), x)}
        results.append(row | {"variants": rows})
        print(
            shape,
            {name: variant["ratio"] for name, variant in rows.items()},
            flush=True,
        )
    measure.write("symmetric_product", {"results": results})


if __name__ == "__main__":
    main()
