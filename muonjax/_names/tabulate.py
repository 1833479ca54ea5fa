"""Print which optimizer takes each leaf, as which matrices and why: one line per leaf."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muonjax._common.trees import dtype_of, flatten_with_names, is_masked, parameters_of
from muonjax._matrices.matrix_view import matrix_pieces, resolve_dimension_numbers
from muonjax._names.dimension_numbers import Route, routes
from muonjax._names.parameters import check_parameters

_HEADER = ("leaf", "shape", "dtype", "goes to", "matrices", "why")


def tabulate(params: Any, dimension_numbers: Any | Callable[[Any], Any] | None = None) -> str:
    """Lists for every leaf the optimizer that takes it, its matrices with their size, and the reason.

    Args:
      params: a tree of arrays or `jax.ShapeDtypeStruct`s, as for `dimension_numbers`; an NNX model's `nnx.Param`s.
      dimension_numbers: what `muonjax.inspect` returned, whose reasons name lines of your code; the tree to show, a
        prefix of it, or a function from `params` to it; None: the default routing, with its reasons.

    Returns:
      The table as text. It ends with parameter counts, and with parameters of the program that `params` lacks.

    Raises:
      ValueError: `dimension_numbers` does not fit `params`.

    Example:
      >>> import jax
      >>> leaf = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
      >>> query = {"bias": leaf(4, 16), "kernel": leaf(64, 4, 16)}
      >>> params = {"embed": {"embedding": leaf(256, 64)}, "query": query}
      >>> print(tabulate(params))
      leaf             shape    goes to  matrices  why
      ───────────────  ───────  ───────  ────────  ───────────────
      embed/embedding  256×64   Adam               embedding
      query/bias       4×16     Adam               bias
      query/kernel     64×4×16  Muon     64×64     attention query
      ───────────────  ───────  ───────  ────────  ───────────────
      Muon: 4,096 parameters (19.9 %), 1 matrix in 1 leaf
      Adam: 16,448 parameters (80.1 %), 2 leaves
      Every leaf is float32.
    """
    layers, params = params, parameters_of(params)
    check_parameters(params, "tabulate", warn=False)
    if dimension_numbers is None:
        leaves = [leaf for leaf in routes(params, layers=layers)[0] if isinstance(leaf, Route)]
    else:
        leaves = _given(params, dimension_numbers)
    rows = [_Row(route, _matrices(route)) for route in leaves]
    dtypes = {str(route.dtype) for route in leaves}
    table = [_HEADER, *map(_cells, rows)]
    if len(dtypes) == 1:
        # One line below the table says what every line of a column would.
        dtype = _HEADER.index("dtype")
        table = [cells[:dtype] + cells[dtype + 1 :] for cells in table]
    lines = [*_aligned(table), _total("Muon", rows), _total("Adam", rows)]
    if len(dtypes) == 1:
        lines.append(f"Every leaf is {dtypes.pop()}.")
    skipped = getattr(dimension_numbers, "skipped", None)  # a `Program` knows what it lacks
    if skipped is not None:
        lines.append(skipped(params))
    return "\n".join(line.rstrip() for line in lines if line)


def _given(params: Any, dimension_numbers: Any) -> list[Route]:
    """Routes by a tree of the caller's own."""
    paths, leaves, _ = flatten_with_names(params)
    call = "tabulate(params, dimension_numbers)"
    numbers = iter(resolve_dimension_numbers(dimension_numbers, params, call=call))
    why = getattr(dimension_numbers, "why", lambda path: "given")  # a `Program` knows the line
    given = []
    for names, leaf in zip(paths, leaves, strict=True):
        if is_masked(leaf):
            continue
        path = "/".join(names)
        shape, dtype = jnp.shape(leaf), dtype_of(leaf)
        given.append(Route(path, shape, dtype, next(numbers), why(path), is_open=False))
    return given


class _Row(NamedTuple):
    """A leaf, and how many matrices of each size it holds: none where it is Adam's."""

    route: Route
    matrices: Counter[tuple[int, int]]

    @property
    def optimizer(self) -> str:
        return "Muon" if self.matrices else "Adam"


def _matrices(route: Route) -> Counter[tuple[int, int]]:
    sizes: Counter[tuple[int, int]] = Counter()
    if route.numbers is None:
        return sizes
    leaf = {route.path: jax.ShapeDtypeStruct(route.shape, route.dtype)}
    for piece in matrix_pieces({route.path: route.numbers}, leaf, call="tabulate"):
        sizes[piece.view.fan_in, piece.view.fan_out] += piece.view.batch
    return sizes


def _cells(row: _Row) -> tuple[str, ...]:
    route, sizes = row.route, []
    for (m, n), count in row.matrices.items():
        sizes.append(f"{m}×{n}" if count == 1 else f"{count} of {m}×{n}")
    shape = "×".join(map(str, route.shape)) or "scalar"
    return route.path, shape, str(route.dtype), row.optimizer, " + ".join(sizes), route.why


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, with rules below its head and at its end."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rule = "  ".join("─" * width for width in widths)
    lines = []
    for cells in table:
        lines.append("  ".join(map(str.ljust, cells, widths)))
    return [lines[0], rule, *lines[1:], rule]


def _total(optimizer: str, rows: Sequence[_Row]) -> str:
    """What an optimizer takes: "Muon: 384 parameters (31.2 %), 6 matrices in 2 leaves"."""
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes[row.optimizer] += math.prod(row.route.shape)
    taken = [row for row in rows if row.optimizer == optimizer]
    parameters = counted(sizes[optimizer], "parameter", "parameters")
    share = 100 * sizes[optimizer] / max(1, sizes.total())
    held = counted(len(taken), "leaf", "leaves")
    count = sum(row.matrices.total() for row in taken)
    if count:
        held = f"{counted(count, 'matrix', 'matrices')} in {held}"
    return f"{optimizer}: {parameters} ({share:.1f} %), {held}"


def counted(count: int, one: str, several: str) -> str:
    """A count and its noun, "1 leaf" or "1,024 leaves"."""
    return f"{count:,} {one if count == 1 else several}"
