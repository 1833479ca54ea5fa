"""Name the public call in the errors that its arguments raise, once, where the call is entered."""

import contextlib
from collections.abc import Iterator


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
