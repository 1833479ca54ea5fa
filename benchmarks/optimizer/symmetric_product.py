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
from pallas_kernels._platform_of import platform_of
from pallas_kernels._symmetric_product import _choose

SHAPES = [
    (256, 256),
    (512, 512),
    (768, 768),
    (1024, 1024),
    (2048, 2048),
    (512, 2048),
    (768, 3072),
    (1024, 4096),
]


def plain(x: jax.Array) -> jax.Array:
    return jnp.matmul(x, x.mT, precision="highest")


VARIANTS = {"plain": plain}
for name in ("reference", "blocked"):
    VARIANTS[name] = functools.partial(symmetric_product, implementation=name)


def main() -> None:
    rows = []
    for shape in SHAPES:
        x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
        row = {"shape": shape, "dtype": "float32", "rule": _choose(platform_of(x), x)}
        row["variants"] = measure.compare(VARIANTS, x, rounds=51)
        rows.append(row)
        print(row, flush=True)
    measure.write("symmetric_product", {"results": rows})


if __name__ == "__main__":
    main()
