"""Evaluate published Newton-Schulz schedules on the recorded singular values of a transformer's momentum.

Without deflation the singular vectors do not matter: each singular value is divided by the Frobenius norm and goes
through the polynomials, in float64. The work is counted, in steps of a quintic.
"""

from collections.abc import Sequence

import numpy as np

import muonjax
from benchmarks.common import measure, momentum
from muonjax._newton_schulz.coefficients import evaluate

SCHEDULES = {
    "Jordan, 5 steps (Optax's, PyTorch's)": 5 * muonjax.JORDAN,
    "You, 5 steps": muonjax.YOU,
    "Polar Express, 5 steps": muonjax.polar_express(5),
    "DeepSeek-V4, 8 + 2 steps": 8 * muonjax.JORDAN + 2 * ((2.0, -1.5, 0.5),),
}


def errors(schedule: Sequence[tuple[float, float, float]]) -> list[float]:
    """The polar error of each recorded spectrum: the root mean square of f(sigma) - 1."""
    found = []
    for spectrum in momentum.spectra():
        sigma = np.asarray(spectrum, np.float64)
        found.append(
            float(
                np.sqrt(
                    np.mean(
                        (evaluate(schedule, sigma / np.linalg.norm(sigma)) - 1) ** 2
                    )
                )
            )
        )
    return found


def main() -> None:
    rows = {}
    for name, schedule in SCHEDULES.items():
        found = errors(schedule)
        rows[name] = {
            "steps": len(schedule),
            "polar_error": float(np.mean(found)),
            "worst": max(found),
        }
    measure.write("schedules", {"schedules": rows}, rows)


if __name__ == "__main__":
    main()
