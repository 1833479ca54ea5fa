"""Measure polar error against time of each Newton–Schulz method, and draw both.

Errors are measured on matrices with the recorded singular values of a transformer's momentum (`momentum.py`)
and random singular vectors, at the width at which they were recorded; times at --width, against Optax's function in
the same process. Three shapes: square, 1:4 and 1:16.

Other implementations are emulated by settings, so that all run on the same products: Jordan's and You's tables, Polar
Express as in Dion, the Gram form as in Gram Newton-Schulz, the schedule of DeepSeek-V4.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import muonjax
from benchmarks.common import measure, momentum
from benchmarks.common.accelerator_model import optax_matrix
from muonjax import NewtonSchulz, newton_schulz, polar_express

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ASPECTS = (1, 4, 16)

plain = functools.partial(
    NewtonSchulz, deflation=0, normalization="frobenius", form="standard"
)
OURS = {
    "fast": NewtonSchulz.fast(),
    "balanced": NewtonSchulz.balanced(),
    "accurate": NewtonSchulz.accurate(),
}
PEERS = {
    "Jordan, 5 steps": plain(coefficients=5 * muonjax.JORDAN),
    "You, 5 steps": plain(coefficients=muonjax.YOU),
    "Polar Express, 5 steps": plain(coefficients=polar_express(5, safety=1.02)),
    "DeepSeek-V4, 10 steps": plain(
        coefficients=8 * muonjax.JORDAN + 2 * ((2.0, -1.5, 0.5),)
    ),
}
# The effect of deflation alone, and of the number of steps alone.
STEPS = {
    f"{count} steps": NewtonSchulz(coefficients=polar_express(count), deflation=0)
    for count in (4, 5, 6, 7)
}
STEPS["5 steps, deflated"] = NewtonSchulz(coefficients=polar_express(5, lower=3e-3))


def methods() -> dict[str, Any]:
    """Functions of one matrix, by name; Optax's is the one that its Muon calls."""
    functions: dict[str, Any] = {"optax": optax_matrix}
    for name, settings in (OURS | STEPS | PEERS).items():
        functions[name] = functools.partial(newton_schulz, settings=settings)
    return functions


def real_errors(method: Any, aspect: int) -> dict[str, float]:
    """Polar error and cosine over all recorded spectra."""
    rng = np.random.default_rng(0)
    run, results, polars = jax.jit(method), [], []
    for spectrum in momentum.spectra():
        x, polar = momentum.matrix(spectrum, len(spectrum), aspect * len(spectrum), rng)
        results.append(run(x))
        polars.append(polar)
    errors = momentum.errors(results, polars)
    return {"polar_error": errors["mean"], "cosine_worst": errors["worst_cosine"]}


def log_spaced_errors(m: int) -> dict[str, float]:
    """Polar error for singular values spaced evenly in the logarithm: no dominant directions to deflate."""
    x, polar = momentum.matrix(np.geomspace(1, 1e-3, m), m, m, np.random.default_rng(0))
    return {
        name: momentum.polar_error(jax.jit(f)(x), polar)
        for name, f in methods().items()
    }


def svd(x: jax.Array) -> jax.Array:
    """The polar factor by its definition."""
    u, _, vt = jnp.linalg.svd(x, full_matrices=False)
    return u @ vt


def against_exact(m: int, rounds: int) -> dict[str, Any]:
    """Error and time for an ill-conditioned matrix (log-spaced to 1e-3), compared with an exact factorization."""
    x, polar = momentum.matrix(np.geomspace(1, 1e-3, m), m, m, np.random.default_rng(0))
    functions = {"svd": svd, "accurate": methods()["accurate"]}
    calls = {
        name: functools.partial(jax.jit(f), jnp.asarray(x))
        for name, f in functions.items()
    }
    seconds = measure.interleave(calls, rounds=rounds)
    rows = {}
    for name, call in calls.items():
        rows[name] = measure.summary(seconds[name], seconds["svd"])
        rows[name]["polar_error"] = momentum.polar_error(call(), polar)
    return rows


def times(width: int, aspect: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds for one matrix [width, aspect * width], and the ratio to Optax's."""
    x = jnp.asarray(
        np.random.default_rng(0).standard_normal((width, aspect * width)), jnp.float32
    )
    calls = {name: functools.partial(jax.jit(f), x) for name, f in methods().items()}
    seconds = measure.interleave(calls, rounds=rounds)
    return {name: measure.summary(seconds[name], seconds["optax"]) for name in calls}


def draw(shapes: dict[str, Any], width: int) -> None:
    """Error against time, one panel per shape; lower and further left is better."""
    figure, panels = plt.subplots(
        1, 3, figsize=(10, 4), sharey=True, layout="constrained"
    )
    kinds = (
        (OURS, "C0", "o"),
        (STEPS, "C7", "."),
        ({"optax": None} | PEERS, "C3", "x"),
    )
    for axes, (aspect, rows) in zip(panels, shapes.items(), strict=True):
        for names, color, marker in kinds:
            for name in names:
                at = rows[name]["ratio"], rows[name]["polar_error"]
                axes.plot(*at, marker, color=color)
                label = name.partition(", ")[0] if name in PEERS else name
                # The labels of the presets are below their marks: many are close together.
                offset = (4, -11) if names is OURS else (4, 3)
                axes.annotate(
                    label,
                    at,
                    offset,
                    textcoords="offset points",
                    fontsize=7,
                    color=color,
                )
        right = 1.2 * max(row["ratio"] for row in rows.values())
        title = f"{width} × {int(aspect) * width}"
        axes.set(title=title, xlabel="time ÷ Optax's", xlim=(0, right), yscale="log")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("polar error, mean over recorded spectra")
    figure.savefig(measure.IMAGES / "newton_schulz.png", dpi=120)
    plt.close(figure)


def main() -> None:
    args = measure.options(__doc__, width=768, rounds=7)
    shapes: dict[str, Any] = {}
    for aspect in ASPECTS:
        rows = times(args.width, aspect, args.rounds)
        for name, f in methods().items():
            rows[name] |= real_errors(f, aspect)
        shapes[str(aspect)] = rows
    exact = against_exact(args.width, args.rounds)
    content = {**vars(args), "shapes": shapes, "exact": exact}
    content["log_spaced"] = {"128": log_spaced_errors(128)}
    measure.write("newton_schulz", content, *shapes.values(), exact)
    draw(shapes, args.width)


if __name__ == "__main__":
    main()
