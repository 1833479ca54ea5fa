"""How the right answers are written, and how a program's are compared with them.

A parameter:

    0>1          axis 0 are a matrix's rows, axes 1 and 2 its columns (0>1,2); all other axes count matrices
    0>1/3@1      three equal parts on axis 1; 0>1/16,4,4@1 parts of these sizes; 0>1/4x16,4,4@1 four times one after
                 the other
    added ...    Adam: the words with which the reason begins; "added|a learned input" allows two

An attention, `*` for the part of its parameters' paths that differs between layers:

    query q/kernel@1 4x16; key qkv/kernel@1 4x16+64
    refused: a clip would not scale

of each parameter the axis that holds the heads (1,2 for two of them), how many there are, how many entries each has,
at which position the first begins (+64), how far apart they are if not side by side (/48), and the only positions of
other axes that count (0:8@2).
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from optax.contrib import MuonDimensionNumbers

import muonjax
from tests.inspect.library_models.model import Model, shapes_of

PARAMETER = re.compile(r"([\d,]+)>([\d,]+)(?:/(?:(\d+)x)?([\d,]+)@(\d+))?")


USUAL = {  # what a model says nothing else of
    "*{embedding,embeddings}": "looked up",
    "*{scale,gamma}": "multiplied entry by entry",
    "*norm/weight": "multiplied entry by entry",
    "*{bias,beta,offset}": "added",
    "*/b": "added",
    "*kernel": "0>1",
    "*/w": "0>1",
}


def expected_leaves(
    model: Model, patterns: Mapping[str, str], every: bool = True
) -> dict[str, str]:
    """The right answer for each path; with `every`, each pattern of the model's own is of use."""
    paths = shapes_of(model.params)
    found = {}
    used = set()
    answers = {**USUAL, **patterns}
    order = [*patterns, *USUAL]
    for path in paths:
        pattern = next((p for p in order if re.fullmatch(_regex(p), path)), None)
        assert pattern is not None, f"no answer is written for {path}"
        used.add(pattern)
        found[path] = answers[pattern]
    unused = sorted(set(patterns) - used)
    assert not every or not unused, f"no parameter is {unused}"
    return found


def _regex(pattern: str) -> str:
    """Patterns of a shell: `*` for anything, `{a,b}` for one of several."""
    pieces = re.split(r"(\*|\{[^}]*\})", pattern)
    return "".join(
        ".*"
        if x == "*"
        else f"(?:{'|'.join(map(re.escape, x[1:-1].split(',')))})"
        if x[:1] == "{"
        else re.escape(x)
        for x in pieces
    )


def is_right(numbers, why: str | None, answer: str, shape: Sequence[int]) -> bool:
    """Whether dimension numbers, or None and the reason, are this answer.

    Rows and columns may be exchanged, axes of one entry are on both sides, and a reason of None is not looked at.
    """
    return any(
        _is_this(numbers, why, alternative, shape) for alternative in answer.split("|")
    )


def _is_this(numbers, why: str | None, answer: str, shape: Sequence[int]) -> bool:
    wanted = numbers_of(answer)
    if wanted is None or numbers is None:
        return numbers is wanted and (why is None or why.startswith(answer))
    turned = wanted._replace(
        reduction_axis=wanted.output_axis, output_axis=wanted.reduction_axis
    )
    return _normal(numbers, shape) in (
        _normal(wanted, shape),
        _normal(turned, shape),
    )


def numbers_of(answer: str):
    """Dimension numbers, None for Adam."""
    match = PARAMETER.fullmatch(answer)
    if match is None:
        return None
    rows, columns = (tuple(map(int, axes.split(","))) for axes in match.group(1, 2))
    if match[4] is None:
        return MuonDimensionNumbers(rows, columns)
    sizes = tuple(map(int, match[4].split(",")))
    parts = (
        (len(sizes) if len(set(sizes)) == 1 else sizes) if len(sizes) > 1 else sizes[0]
    )
    repeats = () if match[3] is None else (int(match[3]),)
    return muonjax.FusedDimensionNumbers(rows, columns, parts, int(match[5]), *repeats)


def _normal(numbers, shape: Sequence[int]):
    both = ((axes,) if isinstance(axes, int) else axes for axes in numbers[:2])
    sides = tuple(frozenset(axis for axis in axes if shape[axis] > 1) for axes in both)
    return (*sides, *numbers[2:])


Heads = dict[
    tuple[str, str], np.ndarray
]  # factor and path of a parameter: which head each entry belongs to


def expected_attention(model: Model, line: str) -> Heads | str:
    """For each parameter the number of the head that an entry belongs to, from 1; 0 outside. Or a refusal's words."""
    if line.startswith("refused: "):
        return line.removeprefix("refused: ")
    shapes = shapes_of(model.params)
    heads: Heads = {}
    for text in line.split("; "):
        factor, where, count_width, *others = text.split()
        path, axis = where.rsplit("@", 1)
        count, width, start, stride = re.fullmatch(
            r"(\d+)x(\d+)(?:\+(\d+))?(?:/(\d+))?", count_width
        ).groups()
        grid = np.zeros(shapes[path], int)
        axes = [int(a) for a in axis.split(",")]
        for head, offset in itertools.product(range(int(count)), range(int(width))):
            position = int(start or 0) + head * int(stride or width) + offset
            index: list[Any] = [slice(None)] * grid.ndim
            for a, at in zip(
                axes,
                np.unravel_index(position, [grid.shape[a] for a in axes]),
                strict=True,
            ):
                index[a] = at
            for other in others:
                low, high, along = re.split("[:@]", other)
                index[int(along)] = slice(int(low), int(high))
            grid[tuple(index)] = head + 1
        heads[factor, path] = heads.get((factor, path), 0) + grid
    return heads


def found_attention(params, attention) -> Heads | str:
    """What a program says of an attention, in the same form."""
    if attention.site is None:
        return attention.problem
    shapes = shapes_of(params)
    heads: Heads = {}
    for scale in attention.site.scales:
        grid = _grid(shapes[scale.path], scale, attention.site.scan_axis or ())
        key = (scale.factor, scale.path)
        heads[key] = heads.get(key, 0) + grid
    return heads


def _grid(shape: tuple[int, ...], scale, stack: tuple[int, ...]) -> np.ndarray:
    """A `Scale`'s own words: flatten the axes, take runs of equal length, and of each run the span."""
    own = [axis for axis in range(len(shape)) if axis not in stack]
    held = [own[axis] for axis in scale.axes]
    total = int(np.prod([shape[axis] for axis in held]))
    groups = np.arange(total).reshape(scale.groups, -1)[:, slice(*scale.part)]
    runs = groups.reshape(scale.entries, -1)[:, slice(*scale.span)]
    flat = np.zeros(total, int)
    for head, run in enumerate(runs, start=1):
        flat[run] = head
    grid = flat.reshape([shape[axis] for axis in held])
    order = sorted(range(len(held)), key=held.__getitem__)
    grid = grid.transpose(order).reshape(
        [n if axis in held else 1 for axis, n in enumerate(shape)]
    )
    return np.broadcast_to(grid, shape)


def same_heads(found: Heads | str, wanted: Heads | str) -> bool:
    if isinstance(wanted, str) or isinstance(found, str):
        return (
            isinstance(wanted, str)
            and isinstance(found, str)
            and found.startswith(wanted)
        )
    return found.keys() == wanted.keys() and all(
        (found[key] == wanted[key]).all() for key in wanted
    )


def said(heads: Heads | str) -> str:
    """For a failing test."""
    if isinstance(heads, str):
        return f"refused: {heads}"
    parts = (
        f"{factor} {path} {grid.max()}x{(grid == 1).sum()}"
        for (factor, path), grid in heads.items()
    )
    return "; ".join(parts)
