"""Print which optimizer takes each leaf, as which matrices and why: one line per leaf."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from muonjax._common.trees import dtype_of, flatten_with_names, is_masked, parameters_of
from muonjax._matrices.matrix_view import matrix_pieces, resolve_dimension_numbers
from muonjax._names.dimension_numbers import Route, check_parameters, routes

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
    by_names = dimension_numbers is None
    found = routes(params, layers=layers)[0] if by_names else _given(params, dimension_numbers)
    leaves = [route for route in found if isinstance(route, Route)]
    dtypes = sorted({str(route.dtype) for route in leaves})
    rows = [_HEADER, *map(_row, leaves)]
    if len(dtypes) == 1:  # a column that says the same in every line says it once, below
        rows = [row[:2] + row[3:] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = "  ".join("─" * width for width in widths)
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines = [lines[0], rule, *lines[1:], rule, *_totals(leaves)]
    if len(dtypes) == 1:
        lines.append(f"Every leaf is {dtypes[0]}.")
    if skipped := getattr(dimension_numbers, "skipped", lambda params: "")(params):
        lines.append(skipped)
    return "\n".join(line.rstrip() for line in lines)


def _given(params: Any, dimension_numbers: Any) -> list[Route | optax.MaskedNode]:
    """Routes by a tree of the caller's own."""
    paths, leaves, _ = flatten_with_names(params)
    call = "tabulate(params, dimension_numbers)"
    numbers = iter(resolve_dimension_numbers(dimension_numbers, params, call=call))
    why = getattr(dimension_numbers, "why", lambda path: "given")  # a `Program` knows the line of the code

    def route(path: str, leaf: Any, number: Any) -> Route:
        return Route(path, jnp.shape(leaf), dtype_of(leaf), number, why(path), is_open=False)

    pairs = zip(paths, leaves, strict=True)
    return [x if is_masked(x) else route("/".join(path), x, next(numbers)) for path, x in pairs]


def _row(route: Route) -> tuple[str, ...]:
    shape = "×".join(map(str, route.shape)) or "scalar"
    found = _matrices(route)
    sizes = (("" if count == 1 else f"{count} of ") + f"{m}×{n}" for (m, n), count in found.items())
    return route.path, shape, str(route.dtype), "Muon" if found else "Adam", " + ".join(sizes), route.why


def _matrices(route: Route) -> Counter[tuple[int, int]]:
    """How many matrices of each size a leaf holds."""
    found: Counter[tuple[int, int]] = Counter()
    if route.numbers is not None:
        leaf = {route.path: jax.ShapeDtypeStruct(route.shape, route.dtype)}
        for piece in matrix_pieces({route.path: route.numbers}, leaf, call="tabulate"):
            found[piece.view.fan_in, piece.view.fan_out] += piece.view.batch
    return found


def _totals(found: list[Route]) -> list[str]:
    total, lines = max(1, sum(math.prod(route.shape) for route in found)), []
    for optimizer in ("Muon", "Adam"):
        mine = [route for route in found if (route.numbers is not None) == (optimizer == "Muon")]
        size = sum(math.prod(route.shape) for route in mine)
        matrices = sum(_matrices(route).total() for route in mine)
        held = counted(len(mine), "leaf", "leaves")
        held = f"{counted(matrices, 'matrix', 'matrices')} in {held}" if matrices else held
        parameters = counted(size, "parameter", "parameters")
        lines.append(f"{optimizer}: {parameters} ({100 * size / total:.1f} %), {held}")
    return lines


def counted(count: int, one: str, several: str) -> str:
    """A count and its noun, "1 leaf" or "1,024 leaves"."""
    return f"{count:,} {one if count == 1 else several}"
