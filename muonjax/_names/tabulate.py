"""Print which optimizer takes each leaf, as which matrices and why: one line per leaf."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muonjax._common.arguments import errors_of
from muonjax._common.model_registry import parameters_of
from muonjax._common.trees import dtype_of, leaf_paths
from muonjax._matrices.matrix_view import (
    DimensionNumbers,
    matrix_pieces,
    resolve_dimension_numbers,
)
from muonjax._names.check_parameters import check_parameters
from muonjax._names.roles import Answer
from muonjax._names.routes import routes

_HEADER = ("leaf", "shape", "goes to", "matrices", "why")


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
    arrays = parameters_of(params)
    with errors_of("tabulate"):
        check_parameters(arrays)
        given = dimension_numbers
        answers = routes(params) if given is None else _answers_as_given(arrays, given)
    leaves = []
    for leaf, path in zip(jax.tree.leaves(arrays), answers, strict=True):
        answer = answers[path]
        shape, dtype = jnp.shape(leaf), dtype_of(leaf)
        leaves.append(_Leaf(path, shape, dtype, answer.numbers, answer.why))
    lines = _aligned([_HEADER, *(leaf.cells() for leaf in leaves)])
    lines.append(_total("Muon", leaves))
    lines.append(_total("Adam", leaves))
    dtypes = sorted({str(leaf.dtype) for leaf in leaves})
    if dtypes:
        lines.append(f"Every leaf is {' or '.join(dtypes)}.")
    # A `Program` knows what it lacks.
    skipped = getattr(dimension_numbers, "skipped", None)
    if skipped is not None:
        lines.append(skipped(arrays))
    return "\n".join(line.rstrip() for line in lines if line)


def _answers_as_given(params: Any, dimension_numbers: Any) -> dict[str, Answer]:
    """What dimension numbers of the caller or of a `Program` say of all leaves, by path.

    A masked leaf is no leaf of the tree, and has none.
    """
    numbers = resolve_dimension_numbers(
        dimension_numbers, params, call="(params, dimension_numbers)"
    )
    # A `Program` knows the line of code that decided; a tree does not say why.
    why = getattr(dimension_numbers, "why", lambda path: "given")
    answers = {}
    for names, entry in zip(leaf_paths(params), numbers, strict=True):
        path = "/".join(names)
        answers[path] = Answer(entry, why(path))
    return answers


class _Leaf(NamedTuple):
    """A leaf with what is decided about it.

    Attributes:
      path: "/"-joined.
      shape: Its shape.
      dtype: Its dtype.
      numbers: Its axes as a matrix for Muon; None: it is Adam's.
      why: The reason, in a few words.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    numbers: DimensionNumbers | None
    why: str

    @property
    def optimizer(self) -> str:
        return "Adam" if self.numbers is None else "Muon"

    def matrices(self) -> Counter[tuple[int, int]]:
        """How many matrices of each size it holds, {(64, 64): 3}; empty if it is Adam's."""
        sizes: Counter[tuple[int, int]] = Counter()
        leaf = jax.ShapeDtypeStruct(self.shape, self.dtype)
        numbers = {self.path: self.numbers}
        for piece in matrix_pieces(numbers, {self.path: leaf}, call="tabulate"):
            view = piece.view
            sizes[view.fan_in, view.fan_out] += view.batch
        return sizes

    def cells(self) -> Sequence[str]:
        """Its line, in the columns of the header: "3 of 64×64" for three matrices."""
        sizes = []
        for (m, n), count in self.matrices().items():
            sizes.append(f"{m}×{n}" if count == 1 else f"{count} of {m}×{n}")
        shape = "×".join(map(str, self.shape)) or "scalar"
        return self.path, shape, self.optimizer, " + ".join(sizes), self.why


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, its columns aligned, with rules below its head and at its end."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rule = "  ".join("─" * width for width in widths)
    lines = []
    for cells in table:
        lines.append("  ".join(map(str.ljust, cells, widths)))
    return [lines[0], rule, *lines[1:], rule]


def _total(optimizer: str, leaves: Sequence[_Leaf]) -> str:
    """What an optimizer takes of all leaves: "Muon: 384 parameters (31.2 %), 6 matrices in 2 leaves"."""
    taken = [leaf for leaf in leaves if leaf.optimizer == optimizer]
    size = sum(math.prod(leaf.shape) for leaf in taken)
    size_of_all = sum(math.prod(leaf.shape) for leaf in leaves)
    share = 100 * size / max(1, size_of_all)
    parameters = _counted(size, "parameter", "parameters")
    held = _counted(len(taken), "leaf", "leaves")
    matrices = sum(leaf.matrices().total() for leaf in taken)
    if matrices:
        held = f"{_counted(matrices, 'matrix', 'matrices')} in {held}"
    return f"{optimizer}: {parameters} ({share:.1f} %), {held}"


def _counted(count: int, one: str, several: str) -> str:
    """A count and its noun, "1 leaf" or "1,024 leaves"."""
    return f"{count:,} {one if count == 1 else several}"
