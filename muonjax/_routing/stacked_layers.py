"""Before the first step: which axis of a parameter enumerates layers, as `nn.scan` and `nnx.vmap` stack them.

A stack of layers has one axis more than a layer, in every parameter below the scanned module, at the same
place and of the same size. A norm's scale (L, d), a bias that isn't the tail of its kernel's shape, or a
Dense kernel of three axes gives it away; the place is the only one at which all of the module's parameters
agree.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from muonjax._routing.roles import Role, module, unit


class Parameter(NamedTuple):
    """A leaf as one layer sees it.

    Attributes:
      path: names from the root.
      role: what it is in its layer.
      shape: its shape in one layer.
      axes: for each axis of `shape`, where it lies in the leaf itself.
      leaf_shape: its shape as it is stored.
      stacked: True where more axes enumerate layers, but which ones can't be told.
    """

    path: tuple[str, ...]
    role: Role
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    leaf_shape: tuple[int, ...]
    stacked: bool | None = None


def unstack(parameters: Sequence[Parameter], scan_axis: int | None = None) -> list[Parameter]:
    """Removes the axes that enumerate layers, again and again where scans are nested.

    Args:
      parameters: every leaf of the tree.
      scan_axis: where the layers lie, counted on the stacked leaf (negative: from its end); None: find out.

    Returns:
      The same leaves with the shapes and axes of one layer.

    Raises:
      ValueError: two places fit equally well.
    """
    current = list(parameters)
    while True:
        verdicts = _verdicts(current)
        current = [p._replace(stacked=v) for p, v in zip(current, verdicts, strict=True)]
        peeled = {p.path: p for p in _peel(current, 0, scan_axis)}
        following = [peeled[p.path] for p in current]
        if following == current:
            return current
        current = following


def _verdicts(parameters: Sequence[Parameter]) -> list[bool | None]:
    """For each leaf: True, it is a stack; False, it is one layer's; None, it can't tell by itself."""
    biases = {module(p.path): p.shape for p in parameters if p.role.name == "bias"}
    attentions: dict[tuple[str, ...], dict[str, tuple[int, ...]]] = {}
    for p in parameters:
        if p.role.kind:
            attentions.setdefault(unit(p.path)[0], {})[p.role.name] = p.shape

    def verdict(p: Parameter) -> bool | None:
        ranks, rank = p.role.ranks, len(p.shape)
        bias = biases.get(module(p.path)) if p.role.muon else None
        if ranks and rank > max(ranks):
            return True
        if ranks and rank == min(ranks):
            return False
        if bias and rank > len(bias) > 1 and p.shape[-len(bias) :] != bias:
            return True
        if p.role.kind and rank == 3:
            agree = _heads_agree(attentions[unit(p.path)[0]])
            return None if agree is None else not agree
        return None

    return [verdict(p) for p in parameters]


def _heads_agree(attention: dict[str, tuple[int, ...]]) -> bool | None:
    """Whether (d, heads, size) and (heads, size, d) fit together; None where one side is missing or flat."""
    query, out = attention.get("attention query", ()), attention.get("attention output", ())
    value = attention.get("attention value", ())
    if not len(query) == len(out) == 3:
        return None
    # A value's heads may be of another size than the query's, and fewer.
    return out[0] == query[1] and (len(value) != 3 or out[1] == value[2])


def _peel(parameters: Sequence[Parameter], depth: int, scan_axis: int | None) -> list[Parameter]:
    """Takes one stack axis off the outermost modules in which every witness speaks for a stack."""
    verdicts = {p.stacked for p in parameters}
    whole, likely = None, False
    if True in verdicts and False not in verdicts:
        whole, likely = _peel_together(parameters, scan_axis)
    if whole is not None and (likely or len(parameters) == 1):
        return whole
    if len(parameters) == 1:
        return list(parameters)
    children: dict[str, list[Parameter]] = {}
    for p in parameters:
        children.setdefault(p.path[depth] if depth < len(p.path) else "", []).append(p)
    apart = {q.path: q for child in children.values() for q in _peel(child, depth + 1, scan_axis)}
    if whole is not None:
        # 768 layers of width 12? Rather 12 layers beside another stack of 6, if both agree on the axis.
        taken = {min(set(p.axes) - set(apart[p.path].axes), default=-1) for p in parameters}
        if len(taken) > 1 or -1 in taken:
            return whole
    return [apart[p.path] for p in parameters]


def _peel_together(
    parameters: Sequence[Parameter], scan_axis: int | None
) -> tuple[list[Parameter] | None, bool]:
    """All of these without the one axis at which they can have their layers, and whether that is likely."""
    if len(parameters) == 1 and parameters[0].role.kind and scan_axis is None:
        return (
            None,
            False,
        )  # (d, groups, heads, size)? One attention kernel of rank four alone proves no stack.
    ranks = [len(p.shape) for p in parameters]
    deepest = max(ranks)
    fits: dict[tuple[int, ...], tuple[int, list[Parameter]]] = {}
    for axis in [*range(deepest), *range(-deepest, 0)] if scan_axis is None else [scan_axis]:
        where = tuple(axis if axis >= 0 else rank + axis for rank in ranks)
        if not all(0 <= i < rank for i, rank in zip(where, ranks, strict=True)):
            continue
        sizes = {p.shape[i] for p, i in zip(parameters, where, strict=True)}
        layer = [_without(p, i) for p, i in zip(parameters, where, strict=True)]
        if len(sizes) == 1 and _is_layer(layer):
            fits.setdefault(where, (sizes.pop(), layer))
    if not fits:
        return None, False
    # Square layers fit in more than one way; there are fewer layers than features.
    best = sorted(fits.values(), key=lambda fit: fit[0])
    count, layer = best[0]
    if len(best) > 1 and count == best[1][0]:
        p = max(parameters, key=lambda p: len(p.shape))
        raise ValueError(
            "dimension_numbers(params) finds stacked layers, but not their axis: several "
            f"of size {count} fit {'/'.join(p.path)!r} of shape {p.leaf_shape} and its neighbours; "
            "give scan_axis=0 (or another axis), or rules."
        )
    return layer, scan_axis is not None or all(count <= math.prod(p.shape) for p in layer if p.shape)


def _is_layer(parameters: Sequence[Parameter]) -> bool:
    """Whether these could be the parameters of one layer: biases and heads fit."""
    biases = {module(p.path): p.shape for p in parameters if p.role.name == "bias"}
    attentions: dict[tuple[str, ...], dict[str, tuple[int, ...]]] = {}
    for p in parameters:
        bias = biases.get(module(p.path)) if p.role.muon else None
        if bias and bias not in (p.shape[-len(bias) :], p.shape[:-2] + p.shape[-1:]):
            return False
        if p.role.kind:
            attentions.setdefault(unit(p.path)[0], {})[p.role.name] = p.shape
    return all(_heads_agree(attention) is not False for attention in attentions.values())


def _without(p: Parameter, i: int) -> Parameter:
    return p._replace(shape=p.shape[:i] + p.shape[i + 1 :], axes=p.axes[:i] + p.axes[i + 1 :], stacked=None)
