"""Remove the axes that count layers: they belong to a whole module, and not to one leaf.

In a stack of layers, as `nn.scan` or `nnx.vmap` make it, every parameter below the scanned module
has one axis more than a layer's, at the same position and of the same size. A norm's scale (L, d),
a bias whose shape is not the end of its kernel's, or a Dense kernel of three axes shows that there
is a stack; its axis is the only position at which all parameters of the module agree.
"""

from collections import defaultdict
from collections.abc import Sequence

from muonjax._names.neighbors import Neighbors
from muonjax._names.roles import Parameter


def unstack(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Remove the axes that count layers, again and again where scans are nested.

    Args:
      parameters: Every leaf of the tree.

    Returns:
      The same leaves with the shapes and axes of one layer; `stacked` stays True where the axis
      can't be told.
    """
    current = list(parameters)
    while True:
        neighbors = Neighbors(current)
        previous = []
        for p in current:
            previous.append(p._replace(stacked=_is_stacked(p, neighbors)))
        # They come module by module, and go back in the order of the tree.
        layers = {p.path: p for p in _layers(previous, 0)}
        current = [layers[p.path] for p in previous]
        if current == previous:
            return current


def _is_stacked(p: Parameter, neighbors: Neighbors) -> bool | None:
    """True for a stack, False for one layer, None where it can't be told from this leaf alone."""
    bias = neighbors.bias(p) or ()
    # A stack's bias has an axis of layers too.
    if len(bias) == 1 and p.rank > 1 and bias[0] in p.shape:
        return False
    # Queries that are grouped by key head have an axis more than their keys.
    keys = neighbors.attention(p).get("key", ())
    has_groups = p.role.projection in ("query", "out") and p.rank == 4
    if has_groups and len(keys) == 3:
        return None
    ranks = p.role.ranks
    if ranks and p.rank > max(ranks):
        return True
    return False if p.rank == min(ranks, default=0) else None


def _layers(parameters: Sequence[Parameter], depth: int) -> list[Parameter]:
    """Remove an axis from the outermost modules in which a leaf shows a stack and none a single layer."""
    verdicts = {p.stacked for p in parameters}
    if True in verdicts and False not in verdicts:
        layers = _without_common_axis(parameters)
        if layers is not None:
            return layers
    if len(parameters) == 1:
        return list(parameters)
    # The module as a whole has no common axis, but a module inside of it may have one.
    modules: dict[str, list[Parameter]] = defaultdict(list)
    for p in parameters:
        name = "".join(p.path[depth : depth + 1])
        modules[name].append(p)
    layers = []
    for inside in modules.values():
        layers += _layers(inside, depth + 1)
    return layers


def _without_common_axis(parameters: Sequence[Parameter]) -> list[Parameter] | None:
    """Remove the axis of layers, or nothing if two axes fit equally well; None if no axis fits."""
    common_axes = _common_axes(parameters)
    if not common_axes:
        return None
    # Square layers fit in more than one way; there are fewer layers than features.
    count = min(common_axes.values())
    fits = [axes for axes, size in common_axes.items() if size == count]
    # A kernel alone is a stack on its first axis only; one of an attention may be
    # (d, groups, heads, size).
    is_alone = len(parameters) == 1
    has_other_reading = parameters[0].role.projection or any(axes[0] for axes in fits)
    if is_alone and has_other_reading:
        return None
    # Vectors stay vectors whichever axis is removed, but matrices would differ.
    has_matrix = any(p.role.muon for p in parameters)
    if len(fits) > 1 and has_matrix:
        return list(parameters)
    layers = []
    for p, axis in zip(parameters, fits[0], strict=True):
        layers.append(_without(p, axis))
    return layers


def _common_axes(parameters: Sequence[Parameter]) -> dict[tuple[int, ...], int]:
    """The size of each position, from the front or the back, at which all parameters have the same size."""
    shortest = min(p.rank for p in parameters)
    sizes: dict[tuple[int, ...], int] = {}
    for position in [*range(shortest), *range(-shortest, 0)]:
        counts = {p.shape[position] for p in parameters}
        if len(counts) == 1:
            axes = tuple(position % p.rank for p in parameters)
            sizes[axes] = counts.pop()
    return sizes


def _without(p: Parameter, axis: int) -> Parameter:
    shape = p.shape[:axis] + p.shape[axis + 1 :]
    axes = p.axes[:axis] + p.axes[axis + 1 :]
    return p._replace(shape=shape, axes=axes, stacked=None)
