"""Match each module with its statistic, in any of the trees that Flax hands back."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from muonjax._clipping.matching import Target
from muonjax._trees import flatten_paths

if TYPE_CHECKING:
    from jaxtyping import Array, Float32


def match_statistics(
    argument: str, tree: Any, targets: Sequence[Target]
) -> list[Float32[Array, "... _entries"]]:
    """The targets' statistics, layers first.

    Either the tree names signals, as Flax's intermediates do among much else, or it names modules; then all of it must
    be statistics.
    """
    # Linen's collections are no part of a path: {"params": ...} is trained, {"intermediates": ...} comes back.
    signals = {t.signal.removeprefix("params/"): i for i, t in enumerate(targets)}
    attentions = Counter(t.path for t in targets)
    modules = {t.path.removeprefix("params/"): i for i, t in enumerate(targets) if attentions[t.path] == 1}
    found: list[list[Any]] = [[] for _ in targets]
    others, by_module = [], False
    for path, value in _statistics(tree).items():
        path = re.sub(r"^(intermediates|params)/", "", path)
        if path not in signals and path not in modules:
            path = re.sub(r"(/value)?/\d+$", "", path)  # Flax's plain `sow` appends to a tuple
        if (index := _signal_of(path, signals, modules, targets)) is not None:
            found[index].append(value)
        elif path in modules:
            found[modules[path]].append(value)
            by_module = True
        else:
            others.append(path)
    missing = [t.signal for t, values in zip(targets, found, strict=True) if not values]
    names = {t.signal.rpartition("/")[2] for t in targets}
    unclaimed = others if by_module else [path for path in others if path.rpartition("/")[2] in names]
    if missing or unclaimed:
        raise ValueError(
            f"{argument} and the sites do not fit: sites without statistics {missing}, statistics without a site "
            f"{unclaimed}. {_advice(missing, others)}"
        )
    return [_largest(argument, t, values) for t, values in zip(targets, found, strict=True)]


def _statistics(tree: Any) -> dict[str, Any]:
    """Leaves by path. A list of numbers is an array: Flax collects several calls in a tuple, and never in a list."""

    def is_array(node: Any) -> bool:
        is_list = isinstance(node, list) and bool(node) and jax.tree_util.all_leaves(node)
        return is_list and all(jnp.ndim(x) == 0 for x in node)

    return flatten_paths(jax.tree.map(lambda x: jnp.asarray(x) if is_array(x) else x, tree, is_leaf=is_array))


def _signal_of(
    path: str, signals: dict[str, int], modules: dict[str, int], targets: Sequence[Target]
) -> int | None:
    """The target whose statistic this is: sown by the module itself, or by a module inside, as MaxText's."""
    if path in signals:
        return signals[path]
    parent, _, name = path.rpartition("/")
    while parent:
        parent = parent.rpartition("/")[0]
        if parent in modules and targets[modules[parent]].signal.rpartition("/")[2] == name:
            return modules[parent]
    return None


def _advice(missing: Sequence[str], others: Sequence[str]) -> str:
    for signal in missing:
        for path in others:
            if path.endswith(f"/{signal}") or signal.endswith(f"/{path}"):
                return (
                    f"{path!r} looks like the statistic of {signal!r}, under another path: pass parameters and "
                    f"statistics of the same module."
                )
    return (
        "Use muonjax's attention_fn in every attention that a site names, called with sow_weights=True, and only "
        "there; and pass what Flax collected."
    )


def _largest(argument: str, target: Target, values: list[Any]) -> Float32[Array, "*layers entries"]:
    """The largest of all calls, and of the axes between layers and heads: MaxText sows [*layers, batch, heads]."""
    want, arrays = (*target.layers, target.entries), []
    for value in values:
        shape = jnp.shape(value)
        # A signal of one number per layer needs no axis for it.
        fits = shape[: len(target.layers)] == target.layers and shape[len(target.layers) :][-1:] == want[-1:]
        if not fits and not (target.entries == 1 and shape == want[:-1]):
            raise ValueError(
                f"{argument} of {target.path!r} have shape {shape}; the parameters say {want}, layers before heads "
                "(and a batch between them). Stacked layers need nn.scan(variable_axes={'intermediates': 0})."
            )
        array = lax.stop_gradient(jnp.asarray(value)).astype(jnp.float32)
        if array.size != math.prod(want):
            array = array.reshape(*target.layers, -1, target.entries).max(-2, initial=-jnp.inf)
        arrays.append(array.reshape(want))
    return functools.reduce(jnp.maximum, arrays)
