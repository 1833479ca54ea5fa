"""Evaluate published Newton-Schulz schedules on the recorded singular values of a transformer's momentum.

Without deflation the singular vectors do not matter: each singular value is divided by the Frobenius norm and goes
through the polynomials, in float64. The work is counted, in steps of a quintic.
"""

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


def main() -> None:
    rows = {}
    for name, schedule in SCHEDULES.items():
        errors = []
        for spectrum in momentum.spectra():
            sigma = spectrum.astype(np.float64)
            y = evaluate(schedule, sigma / np.linalg.norm(sigma))
            errors.append(np.sqrt(np.mean((y - 1) ** 2)))
        row = {"steps": len(schedule), "polar_error": float(np.mean(errors))}
        rows[name] = row | {"worst": float(max(errors))}
    measure.write("schedules", {"schedules": rows}, rows)


if __name__ == "__main__":
    main()
