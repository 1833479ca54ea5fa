"""Check that hyperparameters are numbers, and tell those whose range can be checked from those that are traced."""

from typing import Any, TypeGuard

import jax
import numpy as np
from jax.core import Tracer


def is_known(value: Any) -> TypeGuard[float]:
    """Whether `value` is a number to check: neither traced (`optax.inject_hyperparams`) nor a schedule."""
    if isinstance(value, (int, float, np.number)):
        return True
    return isinstance(value, (np.ndarray, jax.Array)) and not isinstance(value, Tracer) and value.ndim == 0


def check_number(call: str, name: str, value: Any, *, schedule: bool = False) -> None:
    """Raise TypeError unless it is one number, known or traced, or a schedule where those are allowed."""
    if not (
        is_known(value)
        or (isinstance(value, jax.Array) and value.ndim == 0)
        or (schedule and callable(value))
    ):
        also = " or a schedule" if schedule else ""
        raise TypeError(f"{call}({name}={value!r}) must be a number{also}.")
