"""Measure polar error against time of each Newton–Schulz method, and draw both.

Errors are measured on matrices with the recorded singular values of a transformer's momentum (`momentum.py`)
and random singular vectors, at the width at which they were recorded; times at --width, against Optax's function in
the same process. Three shapes: square, 1:4 and 1:16.

Other implementations are emulated by settings, so that all run on the same products: Jordan's and You's tables, Polar
Express as in Dion, the Gram form as in Gram Newton-Schulz, the schedule of DeepSeek-V4.
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from optax.contrib import _muon as optax_muon

import muonjax
from benchmarks.common import measure, momentum
from muonjax import NewtonSchulz, newton_schulz, polar_express

matplotlib.use("Agg")
import matplotlib.pyplot as plt

IMAGE = pathlib.Path(__file__).parents[2] / "docs" / "images" / "newton_schulz.png"
ASPECTS = (1, 4, 16)

plain = functools.partial(NewtonSchulz, deflation=0, normalization="frobenius")
OURS = {
    "fast": NewtonSchulz.fast(),
    "balanced": NewtonSchulz.balanced(),
    "accurate": NewtonSchulz.accurate(),
}
PEERS = {
    "Jordan, 5 steps": plain(coefficients=5 * muonjax.JORDAN, form="standard"),
    "You, 5 steps": plain(coefficients=muonjax.YOU, form="standard"),
    "Polar Express, 5 steps": plain(
        coefficients=polar_express(5, safety=1.02), form="standard"
    ),
    "DeepSeek-V4, 10 steps": plain(
        coefficients=8 * muonjax.JORDAN + 2 * ((2.0, -1.5, 0.5),), form="standard"
    ),
}
# The effect of deflation alone, and of the number of steps alone.
STEPS = {
    **{
        f"{t} steps": NewtonSchulz(coefficients=polar_express(t), deflation=0)
        for t in (4, 5, 6, 7)
    },
    "5 steps, deflated": NewtonSchulz(coefficients=polar_express(5, lower=3e-3)),
}


def optax(x: jax.Array) -> jax.Array:
    """Optax's own function, as its Muon calls it."""
    numbers = optax_muon.MuonDimensionNumbers(0, 1)
    return optax_muon.orthogonalize_via_newton_schulz(
        x, jnp.asarray(muonjax.JORDAN[0]), dimension_numbers=numbers
    )


def methods() -> dict[str, Any]:
    """Functions of one matrix, by name."""
    ours = {**OURS, **STEPS, **PEERS}
    return {"optax": optax} | {
        k: functools.partial(newton_schulz, settings=v) for k, v in ours.items()
    }


def real_errors(method: Any, aspect: int) -> dict[str, float]:
    """Polar error and cosine over all recorded spectra."""
    rng = np.random.default_rng(0)
    run, errors, cosines = jax.jit(method), [], []
    for spectrum in momentum.spectra():
        x, polar = momentum.matrix(spectrum, len(spectrum), aspect * len(spectrum), rng)
        y = run(x)
        errors.append(momentum.polar_error(y, polar))
        cosines.append(momentum.cosine(y, polar))
    return {
        "polar_error": float(np.mean(errors)),
        "polar_error_worst": max(errors),
        "cosine_worst": min(cosines),
    }


def log_spaced_errors(m: int) -> dict[str, float]:
    """Polar error for singular values spaced evenly in the logarithm: no dominant directions to deflate."""
    x, polar = momentum.matrix(np.geomspace(1, 1e-3, m), m, m, np.random.default_rng(0))
    named = methods()
    names = ("optax", "fast", "balanced", "5 steps", "6 steps", "accurate")
    return {
        name: momentum.polar_error(jax.jit(named[name])(x), polar) for name in names
    }


def against_exact(m: int, rounds: int) -> dict[str, Any]:
    """Error and time for an ill-conditioned matrix (log-spaced to 1e-3), compared with exact factorizations."""
    rng = np.random.default_rng(0)
    x, polar = momentum.matrix(np.geomspace(1, 1e-3, m), m, m, rng)

    def svd(x):
        u, _, vt = jnp.linalg.svd(x, full_matrices=False)
        return u @ vt

    functions = {
        "svd": svd,
        "qdwh": lambda x: jax.lax.linalg.qdwh(x)[0],
        "6 steps": functools.partial(newton_schulz, settings=STEPS["6 steps"]),
        "accurate": functools.partial(newton_schulz, settings=OURS["accurate"]),
    }
    calls = {
        name: functools.partial(jax.jit(f), jnp.asarray(x))
        for name, f in functions.items()
    }
    seconds = measure.interleave(calls, rounds=rounds)
    fastest = min(("svd", "qdwh"), key=lambda name: np.median(seconds[name]))
    return {
        name: {"polar_error": momentum.polar_error(calls[name](), polar)}
        | measure.summary(seconds[name], seconds[fastest])
        for name in functions
    }


def times(width: int, aspect: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds for one matrix [width, aspect * width], and the ratio to Optax's."""
    x = jnp.asarray(
        np.random.default_rng(0).standard_normal((width, aspect * width)), jnp.float32
    )
    calls = {name: functools.partial(jax.jit(f), x) for name, f in methods().items()}
    seconds = measure.interleave(calls, rounds=rounds)
    return {name: measure.summary(seconds[name], seconds["optax"]) for name in calls}


def draw(content: dict[str, Any]) -> None:
    """Error against time, one panel per shape; lower and further left is better."""
    figure, panels = plt.subplots(
        1, len(ASPECTS), figsize=(10, 4), sharey=True, layout="constrained"
    )
    for axes, aspect in zip(panels, ASPECTS, strict=True):
        rows = content["shapes"][str(aspect)]
        # Labels of the presets below their marks, most others to the right: many are close together.
        peers = {"optax": None, **PEERS}
        kinds = (
            (OURS, "C0", "o", (8, -11), "right"),
            (STEPS, "C7", ".", (4, -8), "left"),
            (peers, "C3", "x", (4, 3), "left"),
        )
        beside = ((-5, -4), "right") if aspect == 1 else ((4, -5), "left")
        crowded = {
            "4 steps": ((4, 3), "left"),
            "You, 5 steps": beside,
            "Polar Express, 5 steps": beside,
        }
        for names, color, marker, aside, align in kinds:
            for name in names:
                at = rows[name]["ratio"], rows[name]["polar_error"]
                axes.plot(*at, marker, color=color)
                label = (
                    name.removesuffix(", 5 steps").removesuffix(", 10 steps")
                    if names is peers
                    else name
                )
                offset, end = crowded.get(name, (aside, align))
                axes.annotate(
                    label,
                    at,
                    offset,
                    textcoords="offset points",
                    fontsize=7,
                    color=color,
                    ha=end,
                )
        width = content["width"]
        axes.set(
            title=f"{width} × {aspect * width}",
            xlabel="time ÷ Optax's",
            xlim=(0, 1.2 * max(row["ratio"] for row in rows.values())),
            yscale="log",
        )
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("polar error, mean over recorded spectra")
    figure.savefig(IMAGE, dpi=120)
    plt.close(figure)


def main() -> None:
    args = measure.options(__doc__, width=768, rounds=7)
    shapes: dict[str, Any] = {}
    for aspect in ASPECTS:
        timed = times(args.width, aspect, args.rounds)
        shapes[str(aspect)] = {
            name: timed[name] | real_errors(f, aspect) for name, f in methods().items()
        }
    content = {
        **vars(args),
        "shapes": shapes,
        "log_spaced": {str(m): log_spaced_errors(m) for m in (128, args.width)},
        "exact": against_exact(args.width, args.rounds),
    }
    measure.write("newton_schulz", content, *shapes.values(), content["exact"])
    draw(content)


if __name__ == "__main__":
    main()
