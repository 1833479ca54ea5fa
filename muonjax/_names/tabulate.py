"""Print which optimizer takes each leaf, as which matrices and why: one line per leaf."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from muonjax._common.arguments import errors_of
from muonjax._common.nnx_models import parameters_of
from muonjax._common.trees import flatten_paths, is_masked
from muonjax._matrices.matrix_view import (
    DimensionNumbers,
    matrix_pieces,
    resolve_dimension_numbers,
)
from muonjax._names.check_parameters import check_parameters
from muonjax._names.routes import routes


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
      Muon: 4,096 parameters (19.9 %)
      Adam: 16,448 parameters (80.1 %)
    """
    arrays = parameters_of(params)
    with errors_of("tabulate"):
        check_parameters(arrays)
        # What is masked is no leaf of the tree.
        leaves = {
            path: leaf
            for path, leaf in flatten_paths(arrays).items()
            if not is_masked(leaf)
        }
        if dimension_numbers is None:
            answers = routes(params).values()
            numbers = [answer.numbers for answer in answers]
            reasons = [answer.why for answer in answers]
        else:
            with errors_of("(params, dimension_numbers)"):
                numbers = resolve_dimension_numbers(dimension_numbers, arrays)
            # A `Program` knows the line of code that decided; a tree does not say why.
            why = getattr(dimension_numbers, "why", lambda path: "given")
            reasons = [why(path) for path in leaves]
        rows = [("leaf", "shape", "goes to", "matrices", "why")]
        num_parameters: Counter[str] = Counter()
        for path, entry, reason in zip(leaves, numbers, reasons, strict=True):
            optimizer = "Adam" if entry is None else "Muon"
            shape = jnp.shape(leaves[path])
            num_parameters[optimizer] += math.prod(shape)
            matrices = _matrices(path, leaves[path], entry)
            size = "×".join(map(str, shape)) or "scalar"
            rows.append((path, size, optimizer, matrices, reason))
    lines = _aligned(rows)
    for optimizer in ("Muon", "Adam"):
        count = num_parameters[optimizer]
        share = 100 * count / max(1, num_parameters.total())
        lines.append(f"{optimizer}: {count:,} parameters ({share:.1f} %)")
    # A `Program` knows what it lacks.
    skipped = getattr(dimension_numbers, "skipped", None)
    if skipped:
        lines.append(skipped(arrays))
    return "\n".join(line.rstrip() for line in lines if line)


def _matrices(path: str, leaf: Any, numbers: DimensionNumbers | None) -> str:
    """The matrices of a leaf, as "64×64", "3 of 64×64" or "64×64 + 2 of 64×32";
    "" if it is Adam's."""
    counts: Counter[str] = Counter()
    for piece in matrix_pieces({path: numbers}, {path: leaf}):
        counts[f"{piece.view.fan_in}×{piece.view.fan_out}"] += piece.view.batch
    return " + ".join(
        size if count == 1 else f"{count} of {size}" for size, count in counts.items()
    )


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, its columns aligned, with rules below its head and at its end."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rule = "  ".join("─" * width for width in widths)
    lines = ["  ".join(map(str.ljust, cells, widths)) for cells in table]
    return [lines[0], rule, *lines[1:], rule]
