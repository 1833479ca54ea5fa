"""Measure accuracy, memory and time of gradients through msign.

Accuracy against an SVD in float64, also for truncated schedules and rank-deficient input; temporary memory from the
compiler; time interleaved with plain automatic differentiation of the same steps.

    python -m benchmarks.msign.derivatives                   # all but half precision, a few minutes on two cores
    python -m benchmarks.msign.derivatives memory time       # parts
    python -m benchmarks.msign.derivatives half_precision    # a file of its own
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import measure
from muonjax import msign, polar_express
from muonjax._msign.inputs import CONVERGED
from tests.msign import oracles as msign_oracles
from tests.tools import oracles

ROWS = polar_express(8)
MODES = ("autodiff", "polynomial", "polar")


def unrolled(x):
    """The baseline: eight unrolled steps under automatic differentiation."""
    x = x / jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True))
    for a, b, c in ROWS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


VARIANTS = {
    "plain autodiff, unrolled": unrolled,
    **{
        f"msign, {mode}": functools.partial(msign, coefficients=ROWS, gradient=mode)
        for mode in MODES
    },
}


def value_and_vjp(f):
    def run(x, cotangent):
        y, back = jax.vjp(f, x)
        return y, back(cotangent)[0]

    return run


def gradient(x, c, dtype, **settings):
    """x and c rounded to dtype, and the gradient there, so that the rounding of the input is no error of the method."""
    with jax.enable_x64(dtype == "float64"):
        x, c = jnp.asarray(x, dtype), jnp.asarray(c, dtype)
        g = jax.jit(value_and_vjp(functools.partial(msign, **settings)))(x, c)[1]
        return tuple(np.asarray(v, np.float64) for v in (x, c, g))


def half_an_ulp(x):
    """The change of the polar factor if each entry of float32 x changes by up to half a unit in its last place."""
    moved = np.asarray(x, np.float64)
    moved = moved + np.random.default_rng(1).uniform(-0.5, 0.5, x.shape) * np.spacing(
        np.abs(np.asarray(x))
    )
    u, _, vt = np.linalg.svd(moved, full_matrices=False)
    return oracles.polar_error(u @ vt, np.asarray(x, np.float64))


def accuracy():
    """Relative error against the derivative by SVD of the polynomial, or of the polar factor."""
    rows = []
    rng = np.random.default_rng(0)
    for m, n in ((128, 128), (128, 512), (512, 128)):
        for condition in (1e2, 1e3):
            x = oracles.with_spectrum(
                np.geomspace(1, 1 / condition, min(m, n)), max(m, n), tall=m > n
            )
            c = rng.standard_normal((m, n))
            row = {"shape": f"{m}x{n}", "condition": condition}
            for mode, truth in (("polynomial", CONVERGED), ("polar", None)):
                for dtype in ("float64", "float32", "bfloat16"):
                    *low, g = gradient(x, c, dtype, gradient=mode)
                    expected = msign_oracles.svd_derivative(*low, truth)
                    row[f"{mode}, {dtype}"] = msign_oracles.relative(g, expected)
            exact = msign_oracles.svd_derivative(x, c)
            row["article, float64"] = msign_oracles.relative(
                msign_oracles.article_vjp(x, c), exact
            )
            single = jnp.asarray(x, jnp.float32)
            u, _, vt = jnp.linalg.svd(single, full_matrices=False)
            row["value, float32"] = oracles.polar_error(
                msign(single), np.asarray(single, np.float64)
            )
            row["value, float32 SVD"] = oracles.polar_error(
                np.asarray(u, np.float64) @ np.asarray(vt, np.float64),
                np.asarray(single, np.float64),
            )
            row["value, half an ulp of x"] = half_an_ulp(single)
            rows.append(row)
    return rows


def half_precision():
    """bfloat16: relative error of each gradient, where singular values are equal and where they are spread."""
    rows = []
    for m, n in ((128, 128), (128, 512)):
        c = np.random.default_rng(0).standard_normal((m, n))
        for condition in (1.0, 1.5, 3.0, 10.0, 1e2):
            x = oracles.with_spectrum(np.geomspace(1, 1 / condition, m), n)
            row = {"shape": f"{m}x{n}", "condition": condition}
            for name, settings, truth in (
                ("polynomial", {}, CONVERGED),
                (
                    "polynomial, 5 steps",
                    {"coefficients": polar_express(5)},
                    polar_express(5),
                ),
                ("polar", {"gradient": "polar"}, None),
            ):
                *low, g = gradient(x, c, "bfloat16", **settings)
                row[name] = msign_oracles.relative(
                    g, msign_oracles.svd_derivative(*low, truth)
                )
            rows.append(row)
    return rows


def truncated():
    """Five steps: distance of each derivative from that of the exact polar factor."""
    rows = []
    c = np.random.default_rng(0).standard_normal((128, 512))
    for condition in (3.0, 1e2):
        x = oracles.with_spectrum(np.geomspace(1, 1 / condition, 128), 512)
        exact = msign_oracles.svd_derivative(x, c)
        row = {"condition": condition}
        for name, settings in (
            ("polynomial", {"gradient": "polynomial"}),
            ("polar", {"gradient": "polar"}),
            ("polar, polish=3", {"gradient": "polar", "polish": 3}),
        ):
            row[name] = msign_oracles.relative(
                gradient(x, c, "float64", coefficients=polar_express(5), **settings)[2],
                exact,
            )
        rows.append(row)
    return rows


def deficient():
    """Rank 64 of 128: error of the polynomial's derivative against the same by SVD, and the size of its gradient."""
    c = np.random.default_rng(0).standard_normal((128, 128))
    x = oracles.with_spectrum(np.r_[np.linspace(1, 0.3, 64), np.zeros(64)], 128)
    rows = []
    for steps in (3, 5, 8):
        table = polar_express(steps)
        expected = msign_oracles.svd_derivative(x, c, table)
        row = {
            "steps": steps,
            "slope at zero": float(np.prod([a for a, _, _ in table])),
        }
        for dtype in ("float64", "float32"):
            *low, g = gradient(x, c, dtype, coefficients=table)
            row[f"polynomial, {dtype}"] = msign_oracles.relative(
                g,
                msign_oracles.svd_derivative(*low, table)
                if dtype == "float32"
                else expected,
            )
        row["gradient's size"] = float(
            np.linalg.norm(expected) * np.linalg.norm(x) / np.linalg.norm(c)
        )
        rows.append(row)
    return rows


def temporary(f, *arguments):
    return jax.jit(f).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def memory():
    rows = []
    for m, n in ((512, 512), (512, 2048)):
        x = jax.ShapeDtypeStruct((8, m, n), jnp.float32)
        unit = 8 * m * n * 4
        rows.append(
            {"case": f"8 x {m}x{n}, in units of x"}
            | {
                name: temporary(value_and_vjp(f), x, x) / unit
                for name, f in VARIANTS.items()
            }
        )
    n = 256

    def network(f):
        def loss(weights, x):
            for w in weights:
                x = jnp.tanh(f(w) @ x)
            return jnp.sum(x**2)

        return jax.grad(loss)

    weights = [jax.ShapeDtypeStruct((n, n), jnp.float32)] * 8
    x = jax.ShapeDtypeStruct((n, 16), jnp.float32)
    rows.append(
        {"case": "8 layers of 256x256 unrolled, in units of one"}
        | {
            name: temporary(network(f), weights, x) / (n * n * 4)
            for name, f in VARIANTS.items()
        }
    )
    return rows


def times(batch=8, rounds=9):
    rows = []
    for m, n in ((512, 512), (512, 2048)):
        x, c = (
            np.random.default_rng(0)
            .standard_normal((2, batch, m, n))
            .astype(np.float32)
        )
        compiled = {
            name: jax.jit(value_and_vjp(f)).lower(x, c).compile()
            for name, f in VARIANTS.items()
        }
        seconds = measure.interleave(
            {name: functools.partial(run, x, c) for name, run in compiled.items()},
            rounds=rounds,
        )
        baseline = seconds["plain autodiff, unrolled"]
        for name, measured in seconds.items():
            rows.append(
                {"case": f"{batch} x {m}x{n}", "variant": name}
                | measure.summary(measured, baseline)
            )
    return rows


PARTS = {
    "accuracy": accuracy,
    "truncated": truncated,
    "deficient": deficient,
    "memory": memory,
    "time": times,
}

if __name__ == "__main__":
    if sys.argv[1:] == ["half_precision"]:
        rows = half_precision()
        measure.write("msign_half_precision", {"rows": rows}, rows)
    else:
        measure.run_parts(__doc__, "msign", PARTS)
