"""The polynomials that Newton-Schulz composes: derived once, tabulated by name,
each with its source.

A schedule is a tuple of rows ``(a, b, c)``. Row t maps every singular value by the odd quintic
``p_t(s) = a s + b s^3 + c s^5``, or by a cubic where c = 0; the composition
``p_T(... p_2(p_1(s)))`` should be close to 1 on all of ``(0, 1]``.
"""

import functools
import itertools
import math
from typing import Any

import numpy as np

from muonjax._common.arguments import check_range, errors_of, whole_number

Coefficients = tuple[tuple[float, float, float], ...]

JORDAN: Coefficients = ((3.4445, -4.7750, 2.0315),)
"""Keller Jordan's one quintic, repeated: the original Muon's, and Optax's default. It never
converges (its fixed ripple is 0.318); it was tuned for the slope at zero.

Both divide by the Frobenius norm, and shrink nothing before the steps:

Example:
  >>> import muonjax
  >>> five = 5 * muonjax.JORDAN
  >>> optax_default = muonjax.NewtonSchulz(
  ...     coefficients=five, normalization="frobenius", deflation=0
  ... )
  >>> len(optax_default.coefficients)
  5

Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024."""

YOU: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""You Jiacheng's five steps, found by gradient descent. Optax calls them "dion".

Example:
  >>> import muonjax
  >>> len(muonjax.NewtonSchulz(coefficients=muonjax.YOU).coefficients)
  5

Source: modded-nanogpt and Dion's code, 2025."""

# From here on the interval is so short that the minimax system loses all of its digits, while its
# solution agrees with the classical polynomial,
# of degree five to double precision and of degree three to 2e-11.
_CONVERGED = 1 - 5e-6

# The value of Amsel et al.
_CUSHION = 0.02407327424182761


def _minimax(degree: int, lower: float, upper: float) -> tuple[np.ndarray, float]:
    """The odd polynomial closest to 1 on [lower, upper]: its coefficients of s, s^3, ...,
    and its largest error.

    By a Remez exchange (Amsel et al., 2025, Algorithm 1; J. Su, kexue.fm/archives/10996).
    """
    # The powers of s: 1, 3, 5
    powers = np.arange(1, degree + 1, 2)
    # On so short an interval the system below loses all digits. The classical polynomial of
    # s / upper, with the value 1 and the slope 0 at 1, misses 1 by less than 1e-10 there.
    if lower / upper > _CONVERGED:
        classical = {3: (3 / 2, -1 / 2), 5: (15 / 8, -10 / 8, 3 / 8)}[degree]
        return np.array(classical) / upper**powers, 0.0
    # The best polynomial misses 1 by the same error at all nodes, by turns above and below.
    signs = (-1.0) ** np.arange(len(powers) + 1)
    # The first nodes are the extrema of Chebyshev's polynomial: exact in the limit lower -> upper.
    angles = np.pi * np.arange(len(signs)) / len(powers)
    nodes = (lower + upper) / 2 - (upper - lower) / 2 * np.cos(angles)
    previous = math.inf
    while True:
        # p(s) + sign error = 1 at every node s, for the coefficients of p and the error
        system = np.column_stack([nodes[:, None] ** powers, signs])
        *row, error = np.linalg.solve(system, np.ones(len(signs)))
        if abs(error - previous) <= 1e-15:
            return np.array(row), error
        previous = error
        # The next nodes are the extrema of p: both ends, and where p'(s), a polynomial of s^2,
        # is zero.
        squares = np.polynomial.polynomial.polyroots(powers * row)
        nodes = np.array([lower, *np.sqrt(np.sort(squares.real)), upper])


def polar_express(num_steps: int, *, lower: float = 1e-3) -> Coefficients:
    r"""The Polar Express schedule: the composition of `num_steps` quintics that is closest to 1 on
    [`lower`, 1].

    Each step is the minimax polynomial of the interval that the steps before it leave, and this
    greedy choice is the global optimum. The first polynomials of a longer schedule are those of a
    shorter one.

    As in Amsel et al., no polynomial is fitted to an interval wider than [0.024 * upper, upper]:
    that would throw large singular values close to zero, where half precision loses them. And every
    step but the last is evaluated at s / 1.01, so that rounding that lifts a singular value above
    the interval can't grow without bound.

    Args:
      num_steps: How many polynomials; at least 1.
      lower: The smallest singular value (the largest is 1) that the schedule cares for; in (0, 1).

    Returns:
      `num_steps` rows (a, b, c).

    Raises:
      ValueError: If an argument is outside of its range.

    Example:
      >>> import muonjax
      >>> [tuple(round(v, 4) for v in row) for row in muonjax.polar_express(2)]
      [(8.2052, -22.9019, 16.4607), (4.1071, -2.9478, 0.5448)]

    Source: Amsel, Persson, Musco, Gower, "The Polar Express", 2025 (arXiv:2505.16932), Algorithm 1
    and Theorem 3.1; J. Su, kexue.fm/archives/10996. Both of Su's articles print b = +1.268 at
    t = 6; it is negative.
    """
    with errors_of("polar_express"):
        num_steps = whole_number("num_steps", num_steps, 1, " of steps, at least 1.")
        check_range("lower", lower, "in (0, 1)", ": the largest singular value is 1.")
    return polar_express_rows((5,) * num_steps, float(lower))


@functools.lru_cache
def polar_express_rows(
    degrees: tuple[int, ...],
    lower: float,
    cushion: float = _CUSHION,
    safety: float = 1.01,
) -> Coefficients:
    """`polar_express` of checked arguments: a row for each degree, 3 or 5.

    Args:
      degrees: The degree of each polynomial. A cubic saves a product and gains half as many digits
        as a quintic.
      lower: The smallest singular value.
      cushion: No polynomial is fitted to an interval wider than [`cushion` * upper, upper]: that
        would throw large singular values close to zero. Each is rescaled so that the ends of the
        true interval are symmetric about 1.
      safety: Every step but the last is evaluated at s / `safety`. The last step stays plain:
        nothing follows it, and dividing it would keep the whole schedule from converging.
    """
    rows = []
    # [lower, upper] is where the steps so far take the first interval, without the division by
    # `safety`.
    upper = 1.0
    for step, degree in enumerate(degrees):
        # The polynomial closest to 1 on this interval, not wider than `cushion` allows,
        # and its largest distance from 1
        row, error = _minimax(degree, max(lower, cushion * upper), upper)
        powers = np.arange(1, degree + 1, 2)
        # p rises up to the interval that it is fitted to, where it is at least 1 - error. So it
        # takes [lower, upper] to [p(lower), 1 + error]; `centering` makes that symmetric about 1.
        at_lower = float(row @ lower**powers)
        centering = 2 / (at_lower + 1 + error)
        lower = centering * at_lower
        upper = 2 - lower
        # p(s / divisor) leaves room for singular values that rounding has lifted above `upper`.
        is_last = step == len(degrees) - 1
        divisor = 1.0 if is_last else safety
        scaled = centering * row / divisor**powers
        # A cubic has c = 0.
        a, b, c = [*scaled.tolist(), 0.0][:3]
        rows.append((a, b, c))
    return tuple(rows)


def checked_rows(coefficients: Any) -> Coefficients:
    """`coefficients` as rows (a, b, c) of floats, at least one; raises on anything else.

    `errors_of` puts the name of the call before each message: "msign(coefficients=...) needs ...".
    """
    try:
        rows = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"(coefficients={coefficients!r}) needs rows of three numbers (a, b, c), such as "
            "polar_express(5)."
        ) from error
    if not rows or not np.isfinite(rows).all():
        raise ValueError(
            f"(coefficients={coefficients!r}) needs at least one row, all of it finite."
        )
    return rows


def evaluate(coefficients: Coefficients, s):
    """The composition at the singular values `s` (NumPy or JAX; any shape)."""
    for a, b, c in coefficients:
        square = s * s
        # a s + b s^3 + c s^5
        s = s * ((c * square + b) * square + a)
    return s


def parts_of(rows: Coefficients, largest_growth: float) -> list[Coefficients]:
    """The rows in parts, each with the steps that share one Gram matrix R = X X^H: it is made anew
    from X before each part, so that errors of R stay small.

    A step X <- p(X) also updates R. That multiplies an error of R, in a direction where R is next
    to nothing, by p'(0)^2 = a^2. For four steps with a = 8, 4, 3 and 2 and a largest growth of 200
    there are two parts of two steps, since 64 · 16 > 200. For 0 each step is a part.
    """
    parts = [rows[:1]]
    growth = 1.0
    for (a, _, _), row in itertools.pairwise(rows):
        # Where a step shrinks the old error, its own rounding leaves one of the usual size.
        growth = max(1.0, growth * a**2)
        if growth > largest_growth:
            parts.append(())
            growth = 1.0
        parts[-1] = (*parts[-1], row)
    return parts


def never_above_one(rows: Coefficients) -> Coefficients:
    """The rows, the last one smaller, so that their composition is at most 1 on [0, 1]."""
    # Rounding may leave a singular value a little above 1.
    top = float(evaluate(rows, np.linspace(0, 1.001, 10_001)).max())
    a, b, c = rows[-1]
    return (*rows[:-1], (a / top, b / top, c / top))
