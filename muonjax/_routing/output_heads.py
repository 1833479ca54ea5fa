"""Find the layers at the two ends of a model, which belong to Adam: patch embeddings and output heads.

An output head is known by its name, by the vocabulary (a kernel [d, vocabulary] beside an embedding [vocabulary, d]),
or because it is an end: no other parameter takes what it gives. The last is asked only of a plain dense kernel that is
one of its kind and in no block, and whose output is no multiple of a width that others take (then it may be split or
reshaped before use).
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from muonjax._matrix_view import DimensionNumbers
from muonjax._routing.roles import (
    DENSE,
    UNKNOWN,
    head_module,
    is_head_scope,
    is_position,
    is_under_embedding,
    module,
    unit,
    words,
)
from muonjax._routing.siblings import Parameter, is_trailing_window, is_weight, is_window

Path = tuple[str, ...]


def is_input_patches(p: Parameter) -> bool:
    """Whether a convolution's kernel cuts an image or a video into patches.

    Its window is even, and it is named for an embedding, or it is large and sees few channels.
    """
    if len(p.shape) not in (4, 5):
        return False
    *window, inputs, outputs = p.shape
    if is_weight(p) and is_trailing_window(p.shape) and not is_window(p.shape):
        outputs, inputs, *window = p.shape
    elif not is_window(p.shape):
        return False
    if window[-1] % 2:
        return False
    large = window[-1] >= 8 and inputs <= 4 and outputs >= 128
    return large or (is_under_embedding(p.path) and inputs <= 16)


def output_heads(
    parameters: Sequence[Parameter], decided: Mapping[Path, DimensionNumbers | None]
) -> dict[Path, str]:
    """Paths of kernels that are output heads though no name says so, and why."""
    tables = [
        p for p in parameters if p.role.name == "embedding" and len(p.shape) == 2 and not is_position(p.path)
    ]
    dense = [
        p
        for p in parameters
        if decided[p.path] is not None and p.role in (DENSE, UNKNOWN) and len(p.shape) == 2
    ]
    found = {p.path: "output head: maps to the vocabulary" for p in dense if _is_vocabulary(p, tables)}
    taken, given = _taken(parameters, decided), _given(parameters, decided)
    heads: dict[Path, list[Parameter]] = {}
    for p in parameters:
        heads.setdefault(head_module(p.path), []).append(p)
    taken_in = {head: _taken(inner, decided) if head else taken for head, inner in heads.items()}
    alike = Counter((_without_numbers(p.path), p.shape) for p in parameters)
    layers = Counter((re.sub(r"\d+", "#", "/".join(words(p.path))), p.shape) for p in parameters)
    numbered = Counter(unit(p.path) for p in dense)
    for p in dense:
        rows, columns = (p.shape[axes] for axes in decided[p.path][:2])  # pyright: ignore
        several = layers[re.sub(r"\d+", "#", "/".join(words(p.path))), p.shape] > 2  # a list of equal layers
        plain = alike[_without_numbers(p.path), p.shape] == 1 and len(p.leaf_shape) == 2 and not several
        in_head = head_module(p.path) and len(p.leaf_shape) == 2  # there may be one for each layer
        tied = [
            t for t in tables if t.shape == p.shape == (columns, rows) and unit(t.path)[0] == unit(p.path)[0]
        ]
        if plain and tied and columns not in taken and rows != columns:  # stored (out, in), as the table
            found[p.path] = "output head: maps to the vocabulary"
        if p.path in found or not (plain or in_head) or columns in taken_in[head_module(p.path)]:
            continue
        if not (given[rows] or taken[rows] > 1 or any(rows % size == 0 for size in given if size >= 16)):
            continue  # nothing leads to it: a layer alone is no head
        if (
            in_head
            or _is_after_last_norm(p, parameters)
            or (
                not _is_in_block(p.path)
                and not re.search(r"att(n|en)", "/".join(words(p.path)).lower())
                and not _SPLIT.fullmatch(unit(p.path)[1])
                and not (_HIDDEN.fullmatch(unit(p.path)[1]) and numbered[unit(p.path)] == 1)
                and not any(columns % size == 0 for size in taken if size >= 16)
            )
        ):
            found[p.path] = "output head: no other parameter takes its output"
    return found


def _is_after_last_norm(p: Parameter, parameters: Sequence[Parameter]) -> bool:
    """Whether this is the only dense layer at the root of the model, without a telling name, beside a norm of what it
    takes: the head, though its width is a multiple of another's."""
    root, name = unit(p.path)
    if name not in ("dense", "linear", "fc", "out", "output") or any(
        words(q.path)[: len(root)] != root for q in parameters
    ):
        return False
    beside = [q for q in parameters if module(q.path)[:-1] == root and q.path != p.path]
    norms = [q for q in beside if q.role.name == "scale" and q.shape == p.shape[:1]]
    return bool(norms) and not any(q.role in (DENSE, UNKNOWN) and len(q.shape) > 1 for q in beside)


# Their output may be split before use.
_SPLIT = re.compile(r"(\w+_)?(up|gate|wi|w[123]|w[qkv]\w*|router|in|a|x|embed\w*|emb)(_\w+)?")
# No end of a model, unless it is one of a numbered list, as Brax's last `hidden_3` is.
_HIDDEN = re.compile(r"(\w+_)?(mlp|ffn?\w*|ffw|intermediate|hidden|down|wo)(_\w+)?")


def _taken(parameters: Sequence[Parameter], decided: Mapping[Path, DimensionNumbers | None]) -> Counter:
    """Widths that a parameter takes, and how many do: the rows of kernels, and norms."""
    taken: Counter = Counter()
    for p in parameters:
        numbers = decided[p.path]
        if p.role.name in ("scale", "embedding") and p.shape:
            taken[p.shape[-1]] += 1
        elif p.role.name == "output head" and len(p.shape) == 2:
            taken[p.shape[0]] += 1
        elif numbers is not None:
            sizes = [p.shape[axis] for axis in _axes(numbers.reduction_axis)]
            taken.update({*sizes, math.prod(sizes)})
    return taken


def _given(parameters: Sequence[Parameter], decided: Mapping[Path, DimensionNumbers | None]) -> Counter:
    """Widths that a parameter gives, and how many do: the columns of kernels, norms, embeddings."""
    given: Counter = Counter()
    for p in parameters:
        numbers = decided[p.path]
        if p.role.name in ("scale", "embedding") and p.shape:
            given[p.shape[-1]] += 1
        elif numbers is not None:
            given[math.prod(p.shape[axis] for axis in _axes(numbers.output_axis))] += 1
    return given


def _axes(axes: int | Sequence[int]) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)


def _is_in_block(path: Path) -> bool:
    """Whether an outer module of the leaf's is one of a numbered list, `layers/0` or `block_3`; a `Block_0` that may be
    the only one is none, unless its name says layer or block without Flax's capitals."""
    outer = [name for name in module(path)[:-1] if re.search(r"\d$", name)]
    alone = [
        re.fullmatch(r"\D+_0", name) and not re.fullmatch(r"(\w*_)?(layers?|blocks?)_0", name)
        for name in outer
    ]
    return len(words(path)) > 2 and not all(alone)


def _without_numbers(path: Path) -> str:
    """The path with the numbers of its outer modules left out: equal in all blocks of a list."""
    return re.sub(r"\d+", "#", "/".join(words(path)[:-2])) + "/" + "/".join(words(path)[-2:])


def _is_vocabulary(p: Parameter, tables: Sequence[Parameter]) -> bool:
    """Whether a kernel [d, vocabulary] undoes an embedding [vocabulary, d]: beside it, or inside a head."""
    scope = unit(p.path)[0]
    for table in tables:
        transposed = p.shape == table.shape[::-1] and p.shape[0] != p.shape[1]
        beside = scope == unit(table.path)[0] or scope == words(table.path)[:-2]
        if (transposed and beside) or (p.shape[1] == table.shape[0] and is_head_scope(p.path[:-1])):
            return True
    return False
