"""Find and remove the axes that enumerate layers in parameters that `nn.scan` or `nnx.vmap` stacked.

In a stack of layers every parameter below the scanned module has one axis more than in a layer, at the same
position and of the same size. A norm's scale (L, d), a bias whose shape is not the end of its kernel's shape,
or a Dense kernel of three axes shows that there is a stack; its axis is the only position at which all parameters
of the module agree.
"""

import math
from collections.abc import Sequence

from muonjax._routing.given import INSPECT
from muonjax._routing.roles import ADAPTER, Parameter, layer_of
from muonjax._routing.siblings import Siblings, is_einsum, is_outputs_first_convolution, is_window


def unstack(parameters: Sequence[Parameter], scan_axis: int | None = None) -> list[Parameter]:
    """Removes the axes that enumerate layers, again and again where scans are nested.

    Args:
      parameters: Every leaf of the tree.
      scan_axis: Which axis counts the layers, counted on the stacked leaf (negative: from its end); None: find out.

    Returns:
      The same leaves with the shapes and axes of one layer.

    Raises:
      ValueError: If two axes fit equally well.
    """
    current = list(parameters)
    while True:
        siblings = Siblings(current)
        current = [p._replace(stacked=_verdict(p, siblings)) for p in current]
        peeled = {p.path: p for p in _peel(current, 0, scan_axis)}
        before, current = current, [peeled[p.path] for p in current]
        if current == before:
            return current
        if scan_axis is not None:
            _check_scan_axis(scan_axis, before, current)


def _check_scan_axis(scan_axis: int, before: Sequence[Parameter], after: Sequence[Parameter]) -> None:
    """Raises ValueError if `scan_axis` gives two parameters of one module different numbers of layers."""
    counts: dict[tuple[str, ...], tuple[int, Parameter]] = {}
    for p, q in zip(before, after, strict=True):
        if len(q.shape) == len(p.shape):
            continue
        count = math.prod(p.shape) // max(1, math.prod(q.shape))
        first, other = counts.setdefault(layer_of(p.path)[0], (count, p))
        if first != count:
            raise ValueError(
                f"dimension_numbers(scan_axis={scan_axis}) would make {first} layers of {'/'.join(other.path)!r} "
                f"{other.leaf_shape} and {count} of {'/'.join(p.path)!r} {p.leaf_shape} beside it. Leave scan_axis "
                "out, or give the axis that nn.scan or nnx.vmap stacks on."
            )


def _verdict(p: Parameter, siblings: Siblings) -> bool | None:
    """True for a stack, False for one layer, None where it can't be told from this leaf alone."""
    role, rank, ranks = p.role, len(p.shape), p.role.ranks
    bias = siblings.bias(p)
    if not role.muon and ranks and rank > min(ranks) == 1 and sum(size > 1 for size in p.shape) <= 1:
        return None  # a norm's scale stored as (1, 1, 1, 64), or a stack of one
    if bias and len(bias) == 1 and rank > 1 and bias[0] in p.shape:
        return False  # a stack's bias has an axis of layers too
    if role is ADAPTER and rank > 2:  # its factors share the rank; in a stack both have one axis more
        both = all(len(q.shape) > 2 for q in siblings.folder(p) if q.role is ADAPTER)
        return None if is_einsum(p) and siblings.is_batched_factor(p) else both
    if role.projection and rank == 4:
        rank_of = {projection: len(shape) for projection, shape in siblings.attention(p).items()}
        if rank_of.get("key") == 3 and role.projection in ("query", "out"):
            return None  # queries grouped by key head
    if (
        not role.projection
        and role.muon
        and rank > 3
        and (is_window(p.shape) or is_outputs_first_convolution(p, siblings))
    ):
        return None
    if ranks and rank > max(ranks):
        return True
    if ranks and rank == min(ranks):
        return False
    return None


def _peel(parameters: Sequence[Parameter], depth: int, scan_axis: int | None) -> list[Parameter]:
    """Removes one axis of layers from the outermost modules where some leaf shows a stack and none a single layer."""
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
        # Not 768 layers of width 12 but 12 of width 768, beside another stack of 6, if both agree on the axis.
        taken = {min(set(p.axes) - set(apart[p.path].axes), default=-1) for p in parameters}
        if len(taken) > 1 or -1 in taken:
            return whole
    return [apart[p.path] for p in parameters]


def _peel_together(
    parameters: Sequence[Parameter], scan_axis: int | None
) -> tuple[list[Parameter] | None, bool]:
    """The parameters without their common axis of layers, None if there is none; and whether it is likely."""
    # It may be (d, groups, heads, size): one attention kernel of rank four alone does not show a stack.
    if len(parameters) == 1 and parameters[0].role.projection and scan_axis is None:
        return None, False
    ranks = [len(p.shape) for p in parameters]
    deepest = max(ranks)
    fits: dict[tuple[int, ...], tuple[int, list[Parameter]]] = {}
    for axis in [*range(deepest), *range(-deepest, 0)] if scan_axis is None else [scan_axis]:
        where = tuple(axis if axis >= 0 else rank + axis for rank in ranks)
        if not all(0 <= i < rank for i, rank in zip(where, ranks, strict=True)):
            continue
        sizes = {p.shape[i] for p, i in zip(parameters, where, strict=True)}
        layer = [_without(p, i) for p, i in zip(parameters, where, strict=True)]
        if len(sizes) == 1:
            fits.setdefault(where, (sizes.pop(), layer))
    if not fits:
        return None, False
    # Square layers fit in more than one way; there are fewer layers than features.
    best = sorted(fits.values(), key=lambda fit: fit[0])
    count, layer = best[0]
    if len(parameters) == 1 and scan_axis is None and any(w[0] for w in fits if fits[w][0] == count):
        return None, False  # a kernel alone is a stack only on its first axis
    if len(best) > 1 and count == best[1][0] and any(p.role.muon for p in parameters):
        p = max(parameters, key=lambda p: len(p.shape))
        raise ValueError(
            "dimension_numbers(params) finds stacked layers, but not their axis: several "
            f"of size {count} fit {'/'.join(p.path)!r} of shape {p.leaf_shape} and its neighbours; "
            f"say with scan_axis on which axis nn.scan or nnx.vmap stacks them, or add rules. {INSPECT}"
        )
    return layer, scan_axis is not None or all(count <= math.prod(p.shape) for p in layer if p.shape)


def _without(p: Parameter, i: int) -> Parameter:
    return p._replace(shape=p.shape[:i] + p.shape[i + 1 :], axes=p.axes[:i] + p.axes[i + 1 :], stacked=None)
