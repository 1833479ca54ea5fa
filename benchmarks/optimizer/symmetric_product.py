"""Time symmetric products in plain XLA.

    python -m benchmarks.optimizer.symmetric_product [--quick]

For each shape and dtype: XLA's own X Xᵀ ("plain", the baseline), the op's "reference" and "blocked", and
"blocked" with other numbers of rows, interleaved in one process. Ratios are medians of each round's own ratio.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import measure
from pallas_kernels import _blocked, _reference, symmetric_product
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
    (8, 512, 512),
    (8, 512, 2048),
    (8, 768, 768),
    (8, 1024, 1024),
]


def plain(x):
    wide = _reference.accumulator(x.dtype)
    precision = _reference.precision(x.dtype)
    out = jnp.einsum("...ik,...jk->...ij", x, x, precision=precision, preferred_element_type=wide)
    return out.astype(x.dtype)


def blocked(x, rows):
    one, zero = jnp.float32(1), jnp.float32(0)
    return _blocked.symmetric_product(x, None, None, one, zero, platform=platform_of(x), rows=rows)


def variants(shape):
    yield "plain", plain
    yield "reference", functools.partial(symmetric_product, implementation="reference")
    yield "blocked", functools.partial(symmetric_product, implementation="blocked")
    for rows in (2, 3, 6, 8):
        if shape[-2] // rows >= _blocked.SMALLEST:
            yield f"{rows} rows", functools.partial(blocked, rows=rows)


def case(shape, dtype, budget):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
    compiled = {name: jax.jit(function).lower(x).compile() for name, function in variants(shape)}
    calls = {name: functools.partial(function, x) for name, function in compiled.items()}
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
    rule = _choose(platform_of(x), shape)
    return {"shape": shape, "dtype": dtype, "rounds": rounds, "rule": rule, "variants": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="one small shape, a second or two, nothing written"
    )
    quick = parser.parse_args().quick
    cases = [(shape, "float32") for shape in SHAPES]
    cases += [(shape, dtype) for shape in ((1024, 1024), (512, 2048)) for dtype in ("bfloat16", "float64")]
    results = []
    for shape, dtype in cases[:1] if quick else cases:
        with jax.enable_x64(dtype == "float64"):
            row = case(shape, dtype, 0.2 if quick else 6.0)
        results.append(row)
        ratios = "  ".join(
            f"{name} {v['ratio']:.2f}" for name, v in row["variants"].items() if name != "plain"
        )
        seconds = row["variants"]["plain"]["seconds"]
        print(f"{shape!s:18} {dtype:9} plain {seconds * 1e3:8.2f} ms   {ratios}", flush=True)
    if not quick:
        print(measure.write("symmetric_product", {"baseline": "plain", "results": results}))


if __name__ == "__main__":
    main()
