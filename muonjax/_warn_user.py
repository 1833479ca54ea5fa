"""Warn at the line of the user's code that called, whatever of muonjax, Optax, JAX and Flax lies between."""

import sys
import warnings

_BETWEEN = ("muonjax", "optax", "jax", "jaxlib", "flax", "equinox", "contextlib", "functools")


def warn_user(message: str) -> None:
    """Raises a UserWarning whose file and line are those of the innermost frame of none of these libraries."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
