"""Check this device: accuracy, kernels, compile time and speed, with a verdict.

    python -m muonjax [--quick]

It takes one to three minutes. The exit status is 1 if any result is not finite, or off by more than
is stated. Polar factors and symmetric products are compared with float64. Times are those of an
optimizer's compilation and of a step, and in parentheses in units of Optax's step.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muonjax import MuonDimensionNumbers, NewtonSchulz, muon, newton_schulz
from pallas_kernels import symmetric_product
from pallas_kernels._symmetric_product import IMPLEMENTATIONS

# The presets, and the polar error of the matrix in `polar_error` that they stay below on every
# platform.
PRESETS = {
    "fast": (NewtonSchulz.fast(), 0.5),
    "balanced": (NewtonSchulz.balanced(), 0.4),
    "accurate": (NewtonSchulz.accurate(), 0.01),
}

# A line for the user, and whether the result is right
Check = tuple[str, bool]


def checks(quick: bool) -> Iterator[Check]:
    """Everything that is checked, in the order in which it is printed."""
    for preset in PRESETS:
        yield polar_error(preset, 128 if quick else 768)
    for implementation in IMPLEMENTATIONS:
        for dtype in ("float32", "bfloat16"):
            yield product_error(implementation, dtype, 64 if quick else 256)
    yield from times(quick)


def polar_error(preset: str, m: int) -> Check:
    """The polar error |Y - U V^T|_F / sqrt(m) of a preset's result Y for X = U S V^T [m, 2 m].

    It is right if it is at most the bound in `PRESETS`. The singular values, from 1 down to 1/1000
    in equal ratios, are about as spread as those of momentum.
    """
    settings, stated = PRESETS[preset]
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.standard_normal((m, m)))
    v, _ = np.linalg.qr(rng.standard_normal((2 * m, m)))
    x = jnp.asarray((u * np.geomspace(1, 1e-3, m)) @ v.T, jnp.float32)
    y = jax.jit(lambda x: newton_schulz(x, settings))(x)
    error = np.linalg.norm(np.asarray(y, np.float64) - u @ v.T) / m**0.5
    return _compared(f"{preset}, {m} x {2 * m}, polar error", error, stated)


def product_error(name: str, dtype: str, m: int) -> Check:
    """alpha X X^T + beta C by one implementation, for X [2, m, m + 64]: a line with its error, and
    whether that is small enough; or with the reason why it can't run here, which is right too."""
    x = np.random.default_rng(1).standard_normal((2, m, m + 64))
    x = jnp.asarray(x, dtype)
    # C has to be symmetric, as X X^T is.
    c = symmetric_product(x, implementation="reference")
    what = f"{name!r}, {dtype}"
    try:
        s = symmetric_product(x, c=c, alpha=1.5, beta=-0.5, implementation=name)
    except NotImplementedError as reason:
        return f"{what}: {reason}", True
    except Exception as error:
        # A kernel that does not compile is what this is to find.
        return f"{what}: {type(error).__name__}: {error}"[:300], False
    # The exact product is that of x and c as rounded to the dtype: only the error of s counts.
    x, c, s = (np.asarray(array, np.float64) for array in (x, c, s))
    exact = 1.5 * x @ x.mT - 0.5 * c
    error = np.linalg.norm(s - exact) / np.linalg.norm(exact)
    # The dtype's own eps, but at least 16 of float32's: a float32 product in TF32 is off by more.
    stated = max(float(jnp.finfo(dtype).eps), 16 * float(jnp.finfo(jnp.float32).eps))
    return _compared(what, error, stated)


def _compared(what: str, error: np.floating, stated: float) -> Check:
    """The line of a result, which is right if its error is at most what is stated;
    NaN is not right."""
    return f"{what}: {error:.2g} (at most {stated:.2g})", bool(error <= stated)


def times(quick: bool) -> Iterator[Check]:
    """How long an update of GPT-2-small's matrices takes to compile and to run, a line for Optax's
    Muon and one for each preset; a line is right if the updates are finite."""
    width = 64 if quick else 768
    # One layer on a CPU, on which a step of all twelve takes seconds
    layers = 1 if quick or jax.default_backend() == "cpu" else 12
    # Query, key, value and output; up and down
    shapes = 4 * [(width, width)] + [(width, 4 * width), (4 * width, width)]
    draw = np.random.default_rng(2).standard_normal
    params = [jnp.asarray(draw(shape), jnp.float32) for shape in layers * shapes]
    methods = {"Optax": optax.contrib.muon(1e-3)}
    # A preset's bound of the polar error is not needed here.
    for name, (settings, _) in PRESETS.items():
        # One entry for the whole tree: every leaf is a matrix. Names would give some to AdamW.
        methods[name] = muon(1e-3, MuonDimensionNumbers(), newton_schulz=settings)

    print(f"An update of {layers} of 12 layers of width {width}, float32:")
    step_of_optax = None
    for name, method in methods.items():
        state = jax.jit(method.init)(params)
        start = time.perf_counter()
        # The parameters serve as gradients too: only times are measured.
        step = jax.jit(method.update).lower(params, state, params).compile()
        compilation = time.perf_counter() - start
        # The first run, whose time does not count, gives the updates.
        updates, _ = jax.block_until_ready(step(params, state, params))
        seconds = []
        for _ in range(3 if quick else 10):
            start = time.perf_counter()
            jax.block_until_ready(step(params, state, params))
            seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds)
        # The first method is Optax's, and the unit of all others.
        step_of_optax = step_of_optax or median
        line = (
            f"{name}: compiles in {compilation:.1f} s, a step takes {1e3 * median:.1f} ms "
            f"({median / step_of_optax:.2f})"
        )
        yield line, bool(jnp.isfinite(optax.tree.norm(updates)))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: prints the device, versions and a line for each check; returns the exit
    status, 1 if a check failed."""
    parser = argparse.ArgumentParser("python -m muonjax", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small matrices, whose times mean nothing"
    )
    quick = parser.parse_args(arguments).quick
    packages = ("muonjax", "jax", "jaxlib", "optax", "flax")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    print(f"{jax.devices()[0].device_kind} ({jax.default_backend()}); {versions}")

    num_wrong = 0
    # A check is made when the loop asks for it, and takes seconds: `flush` shows its line at once.
    for line, is_right in checks(quick):
        print(line if is_right else f"WRONG: {line}", flush=True)
        num_wrong += not is_right
    if num_wrong:
        print(f"{num_wrong} checks FAILED: please open an issue with these lines.")
        return 1
    print("Everything is right.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
