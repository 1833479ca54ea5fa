"""Print where a parameter and its product are in each array of a function: to follow one through the reader."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from muonjax._common.trees import flatten_paths
from muonjax._inspect.follow import follow
from muonjax._inspect.layout import HOLE, Layout
from muonjax._inspect.values import grouped


def printed(fun: Callable[..., Any], params: Any, *args: Any, path: str) -> Iterator[str]:
    """A line for each operation whose result is made of the parameter at `path`, or of its product with an activation.

    A line has the operation, the shape of its result, and for each axis of the parameter the position of entry
    (i, j, ...) of the result: "axis 1 = 8 j + k" is entry 8 j + k of it. A set is added to that, as "+ {0, 4}": the
    entries at all of these positions were added up or mixed.
    """
    leaves, structure = jax.tree.flatten(params)
    closed = jax.make_jaxpr(lambda leaves: fun(structure.unflatten(leaves), *args))(leaves)
    leaf, walk = list(flatten_paths(params)).index(path), follow(closed, range(len(leaves)))
    for i, node in enumerate(walk.nodes):
        for x in node.outputs:
            value = walk.values[x]
            held = [("", t.layout) for t in value.terms if t.leaf == leaf]
            held += [
                ("product, ", m.layout) for m in value.images if m.product.use.term.leaf == leaf
            ]
            if held:
                shape = " × ".join(map(str, walk.shape(x)))
                said = "; ".join(what + _described(layout) for what, layout in held)
                yield f"{walk.graph.line(i)}  {node.name}, {shape}: {said}"


def _described(layout: Layout) -> str:
    said = [(run.axis, _formula(run.positions)) for run in layout.runs]
    for run in layout.taken:
        more = ", ..." if run.positions.size > 6 else ""
        said.append((run.axis, f"{{{', '.join(map(str, run.positions[:6]))}{more}}}"))
    axes = sorted(grouped(said).items())
    return ", ".join(f"axis {axis} = {' + '.join(parts)}" for axis, parts in axes if axis >= 0)


def _formula(positions: np.ndarray) -> str:
    """The positions as a sum over axes i, j, k, ..., or the first of them."""
    start = int(positions.flat[0])
    steps = [
        int(positions.take(1, k).flat[0]) - start if n > 1 else 0
        for k, n in enumerate(positions.shape)
    ]
    if (positions != start + np.tensordot(steps, np.indices(positions.shape), 1)).any():
        known = positions[positions < HOLE]
        return f"{known[:6].tolist()} and {max(0, known.size - 6)} more"
    names = "ijklmnop"
    parts = [
        f"{step} {name}" if step != 1 else name
        for step, name in zip(steps, names, strict=False)
        if step
    ]
    return " + ".join([str(start)] * (start > 0 or not parts) + parts)
