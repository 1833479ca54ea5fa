"""Measure accuracy and memory of gradients through msign.

Accuracy against an SVD in float64, also for truncated schedules; temporary memory from the compiler.

    python -m benchmarks.msign.derivatives           # all, a few minutes on two cores
    python -m benchmarks.msign.derivatives memory    # a part
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import measure
from muonjax import msign, polar_express
from muonjax._msign.inputs import CONVERGED
from tests.msign import oracles as msign_oracles
from tests.tools import oracles

ROWS = polar_express(8)


def unrolled(x: jax.Array) -> jax.Array:
    """The baseline: eight unrolled steps under automatic differentiation."""
    x = x / jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True))
    for a, b, c in ROWS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


VARIANTS: dict[str, Callable[..., Any]] = {"plain autodiff, unrolled": unrolled}
for mode in ("autodiff", "polynomial", "polar"):
    VARIANTS[f"msign, {mode}"] = functools.partial(
        msign, coefficients=ROWS, gradient=mode
    )


def value_and_vjp(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, pullback = jax.vjp(f, x)
        return y, pullback(cotangent)[0]

    return run


def gradient(x: Any, c: Any, dtype: str, **settings: Any) -> tuple[np.ndarray, ...]:
    """x and c rounded to dtype, and the gradient there, so that the rounding of the input is no error of the method."""
    with jax.enable_x64(dtype == "float64"):
        x, c = jnp.asarray(x, dtype), jnp.asarray(c, dtype)
        g = jax.jit(value_and_vjp(functools.partial(msign, **settings)))(x, c)[1]
        return tuple(np.asarray(v, np.float64) for v in (x, c, g))


def values(x: np.ndarray) -> dict[str, float]:
    """Polar errors in float32, and how far the factor moves if each entry does by up to half of its last digit."""
    single = x.astype(np.float32)
    exact = single.astype(np.float64)
    u, _, vt = map(np.asarray, jnp.linalg.svd(single, full_matrices=False))
    half_digits = np.random.default_rng(1).uniform(-0.5, 0.5, x.shape) * np.spacing(
        np.abs(single)
    )
    moved = oracles.polar(exact + half_digits)
    return {
        "value, float32": oracles.polar_error(msign(jnp.asarray(single)), exact),
        "value, float32 SVD": oracles.polar_error(u.astype(np.float64) @ vt, exact),
        "value, half an ulp of x": oracles.polar_error(moved, exact),
    }


def accuracy() -> list[dict[str, Any]]:
    """Relative error against the derivative by SVD of the polynomial, or of the polar factor."""
    rows = []
    rng = np.random.default_rng(0)
    for m, n in ((128, 128), (128, 512), (512, 128)):
        for condition in (1e2, 1e3):
            s = np.geomspace(1, 1 / condition, min(m, n))
            x = oracles.with_spectrum(s, max(m, n), tall=m > n)
            c = rng.standard_normal((m, n))
            row = {"shape": f"{m}x{n}", "condition": condition}
            for mode, truth in (("polynomial", CONVERGED), ("polar", None)):
                for dtype in ("float64", "float32", "bfloat16"):
                    *rounded, g = gradient(x, c, dtype, gradient=mode)
                    expected = msign_oracles.svd_derivative(*rounded, truth)
                    row[f"{mode}, {dtype}"] = msign_oracles.relative(g, expected)
            exact = msign_oracles.svd_derivative(x, c)
            row["article, float64"] = msign_oracles.relative(
                msign_oracles.article_vjp(x, c), exact
            )
            rows.append(row | values(x))
    return rows


def truncated() -> list[dict[str, Any]]:
    """Five steps: distance of each derivative from that of the exact polar factor."""
    rows = []
    c = np.random.default_rng(0).standard_normal((128, 512))
    settings = {
        "polynomial": {"gradient": "polynomial"},
        "polar": {"gradient": "polar"},
        "polar, polish=3": {"gradient": "polar", "polish": 3},
    }
    for condition in (3.0, 1e2):
        x = oracles.with_spectrum(np.geomspace(1, 1 / condition, 128), 512)
        exact = msign_oracles.svd_derivative(x, c)
        row = {"condition": condition}
        for name, given in settings.items():
            g = gradient(x, c, "float64", coefficients=polar_express(5), **given)[2]
            row[name] = msign_oracles.relative(g, exact)
        rows.append(row)
    return rows


def temporary(f: Callable[..., Any], *arguments: Any) -> int:
    return jax.jit(f).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def memory() -> list[dict[str, Any]]:
    """Temporary memory of value and gradient: of stacks, and of a network whose layers each have one matrix."""
    rows: list[dict[str, Any]] = []
    for m, n in ((512, 512), (512, 2048)):
        x = jax.ShapeDtypeStruct((8, m, n), jnp.float32)
        row: dict[str, Any] = {"case": f"8 x {m}x{n}, in units of x"}
        for name, f in VARIANTS.items():
            row[name] = temporary(value_and_vjp(f), x, x) / (8 * m * n * 4)
        rows.append(row)
    n = 256
    weights = [jax.ShapeDtypeStruct((n, n), jnp.float32)] * 8
    x = jax.ShapeDtypeStruct((n, 16), jnp.float32)
    row = {"case": "8 layers of 256x256 unrolled, in units of one"}
    for name, f in VARIANTS.items():

        def loss(weights: Any, x: jax.Array, f: Callable[..., Any] = f) -> jax.Array:
            for w in weights:
                x = jnp.tanh(f(w) @ x)
            return jnp.sum(x**2)

        row[name] = temporary(jax.grad(loss), weights, x) / (n * n * 4)
    return [*rows, row]


if __name__ == "__main__":
    parts = {"accuracy": accuracy, "truncated": truncated, "memory": memory}
    measure.run_parts(__doc__, "msign", parts)
