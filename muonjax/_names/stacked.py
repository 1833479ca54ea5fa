"""Find and remove the axes that count layers in parameters that `nn.scan` or `nnx.vmap` stacked.

In a stack of layers every parameter below the scanned module has one axis more than in a layer, at the same position
and of the same size. A norm's scale (L, d), a bias whose shape is not the end of its kernel's shape, or a Dense kernel
of three axes shows that there is a stack; its axis is the only position at which all parameters of the module agree.
"""

import math
from collections.abc import Sequence

from muonjax._names.neighbors import Neighbors, is_outputs_first_convolution, is_window
from muonjax._names.roles import Parameter


def unstack(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Remove the axes that count layers, again and again where scans are nested.

    Args:
      parameters: Every leaf of the tree.

    Returns:
      The same leaves with the shapes and axes of one layer; `stacked` stays True where the axis can't be told.
    """
    current = list(parameters)
    while True:
        neighbors = Neighbors(current)
        current = [p._replace(stacked=_verdict(p, neighbors)) for p in current]
        peeled = {p.path: p for p in _peel(current, 0)}
        before, current = current, [peeled[p.path] for p in current]
        if current == before:
            return current


def _verdict(p: Parameter, neighbors: Neighbors) -> bool | None:
    """True for a stack, False for one layer, None where it can't be told from this leaf alone."""
    rank, ranks, bias = len(p.shape), p.role.ranks, neighbors.bias(p)
    if bias and len(bias) == 1 and rank > 1 and bias[0] in p.shape:
        return False  # a stack's bias has an axis of layers too
    if (
        p.role.projection in ("query", "out")
        and rank == 4
        and len(neighbors.attention(p).get("key", ())) == 3
    ):
        return None  # queries grouped by key head
    if not p.role.muon and sum(size > 1 for size in p.shape) <= 1 < rank and 1 in ranks:
        return None  # a norm's scale stored as (1, 1, 1, 64), or a stack of one
    is_convolution = is_window(p.shape) or is_outputs_first_convolution(p, neighbors)
    if p.role.muon and not p.role.projection and rank > 3 and is_convolution:
        return None
    return True if rank > max(ranks, default=rank) else False if rank == min(ranks, default=0) else None


def _peel(parameters: Sequence[Parameter], depth: int) -> list[Parameter]:
    """Remove one axis of layers from the outermost modules where some leaf shows a stack and none a single layer."""
    verdicts = {p.stacked for p in parameters}
    if True in verdicts and False not in verdicts and (together := _peel_together(parameters)):
        return together
    if len(parameters) == 1:
        return list(parameters)
    children: dict[str, list[Parameter]] = {}
    for p in parameters:
        children.setdefault(p.path[depth] if depth < len(p.path) else "", []).append(p)
    return [p for child in children.values() for p in _peel(child, depth + 1)]


def _peel_together(parameters: Sequence[Parameter]) -> list[Parameter] | None:
    """The parameters without their common axis of layers; as they are if two axes fit equally well; None if none
    fits."""
    ranks = [len(p.shape) for p in parameters]
    fits: dict[tuple[int, ...], int] = {}
    for axis in [*range(max(ranks)), *range(-max(ranks), 0)]:
        where = tuple(axis if axis >= 0 else rank + axis for rank in ranks)
        if all(0 <= i < rank for i, rank in zip(where, ranks, strict=True)):
            sizes = {p.shape[i] for p, i in zip(parameters, where, strict=True)}
            if len(sizes) == 1:
                fits[where] = sizes.pop()
    if not fits:
        return None
    count = min(fits.values())  # square layers fit in more than one way; there are fewer layers than features
    best = [where for where, size in fits.items() if size == count]
    # A kernel alone is a stack only on its first axis, one of an attention may be (d, groups, heads, size).
    if len(parameters) == 1 and (parameters[0].role.projection or any(where[0] for where in best)):
        return None
    if len(best) > 1 and any(p.role.muon for p in parameters):
        return list(parameters)
    layer = [_without(p, i) for p, i in zip(parameters, best[0], strict=True)]
    # Not 32 layers of width 3 but 3 of width 32.
    return layer if all(count <= math.prod(p.shape) for p in layer if math.prod(p.shape) > 1) else None


def _without(p: Parameter, i: int) -> Parameter:
    return p._replace(shape=p.shape[:i] + p.shape[i + 1 :], axes=p.axes[:i] + p.axes[i + 1 :], stacked=None)
