"""Tell hyperparameters whose range can be checked from those that are known only while the program runs."""

from typing import Any, TypeGuard

import jax
import numpy as np
from jax.core import Tracer


def is_known(value: Any) -> TypeGuard[float]:
    """Whether `value` is a number to check: neither traced (`optax.inject_hyperparams`) nor a schedule."""
    if isinstance(value, (int, float, np.number)):
        return True
    return isinstance(value, (np.ndarray, jax.Array)) and not isinstance(value, Tracer) and value.ndim == 0
