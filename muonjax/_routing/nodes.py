"""Read what the nodes of a tree say: tables by their module's type, and dimension numbers by the names of axes.

Equinox's modules tell the former, Haliax's and penzai's named arrays the latter. None of these libraries is imported:
an array counts as named if it has `axes` with names and sizes, or `named_axes`.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax

from muonjax._matrix_view import DimensionNumbers, MuonDimensionNumbers, one_or_several
from muonjax._routing.roles import EMBEDDING, Role, layer_of
from muonjax._trees import is_masked, names

_BATCH = r"\w*(layers?|blocks?|stack\w*|scan\w*|experts?|qkv|kv|gate_up)"
_HEAD = r"\w*(head|q_per|group|projection)\w*"
_HEAD_SIZE = r"(\w*_)?(head_?(size|dim)|projection)"
_DOWN = r"(\w+_)?(down|wo|o|out|output|c_proj|fc2|w2|linear2)(_\w+)?"
_TABLE = r"\w*(vocab|position|pos)\w*"


def tables(params: Any) -> dict[str, Role]:
    """Paths of the parameters of modules whose type is called Embedding or Embed, as Equinox calls them."""

    def is_table(node: Any) -> bool:
        return type(node).__name__ in ("Embedding", "Embed") and not is_masked(node)

    return {
        "/".join(names((*path, *below))): EMBEDDING
        for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_table)
        if is_table(node)
        for below, _ in jax.tree_util.tree_leaves_with_path(node)
    }


def named_axes(params: Any) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Path of each leaf inside a named array to the names of its axes, in order, in lower case."""
    found = {}
    for path, node in jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda x: is_masked(x) or _names_of(x) is not None
    ):
        axes = None if is_masked(node) else _names_of(node)
        if axes is not None:
            for below, _ in jax.tree_util.tree_leaves_with_path(node):
                found[names((*path, *below))] = axes
    return found


def _names_of(node: Any) -> tuple[str, ...] | None:
    axes = getattr(node, "axes", None)
    if hasattr(node, "array") and isinstance(axes, tuple) and all(hasattr(a, "name") for a in axes):
        return tuple(a.name.lower() for a in axes)
    named = getattr(node, "named_axes", None)
    if isinstance(named, Mapping) and not getattr(node, "positional_shape", ()):
        return tuple(str(name).lower() for name in named)
    return None


def by_axis_names(
    path: tuple[str, ...], role: Role, axes: tuple[str, ...], attention: str
) -> tuple[DimensionNumbers | None, str]:
    """The matrices of a leaf whose axes have names."""
    batch = [i for i, name in enumerate(axes) if re.fullmatch(_BATCH, name)]
    inner = [i for i in range(len(axes)) if i not in batch]
    if not role.muon:
        return None, role.name
    if any(re.fullmatch(_TABLE, name) for name in axes):
        return None, "embedding or output head: an axis of the vocabulary or of positions"
    if len(inner) < 2:
        return None, "vector" if inner else "scalar"
    # A layer goes from the model's axis to those of heads or of the hidden layer, or, as an output, back.
    heads = [i for i in inner if re.fullmatch(_HEAD, axes[i])]
    model = [i for i in inner if (i not in heads if heads else re.search(r"embed|hidden|model", axes[i]))]
    wide = [i for i in inner if i not in model]
    if not model or not wide:
        model, wide = inner[:-1], inner[-1:]
    is_down = role.kind == "out" or bool(re.fullmatch(_DOWN, layer_of(path)[1]))
    if heads and attention == "heads" and not is_down:
        wide = [i for i in wide if re.fullmatch(_HEAD_SIZE, axes[i])] or wide
    rows, outputs = (wide, model) if is_down else (model, wide)
    numbers = MuonDimensionNumbers(one_or_several(rows), one_or_several(outputs))
    return numbers, f"{role.name}, by the names of its axes"
