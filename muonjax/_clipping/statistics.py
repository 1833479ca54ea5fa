"""Match each module with its statistic, in any of the trees that Flax hands back."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from muonjax._clipping.attention_fn import AXES
from muonjax._clipping.factors import Target
from muonjax._clipping.largest import larger, largest
from muonjax._clipping.matching import below, module_of
from muonjax._trees import flatten_paths, listed

if TYPE_CHECKING:
    from jaxtyping import Array, Float32


def match_statistics(argument: str, tree: Any, targets: Sequence[Target]) -> dict[str, jax.Array]:
    """The targets' statistics by name, layers first: float32 [*layers, entries].

    Either the tree names signals, as Flax's intermediates do among much else, or it names modules; then all of it must
    be statistics, of the axes [*layers, *batch, heads]. A signal was sown as [*batch, heads], and a scan has put layers
    on axes that only the array beside it can tell (`muonjax._clipping.attention_fn.AXES`).
    """
    # Linen's collections are no part of a path: {"params": ...} is trained, {"intermediates": ...} comes back.
    signals = {t.signal.removeprefix("params/"): t for t in targets}
    count = Counter(t.path for t in targets)
    alone = [t for t in targets if count[t.path] == 1]
    # Where one parameter holds all projections, the program knows no larger module than its own.
    modules = {module_of([part.path for part in t.parts]).removeprefix("params/"): t for t in alone}
    modules |= {t.path.removeprefix("params/"): t for t in alone}

    def sown_at(path: str) -> Target | None:
        """The target whose statistic this is: sown by the module itself, or by a module inside, as MaxText's."""
        module, _, name = path.rpartition("/")
        while path not in signals and module:
            module = module.rpartition("/")[0]
            path = below(module, name)
        return signals.get(path)

    statistics = _statistics(tree)
    found: dict[str, list[Any]] = {t.signal: [] for t in targets}
    others, by_module = [], False
    for given, value in statistics.items():
        if given.endswith(AXES) and given.removesuffix(AXES) in statistics:
            continue
        path = re.sub(r"^(intermediates|params)/", "", given)
        if path not in signals and path not in modules:
            path = re.sub(r"(/value)?/\d+$", "", path)  # Flax's plain `sow` appends to a tuple
        if target := sown_at(path):
            marker = statistics.get(f"{given}{AXES}")
            # By the very name that `value_and_grad` gives it: what is sown has more to its path, or a marker.
            in_order = target.exact and given == target.signal and marker is None
            found[target.signal].append(_layers_first(argument, target, value, marker, in_order=in_order))
        elif target := modules.get(path):
            by_module = True
            found[target.signal].append(_layers_first(argument, target, value, in_order=True))
        else:
            others.append(path)
    missing = [t for t in targets if not found[t.signal]]
    names = {t.signal.rpartition("/")[2] for t in targets}
    unclaimed = others if by_module else [path for path in others if path.rpartition("/")[2] in names]
    if missing or unclaimed:
        shapes = [f"{path!r} {list(jnp.shape(value))}" for path, value in statistics.items()]
        raise ValueError(
            f"{argument} and the sites do not fit: sites without statistics {[t.signal for t in missing]}, statistics "
            f"without a site {unclaimed}; {argument} has {listed(shapes, ', ') or 'no arrays'}. "
            f"{reporting_advice(argument, layers=any(t.layers for t in missing))}"
        )
    return {t.name: functools.reduce(larger, found[t.signal]) for t in targets}


def _statistics(tree: Any) -> dict[str, Any]:
    """Leaves by path. A list of numbers is an array: Flax collects several calls in a tuple, and never in a list."""

    def is_array(node: Any) -> bool:
        is_list = isinstance(node, list) and bool(node) and jax.tree_util.all_leaves(node)
        return is_list and all(jnp.ndim(x) == 0 for x in node)

    return flatten_paths(jax.tree.map(lambda x: jnp.asarray(x) if is_array(x) else x, tree, is_leaf=is_array))


def reporting_advice(argument: str, *, layers: bool = False) -> str:
    """How a model comes to report its statistics."""
    if argument != "max_logits":
        return "Sow a statistic in every module that a site names, and pass what Flax collected."
    scan = ", under nn.scan(variable_axes={'params': 0, 'intermediates': 0})" if layers else ""
    return (
        "muonjax.value_and_grad(loss_fn) in place of jax.value_and_grad returns ((loss, max_logits), grads); in NNX it "
        "is muonjax.value_and_grad(loss_fn), then optimizer.update(model, grads, max_logits=max_logits); a Linen "
        "TrainState that passes them on is muonjax.linen.TrainState. inspect(...).attentions says why an attention is "
        "left out: pass {module path: muonjax.max_logits(query, key)} for it, take it out of the sites, or, in Flax, "
        "give it muonjax's attention_fn (docs/qk_clip.md) or call model.apply(..., mutable=['intermediates']) inside "
        f"of `with muonjax.linen.watch():`{scan} and pass the second of what it returns."
    )


def _layers_first(
    argument: str, target: Target, value: Any, marker: Any = None, *, in_order: bool = False
) -> Float32[Array, "*layers entries"]:
    """The largest over all axes but those of layers and heads, as [*layers, heads].

    Sizes alone never say which axis is which, for a model may have as many layers as heads: they only confirm.
    """
    if not hasattr(value, "dtype") and not isinstance(value, (int, float)):
        raise TypeError(f"{argument} of {target.path!r} is {value!r}, no array.")
    array = lax.stop_gradient(jnp.asarray(value)).astype(jnp.float32)
    if target.entries == 1 and array.shape == target.layers:
        array = array[..., None]  # a signal of one number per layer needs no axis for it
    elif array.ndim == 1 and set(target.layers) == {1}:
        array = array.reshape(*target.layers, -1)  # to a program a scan of length one is no loop
    heads = _longer_axis(array.shape, jnp.shape(marker)) if marker is not None else None
    expected = (*range(len(target.layers)), array.ndim - 1)
    orders = _orders(array.ndim, len(target.layers), heads)
    sizes = (*target.layers, target.entries)
    fitting = [axes for axes in orders if tuple(array.shape[axis] for axis in axes) == sizes]
    fitting = [axes for axes in fitting if axes == expected or not in_order]
    if not fitting or (heads is None and expected not in fitting):
        fix = (
            "What value_and_grad returns fits the sites of muonjax.inspect"
            if in_order
            else "Stacked layers need nn.scan(variable_axes={'params': 0, 'intermediates': 0})"
        )
        raise ValueError(
            f"{argument} of {target.path!r} have shape {jnp.shape(value)}; the parameters say {sizes}, layers before "
            f"heads (and a batch between them). {fix}."
        )
    # Axes of length 1 may stand anywhere.
    if len({tuple(axis for axis in axes if array.shape[axis] > 1) for axes in fitting}) > 1:
        statistic = "statistic" if target.name == target.path else "statistic[..., None, :]"
        raise ValueError(
            f"{argument} of {target.path!r} have shape {jnp.shape(value)}, and layers and heads {sizes} fit several of "
            f"its axes, {fitting}. Give the statistic layers first and heads last: "
            f"{argument}={{{target.name!r}: {statistic}}}. What muonjax.linen.watch and attention_fn sow needs no such "
            "help."
        )
    axes = fitting[0]
    rest = tuple(axis for axis in range(array.ndim) if axis not in axes)
    return largest(jnp.transpose(array, (*axes, *rest)), tuple(range(len(axes), array.ndim)))


def _longer_axis(shape: tuple[int, ...], marker: tuple[int, ...]) -> int | None:
    """The axis of heads, on which the marker is one longer than the statistic; None where it does not belong to it."""
    longer = [i for i, (m, n) in enumerate(zip(marker, shape, strict=False)) if m == n + 1]
    same = len(marker) == len(shape) == 1 + sum(m == n for m, n in zip(marker, shape, strict=False))
    return longer[0] if longer and same else None


def _orders(rank: int, layers: int, heads: int | None) -> list[tuple[int, ...]]:
    """All axes that layers and heads can have: heads are the last axis of each layer's statistic."""
    return [
        (*chosen, rest[-1] if heads is None else heads)
        for chosen in itertools.combinations(range(rank), layers)
        if (rest := [axis for axis in range(rank) if axis not in chosen]) and (heads is None or heads in rest)
    ]
