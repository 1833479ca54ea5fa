"""Time symmetric products in plain XLA.

    python -m benchmarks.optimizer.symmetric_product

For each shape and dtype: XLA's own X Xᵀ ("plain", the baseline) and the op's "reference" and "blocked", interleaved in
one process. Ratios are medians of each round's own ratio.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import measure
from pallas_kernels import _xla, symmetric_product
from pallas_kernels._api import _choose
from pallas_kernels._platform import platform_of

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
SHAPES += [(8, 512, 512), (8, 512, 2048), (8, 768, 768), (8, 1024, 1024)]


def plain(x):
    wide = _xla.accumulator(x.dtype)
    precision = _xla.precision(x.dtype)
    out = jnp.einsum(
        "...ik,...jk->...ij", x, x, precision=precision, preferred_element_type=wide
    )
    return out.astype(x.dtype)


VARIANTS = {
    "plain": plain,
    "reference": functools.partial(symmetric_product, implementation="reference"),
    "blocked": functools.partial(symmetric_product, implementation="blocked"),
}


def case(shape, dtype, budget):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
    compiled = {
        name: jax.jit(function).lower(x).compile()
        for name, function in VARIANTS.items()
    }
    calls = {
        name: functools.partial(function, x) for name, function in compiled.items()
    }
    start = time.perf_counter()
    measure.interleave(calls, rounds=1)
    rounds = int(np.clip(budget / (time.perf_counter() - start), 7, 101))
    seconds = measure.interleave(calls, rounds=rounds)
    rows = {
        name: {
            **measure.summary(times, seconds["plain"]),
            "temporary_bytes": compiled[name].memory_analysis().temp_size_in_bytes,
        }
        for name, times in seconds.items()
    }
    rule = _choose(platform_of(x), x)
    return {
        "shape": shape,
        "dtype": dtype,
        "rounds": rounds,
        "rule": rule,
        "variants": rows,
    }


def main():
    cases = [(shape, "float32") for shape in SHAPES]
    cases += [
        (shape, dtype)
        for shape in ((1024, 1024), (512, 2048))
        for dtype in ("bfloat16", "float64")
    ]
    results = []
    for shape, dtype in cases:
        with jax.enable_x64(dtype == "float64"):
            results.append(case(shape, dtype, budget=6.0))
        ratios = {name: v["ratio"] for name, v in results[-1]["variants"].items()}
        print(shape, dtype, ratios, flush=True)
    measure.write("symmetric_product", {"baseline": "plain", "results": results})


if __name__ == "__main__":
    main()
