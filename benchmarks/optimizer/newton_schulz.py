"""Measure polar error and time of each Newton–Schulz method.

Errors are measured on matrices with the recorded singular values of a transformer's momentum (`momentum.py`)
and random singular vectors, at the width at which they were recorded; times at 768 rows, against Optax's function in
the same process. Three shapes: square, 1:4 and 1:16. Published schedules are settings, so that all run on the same
products.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import muonjax
from benchmarks.common import measure, momentum
from benchmarks.common.accelerator_model import PRESETS, optax_matrix
from muonjax import NewtonSchulz, newton_schulz, polar_express

WIDTH = 768
ASPECTS = (1, 4, 16)

as_published = functools.partial(
    NewtonSchulz, deflation=0, normalization="frobenius", form="standard"
)
SETTINGS = {
    "fast": PRESETS["fast"],
    "balanced": PRESETS["balanced"],
    "accurate": NewtonSchulz.accurate(),
    # What deflation gains, and what another step does.
    "5 steps": NewtonSchulz(coefficients=polar_express(5), deflation=0),
    "6 steps": NewtonSchulz(coefficients=polar_express(6), deflation=0),
    "You, 5 steps": as_published(coefficients=muonjax.YOU),
    "DeepSeek-V4, 10 steps": as_published(
        coefficients=8 * muonjax.JORDAN + 2 * ((2.0, -1.5, 0.5),)
    ),
}


def methods() -> dict[str, Any]:
    """Functions of one matrix, by name; Optax's is the one that its Muon calls."""
    functions: dict[str, Any] = {"optax": optax_matrix}
    for name, settings in SETTINGS.items():
        functions[name] = functools.partial(newton_schulz, settings=settings)
    return functions


def recorded_errors(method: Any, aspect: int) -> dict[str, float]:
    """Polar error and cosine over all recorded spectra."""
    m = len(momentum.spectra()[0])
    matrices, polars = momentum.recorded(m, aspect * m, every=1)
    run = jax.jit(method)
    errors = momentum.errors([run(jnp.asarray(x)) for x in matrices], polars)
    return {"polar_error": errors["mean"], "cosine_worst": errors["worst_cosine"]}


def svd(x: jax.Array) -> jax.Array:
    """The polar factor by its definition."""
    u, _, vt = jnp.linalg.svd(x, full_matrices=False)
    return u @ vt


def against_exact() -> measure.Row:
    """Error and time for an ill-conditioned matrix (log-spaced to 1e-3), compared with an exact factorization."""
    spectrum = np.geomspace(1, 1e-3, WIDTH)
    x, polar = momentum.matrix(spectrum, WIDTH, WIDTH, np.random.default_rng(0))
    functions = {"svd": svd, "accurate": methods()["accurate"]}
    rows = measure.compare(functions, jnp.asarray(x))
    for name, f in functions.items():
        rows[name]["polar_error"] = momentum.polar_error(jax.jit(f)(x), polar)
    return rows


def main() -> None:
    shapes: measure.Row = {}
    for aspect in ASPECTS:
        shape = WIDTH, aspect * WIDTH
        x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
        rows = measure.compare(methods(), x)
        for name, method in methods().items():
            rows[name] |= recorded_errors(method, aspect)
        shapes[str(aspect)] = rows
    content = {"width": WIDTH, "shapes": shapes, "exact": against_exact()}
    measure.write("newton_schulz", content)


if __name__ == "__main__":
    main()
