"""Float64 NumPy: the derivative of odd functions of singular values, by SVD (Daleckii and Krein's
formula)."""

import numpy as np


def svd_derivative(x, direction, rows=None):
    """The derivative of msign at x [m, n] in `direction`, which is also its transpose where no norm is taken.

    rows=None: of the exact polar factor (full rank). Otherwise of the polynomial on x / |x|_F, as the
    *vector-Jacobian* product: the projection of the norm's derivative comes last.
    """
    x = np.asarray(x, np.float64)
    direction = np.asarray(direction, np.float64)
    if x.shape[0] > x.shape[1]:
        return svd_derivative(x.T, direction.T, rows).T
    m = x.shape[0]
    norm = np.linalg.norm(x)
    x = x / norm
    u, s, vt = np.linalg.svd(x, full_matrices=True)
    f = np.ones(m)
    slope = np.zeros(m)
    if rows is not None:
        f = s
        slope = np.ones(m)
        for a, b, c in rows:
            slope = slope * (a + 3 * b * f**2 + 5 * c * f**4)
            f = a * f + b * f**3 + c * f**5
    k = u.T @ direction @ vt.T
    inside = k[:, :m]
    outside = k[:, m:]
    with np.errstate(divide="ignore", invalid="ignore"):
        plus = (f[:, None] + f) / (s[:, None] + s)
        minus = (f[:, None] - f) / (s[:, None] - s)
        ratio = f / s
    close = np.abs(s[:, None] - s) < 1e-9 * (s[:, None] + s) + 1e-15
    minus = np.where(close, (slope[:, None] + slope) / 2, minus)
    if (
        rows is not None
    ):  # the limit of every divided difference at zero is the slope there
        slope_at_zero = np.prod([row[0] for row in rows])
        plus = np.where(s[:, None] + s < 1e-14, slope_at_zero, plus)
        ratio = np.where(s < 1e-14, slope_at_zero, ratio)
    inside = 0.5 * (inside - inside.T) * plus + 0.5 * (inside + inside.T) * minus
    g = u @ np.concatenate([inside, ratio[:, None] * outside], axis=1) @ vt
    if rows is not None:
        g = g - x * np.sum(g * x)
    return g / norm


def relative(actual, desired):
    """|actual - desired|_F / |desired|_F."""
    actual = np.asarray(actual, np.float64)
    desired = np.asarray(desired, np.float64)
    return float(np.linalg.norm(actual - desired) / np.linalg.norm(desired))
