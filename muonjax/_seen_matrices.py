"""Show `monitor` which leaves `orthogonalize` takes as which matrices, through every wrapper of Optax around it."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from muonjax._matrix_view import Piece
from muonjax._trees import leaf_paths

Seen = dict[tuple[str, ...], list[Piece]]
_seen: contextvars.ContextVar[Seen | None] = contextvars.ContextVar("muonjax_seen_matrices", default=None)


@contextlib.contextmanager
def seen_matrices() -> Iterator[Seen]:
    """The pieces of each leaf, by its path, of every `show_matrices` that is called inside."""
    found: Seen = {}
    token = _seen.set(found)
    try:
        yield found
    finally:
        _seen.reset(token)


def show_matrices(tree: Any, pieces: Callable[[], list[Piece]]) -> None:
    """Show the pieces of `tree` to whoever is looking; they are not computed for nobody."""
    seen = _seen.get()
    if seen is not None:
        paths = leaf_paths(tree)
        for piece in pieces():
            seen.setdefault(paths[piece.leaf], []).append(piece)
