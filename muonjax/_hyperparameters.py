"""Check that hyperparameters are numbers, and tell those whose range can be checked from those that are traced."""

import math
import numbers
from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.core import Tracer


def is_known(value: Any) -> TypeGuard[float]:
    """Whether `value` is a number to check: neither traced (`optax.inject_hyperparams`) nor a schedule."""
    if isinstance(value, (int, float, np.number)):
        return True
    return isinstance(value, (np.ndarray, jax.Array)) and not isinstance(value, Tracer) and value.ndim == 0


def is_whole(value: Any) -> bool:
    """Whether `value` is a whole number, Python's or NumPy's."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def whole_number(call: str, name: str, value: Any, least: int, why: str) -> int:
    """`value` as Python's; raises ValueError unless it is a whole number, at least `least`. `why` ends the message."""
    if not is_whole(value) or value < least:
        raise ValueError(f"{call}({name}={value!r}) needs a whole number{why}")
    return int(value)


_RANGES: dict[str, Callable[[float], bool]] = {
    "in [0, 1)": lambda value: 0 <= value < 1,
    "finite and not negative": lambda value: 0 <= value < math.inf,
    "positive and finite": lambda value: 0 < value < math.inf,
}


def check_range(call: str, name: str, value: Any, wanted: str, why: str, *, schedule: bool = False) -> None:
    """Raise unless it is one number, known or traced, or a schedule where those are allowed; and a known one in range.

    Args:
      call: The public function.
      name: Of the argument.
      value: What was given.
      wanted: The range, a name in `_RANGES`.
      why: Ends the message of a number out of it.
      schedule: Whether a schedule may be given.
    """
    is_traced = isinstance(value, jax.Array) and value.ndim == 0
    if not (is_known(value) or is_traced or (schedule and callable(value))):
        also = " or a schedule" if schedule else ""
        raise TypeError(f"{call}({name}={value!r}) must be a number{also}.")
    if is_known(value) and not _RANGES[wanted](value):
        raise ValueError(f"{call}({name}={value!r}) must be {wanted}{why}")
