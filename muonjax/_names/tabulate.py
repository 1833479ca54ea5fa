"""Print which optimizer takes each leaf, as which matrices and why: one line per leaf."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from muonjax._common.arguments import errors_of
from muonjax._common.model_registry import parameters_of
from muonjax._common.trees import dtype_of, leaf_paths
from muonjax._matrices.matrix_view import matrix_pieces, resolve_dimension_numbers
from muonjax._names.check_parameters import check_parameters
from muonjax._names.routes import Route, routes

_HEADER = ("leaf", "shape", "dtype", "goes to", "matrices", "why")


def tabulate(
    params: Any, dimension_numbers: Any | Callable[[Any], Any] | None = None
) -> str:
    """Lists for every leaf the optimizer that takes it, its matrices with their size, and why.

    Args:
      params: a tree of arrays or `jax.ShapeDtypeStruct`s, as for `dimension_numbers`; an NNX
        model's `nnx.Param`s.
      dimension_numbers: what `muonjax.inspect` returned, whose reasons name lines of your code; the
        tree to show, a prefix of it, or a function from `params` to it; None: the default routing,
        with its reasons.

    Returns:
      The table as text. It ends with parameter counts, and with parameters of the program that
      `params` lacks.

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
    modules, params = params, parameters_of(params)
    with errors_of("tabulate"):
        check_parameters(params, warn=False)
        if dimension_numbers is None:
            leaves, _ = routes(params, layers=modules)
        else:
            leaves = _routes_as_given(params, dimension_numbers)
    dtypes = {str(route.dtype) for route in leaves}
    table = [_HEADER, *map(_cells, leaves)]
    if len(dtypes) == 1:
        # A line below the table replaces a column in which every line is the same.
        dtype = _HEADER.index("dtype")
        table = [cells[:dtype] + cells[dtype + 1 :] for cells in table]
    lines = _aligned(table)
    lines.append(_total("Muon", leaves))
    lines.append(_total("Adam", leaves))
    if len(dtypes) == 1:
        lines.append(f"Every leaf is {dtypes.pop()}.")
    # A `Program` knows what it lacks.
    skipped = getattr(dimension_numbers, "skipped", None)
    if skipped is not None:
        lines.append(skipped(params))
    return "\n".join(line.rstrip() for line in lines if line)


def _routes_as_given(params: Any, dimension_numbers: Any) -> Sequence[Route]:
    """The routes of all leaves by dimension numbers of the caller or of a `Program`.

    A masked leaf is no leaf of the tree, and has none.
    """
    numbers = resolve_dimension_numbers(
        dimension_numbers, params, call="(params, dimension_numbers)"
    )
    # A `Program` knows the line of code that decided; a tree does not say why.
    why = getattr(dimension_numbers, "why", lambda path: "given")
    routes = []
    leaves = jax.tree.leaves(params)
    for names, leaf, entry in zip(leaf_paths(params), leaves, numbers, strict=True):
        path = "/".join(names)
        shape, dtype = jnp.shape(leaf), dtype_of(leaf)
        routes.append(Route(path, shape, dtype, entry, why(path), is_open=False))
    return routes


def _matrices(route: Route) -> Counter[tuple[int, int]]:
    """How many matrices of each size a leaf holds, {(64, 64): 3}; empty if it is Adam's."""
    sizes: Counter[tuple[int, int]] = Counter()
    if route.numbers is None:
        return sizes
    numbers = {route.path: route.numbers}
    leaf = {route.path: jax.ShapeDtypeStruct(route.shape, route.dtype)}
    for piece in matrix_pieces(numbers, leaf, call="tabulate"):
        view = piece.view
        sizes[view.fan_in, view.fan_out] += view.batch
    return sizes


def _cells(route: Route) -> Sequence[str]:
    """The line of a leaf, in the columns of the header: "3 of 64×64" for three matrices."""
    sizes = []
    for (m, n), count in _matrices(route).items():
        sizes.append(f"{m}×{n}" if count == 1 else f"{count} of {m}×{n}")
    shape = "×".join(map(str, route.shape)) or "scalar"
    dtype = str(route.dtype)
    matrices = " + ".join(sizes)
    return route.path, shape, dtype, _optimizer(route), matrices, route.why


def _optimizer(route: Route) -> str:
    return "Adam" if route.numbers is None else "Muon"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, its columns aligned, with rules below its head and at its end."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rule = "  ".join("─" * width for width in widths)
    lines = []
    for cells in table:
        lines.append("  ".join(map(str.ljust, cells, widths)))
    return [lines[0], rule, *lines[1:], rule]


def _total(optimizer: str, leaves: Sequence[Route]) -> str:
    """What an optimizer takes of all leaves: "Muon: 384 parameters (31.2 %), 6 matrices in 2 leaves"."""
    taken = [route for route in leaves if _optimizer(route) == optimizer]
    size = sum(math.prod(route.shape) for route in taken)
    size_of_all = sum(math.prod(route.shape) for route in leaves)
    share = 100 * size / max(1, size_of_all)
    parameters = _counted(size, "parameter", "parameters")
    held = _counted(len(taken), "leaf", "leaves")
    matrices = sum(_matrices(route).total() for route in taken)
    if matrices:
        held = f"{_counted(matrices, 'matrix', 'matrices')} in {held}"
    return f"{optimizer}: {parameters} ({share:.1f} %), {held}"


def _counted(count: int, one: str, several: str) -> str:
    """A count and its noun, "1 leaf" or "1,024 leaves"."""
    return f"{count:,} {one if count == 1 else several}"
