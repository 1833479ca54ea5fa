"""Read the parameter trees of public models, and what is right for each of their leaves.

A file holds several trees. A tree begins with `== name`; each line after it is a leaf, or several of one kind:

    layers/{0,1}/attn/query/kernel  768x12x64 bfloat16  0>1,2

Braces list names that take this place in turn. After the path come the shape (`scalar` for ()), the dtype unless it is
float32, and what is right, unless it is Adam alone:

    0>1,2        matrices, in the notation of tests/inspect/library_models/answers.py
    Adam|0>1     either is right
    Adam|warn    the leaf goes to Adam with a warning that names it, whatever it is
"""

import itertools
import pathlib
import re
from typing import Any, NamedTuple

import jax

from tests.inspect.library_models.answers import numbers_of

DIRECTORY = pathlib.Path(__file__).parent / "trees"


class Leaf(NamedTuple):
    """A leaf of a public model.

    Attributes:
      path: "/"-joined.
      shape: The shape of its array.
      dtype: The dtype of its array.
      right: Alternatives: dimension numbers, None for Adam, or "warn".
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    right: tuple[Any, ...]


def read_zoo(directory: pathlib.Path = DIRECTORY) -> dict[str, list[Leaf]]:
    """Name of each tree in a folder's files to its leaves."""
    trees: dict[str, list[Leaf]] = {}
    for file in sorted(directory.glob("*.txt")):
        leaves: list[Leaf] = []
        for line in file.read_text().splitlines():
            if line.startswith("== "):
                assert line[3:] not in trees, f"{line[3:]} is there twice"
                leaves = trees[line[3:]] = []
            elif line and not line.startswith("#"):
                leaves += _leaves(line)
    return trees


def params(leaves: list[Leaf]) -> dict[str, Any]:
    """A tree of nested dictionaries of shapes."""
    tree: dict[str, Any] = {}
    for leaf in leaves:
        *scopes, name = leaf.path.split("/")
        node = tree
        for scope in scopes:
            node = node.setdefault(scope, {})
        node[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return tree


def matches(numbers, right: tuple[Any, ...]) -> bool:
    """Whether dimension numbers, or None, are one of the right answers; the order of axes that are joined is free."""
    return any(
        _normal(numbers) == _normal(answer)
        for answer in right
        if not isinstance(answer, str)
    )


def _normal(numbers):
    if numbers is None:
        return None
    sides = tuple(
        frozenset((axes,) if isinstance(axes, int) else axes) for axes in numbers[:2]
    )
    return (*sides, *numbers[2:])


def _leaves(line: str) -> list[Leaf]:
    path, shape, *rest = line.split()
    dtype = (
        rest.pop(0)
        if rest and re.match(r"(b?float|u?int|complex|bool)", rest[0])
        else "float32"
    )
    sizes = () if shape == "scalar" else tuple(map(int, shape.split("x")))
    right = tuple(map(_answer, rest[0].split("|"))) if rest else (None,)
    pieces = re.split(r"\{([^}]*)\}", path)
    choices = [piece.split(",") if i % 2 else [piece] for i, piece in enumerate(pieces)]
    return [
        Leaf("".join(names), sizes, dtype, right)
        for names in itertools.product(*choices)
    ]


def _answer(text: str):
    if text == "warn":
        return text
    numbers = numbers_of(text)
    assert numbers is not None or text == "Adam", f"{text} is no answer"
    return numbers
