"""Name the public call in the errors that its arguments raise, once, where the call is entered."""

import contextlib
import operator
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def errors_of(call: str) -> Iterator[None]:
    """Put "call: " before the message of a TypeError or ValueError that is raised inside."""
    try:
        yield
    except (TypeError, ValueError) as error:
        # Not of subclasses, whose arguments are their own affair.
        if type(error) in (TypeError, ValueError):
            error.args = (f"{call}: {error}",)
        raise


def whole_number(name: str, value: Any) -> int:
    """`value` as an int, Python's or NumPy's, that is known while tracing."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be a whole number that is known while tracing.") from None
