"""Remove the axes that count layers: they belong to a whole module, and not to one leaf.

In a stack of layers, as `nn.scan` or `nnx.vmap` make it, every parameter below the scanned module
has one axis more than a layer's, at the same position and of the same size. A norm's scale (L, d)
or a Dense kernel of three axes shows that there is a stack; its axis is the only position at which
all parameters of the module agree.
"""

from collections import defaultdict
from collections.abc import Sequence

from muonjax._names.neighbors import Neighbors
from muonjax._names.roles import Parameter


def unstack(parameters: list[Parameter]) -> list[Parameter]:
    """Remove the axes that count layers, again and again where scans are nested,
    and then the axis that counts parts.

    A stack of a kernel [6, 32, 80], its bias [6, 80] and a norm's scale [6, 32] becomes one layer's
    [32, 80], [80] and [32].

    Args:
      parameters: Every leaf of the tree.

    Returns:
      The same leaves with the axes of one layer. A leaf whose axis of layers can't be told keeps
      it; the function `has_axis_of_layers` tells such a leaf by its number of axes.
    """
    # Each round looks for stacks from the root of the tree down and takes one axis from each, until
    # a round finds none. The neighbors are read anew, as a bias has one axis less then too.
    while (unstacked := _layers(parameters, Neighbors(parameters))) != parameters:
        parameters = unstacked
    # Queries, keys and values [3, d, heads, size] become the queries [d, heads, size].
    return list(map(_one_part, parameters))


def has_axis_of_layers(p: Parameter, neighbors: Neighbors) -> bool | None:
    """Whether a leaf has an axis of layers, by its number of axes; None if it may or may not.

    A dense kernel of three axes is a stack, one of two axes is not. A query of three axes may be
    [d, heads, size], or a stack of [d, heads·size].
    """
    bias = neighbors.bias(p) or ()
    # In a stack the bias has an axis of layers too. So a kernel [32, 80] with a bias [80] is one
    # layer's, and so is this bias, for which `neighbors.bias` returns its own shape. A vector of
    # another length is not the bias of this kernel, and tells nothing.
    if len(bias) == 1 and bias[0] in p.shape:
        return False
    # By the ranks of its role a query of four axes is a stack. But one that is grouped by key head,
    # [d, groups, heads, size], has four too, as has the output after it.
    if p.role.projection in ("query", "out") and p.rank == 4:
        return None
    # The role tells how many axes one layer's parameter may have: (2, 2) for a dense kernel, (2, 3)
    # for a query, any number for a bias. With more axes the leaf is a stack. With the least it is
    # none, as a layer of it would have too few. With any other number it may be one.
    least, most = p.role.ranks
    if p.rank > most:
        return True
    return False if p.rank == least else None


def _layers(
    parameters: Sequence[Parameter], neighbors: Neighbors, depth: int = 0
) -> list[Parameter]:
    """One layer of each leaf in a module: without one axis of layers if the module is a stack
    (nested scans take several calls), else as it is.

    A module is a stack if one of its leaves must be a stack, all others may be, and all have an
    axis of the same size at the same position. In any other module, the modules inside of it are
    tried in turn. The parameters are all below the same `depth` keys of the tree, which are those
    of the module; the root has none.
    """
    # `has_axis_of_layers` goes by a leaf's number of axes and by the shape of its bias, which
    # `neighbors` knows. None, for a leaf that may or may not be a stack, fits either answer.
    verdicts = {has_axis_of_layers(p, neighbors) for p in parameters}
    if True in verdicts and False not in verdicts:
        layers = _without_common_axis(parameters)
        # None if they are no stack after all. If two axes fit equally well, the leaves come back as
        # they are, and the modules inside of the stack are not tried.
        if layers is not None:
            return layers
    # A single leaf has no modules inside: it would come back as it is at every depth.
    if len(parameters) == 1:
        return list(parameters)
    # By one key more of the tree
    modules: dict[tuple[str, ...], list[Parameter]] = defaultdict(list)
    for p in parameters:
        modules[p.keys[: depth + 1]].append(p)
    layers = []
    for inside in modules.values():
        layers += _layers(inside, neighbors, depth + 1)
    return layers


def _without_common_axis(parameters: Sequence[Parameter]) -> list[Parameter] | None:
    """The leaves without the axis that counts layers; None if they have no axis in common,
    and so are no stack.

    Kernels [6, 32, 80] and [6, 80, 32] have only the first axis in common, of 6 layers. In a stack
    where two axes fit equally well, the leaves stay as they are.
    """
    # Where all leaves have one size at the same place from the front (0, 1, ...) or from the back
    # (-1, -2, ...), the axis of each leaf there, by this size: {6: {(0, 0)}} for the two above,
    # {6: {(1, 0)}, 80: {(2, 1)}} for a kernel [32, 6, 80] and its bias [6, 80].
    axes_of_size: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    shortest = min(p.rank for p in parameters)
    for position in range(-shortest, shortest):
        sizes = {p.shape[position] for p in parameters}
        if len(sizes) == 1:
            axes = tuple(position % p.rank for p in parameters)
            axes_of_size[sizes.pop()].add(axes)
    if not axes_of_size:
        return None
    # Square layers have more axes in common. There are fewer layers than features,
    # so the shortest axis counts layers.
    fits = axes_of_size[min(axes_of_size)]
    # A single kernel has all its axes in common with itself. It is a stack only if its first axis
    # alone is the shortest, and not if it is an attention's, which may be [d, groups, heads, size].
    is_alone = len(parameters) == 1
    if is_alone and (parameters[0].role.projection or fits != {(0,)}):
        return None
    # Which of several equal axes counts the layers can't be told.
    if len(fits) > 1:
        return list(parameters)
    axes = fits.pop()
    return [_without(p, axis) for p, axis in zip(parameters, axes, strict=True)]


def _without(p: Parameter, axis: int) -> Parameter:
    """One layer of a stack whose layers are along this axis."""
    return p._replace(axes=p.axes[:axis] + p.axes[axis + 1 :])


def _one_part(p: Parameter) -> Parameter:
    """One of the parts that have an axis of their own: of queries, keys and values
    [3, d, heads, size] the queries.

    What has its parts along another axis stays as it is.
    """
    role = p.role
    # The axes of one part are d, heads and size.
    if role.parts == 1 or p.rank != 4 or role.parts not in p.shape[:-1]:
        return p
    part = _without(p, p.shape.index(role.parts))
    return part._replace(role=role._replace(parts=1))
