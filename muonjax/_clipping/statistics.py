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
from muonjax._clipping.largest import larger, largest
from muonjax._clipping.matching import Target, module_of
from muonjax._trees import flatten_paths, listed

if TYPE_CHECKING:
    from jaxtyping import Array, Float32


def match_statistics(
    argument: str, tree: Any, targets: Sequence[Target]
) -> list[Float32[Array, "... _entries"]]:
    """The targets' statistics, layers first.

    Either the tree names signals, as Flax's intermediates do among much else, or it names modules; then all of it must
    be statistics, of the axes [*layers, *batch, heads]. A signal was sown as [*batch, heads], and a scan has put layers
    on axes that only the array beside it can tell (`muonjax._clipping.attention_fn.sown`).
    """
    # Linen's collections are no part of a path: {"params": ...} is trained, {"intermediates": ...} comes back.
    signals = {t.signal.removeprefix("params/"): i for i, t in enumerate(targets)}
    attentions = Counter(t.path for t in targets)
    alone = [(i, t) for i, t in enumerate(targets) if attentions[t.path] == 1]
    # Where one parameter holds all projections, the program knows no larger module than its own.
    modules = {module_of([part.path for part in t.parts]).removeprefix("params/"): i for i, t in alone}
    modules |= {t.path.removeprefix("params/"): i for i, t in alone}
    found: list[list[Any]] = [[] for _ in targets]
    others, by_module = [], False
    statistics = _statistics(tree)
    markers = {f"{path}{AXES}" for path in statistics} & statistics.keys()
    for given, value in statistics.items():
        if given in markers:
            continue
        path = re.sub(r"^(intermediates|params)/", "", given)
        if path not in signals and path not in modules:
            path = re.sub(r"(/value)?/\d+$", "", path)  # Flax's plain `sow` appends to a tuple
        if (index := _signal_of(path, signals, modules, targets)) is not None:
            marker = statistics.get(f"{given}{AXES}")
            alone = attentions[targets[index].path] == 1
            found[index].append(_layers_first(argument, targets[index], value, marker, alone=alone))
        elif path in modules:
            index, by_module = modules[path], True
            found[index].append(_layers_first(argument, targets[index], value, in_order=True))
        else:
            others.append(path)
    missing = [t.signal for t, values in zip(targets, found, strict=True) if not values]
    names = {t.signal.rpartition("/")[2] for t in targets}
    unclaimed = others if by_module else [path for path in others if path.rpartition("/")[2] in names]
    if missing or unclaimed:
        given = [f"{path!r} {list(jnp.shape(value))}" for path, value in statistics.items()]
        layers = any(t.layers for t, values in zip(targets, found, strict=True) if not values)
        raise ValueError(
            f"{argument} and the sites do not fit: sites without statistics {missing}, statistics without a site "
            f"{unclaimed}; {argument} has {listed(given, ', ') or 'no arrays'}. "
            f"{_other_path(missing, others) or reporting_advice(argument, layers=layers)}"
        )
    return [functools.reduce(larger, values) for values in found]


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


def _other_path(missing: Sequence[str], others: Sequence[str]) -> str:
    """What to say where a statistic is there, under another path."""
    for signal in missing:
        for path in others:
            if path and (path.endswith(f"/{signal}") or signal.endswith(f"/{path}")):
                return (
                    f"{path!r} looks like the statistic of {signal!r}, under another path: pass parameters and "
                    f"statistics of the same module."
                )
    return ""


def reporting_advice(argument: str, *, layers: bool = False) -> str:
    """How a model comes to report its statistics."""
    if argument != "max_logits":
        return "Sow a statistic in every module that a site names, and pass what Flax collected."
    scan = ", under nn.scan(variable_axes={'params': 0, 'intermediates': 0})" if layers else ""
    return (
        "muonjax.value_and_grad(loss_fn) takes gradients and returns ((loss, max_logits), grads), in NNX "
        "muonjax.nnx.value_and_grad(loss_fn), for optimizer.update(model, grads, max_logits=max_logits). Why it leaves "
        "an attention out says inspect(...).attentions; give one that is a kernel muonjax's attention_fn "
        "(docs/qk_clip.md), or pass {module path: muonjax.max_logits(query, key)}, or take it out of the sites. In "
        "Linen also model.apply(..., mutable=['intermediates']) inside of `with muonjax.linen.watch():`"
        f"{scan}, and pass the second of what it returns; a TrainState that passes it on is muonjax.linen.TrainState."
    )


def _layers_first(
    argument: str,
    target: Target,
    value: Any,
    marker: Any = None,
    *,
    in_order: bool = False,
    alone: bool = True,  # in its module
) -> Float32[Array, "*layers entries"]:
    """The largest over all axes but those of layers and heads, as [*layers, heads].

    Sizes alone never say which axis is which, for a model may have as many layers as heads: they only confirm.
    """
    if not hasattr(value, "dtype") and not isinstance(value, (int, float)):
        raise TypeError(f"{argument} of {target.path!r} is {value!r}, no array.")
    array = lax.stop_gradient(jnp.asarray(value)).astype(jnp.float32)
    if target.entries == 1 and array.shape == target.layers:
        array = array[..., None]  # a signal of one number per layer needs no axis for it
    heads = _longer_axis(array.shape, jnp.shape(marker)) if marker is not None else None
    readings = _readings(array.shape, target, heads)
    expected = (*range(len(target.layers)), array.ndim - 1)
    if in_order:
        readings = [axes for axes in readings if axes == expected]
    if not readings or (heads is None and expected not in readings):
        fix = (
            "What value_and_grad returns fits the sites of muonjax.inspect"
            if in_order
            else "Stacked layers need nn.scan(variable_axes={'params': 0, 'intermediates': 0})"
        )
        raise ValueError(
            f"{argument} of {target.path!r} have shape {jnp.shape(value)}; the parameters say "
            f"{(*target.layers, target.entries)}, layers before heads (and a batch between them). {fix}."
        )
    # Axes of length 1 may stand anywhere.
    if len({tuple(axis for axis in axes if array.shape[axis] > 1) for axes in readings}) > 1:
        fix = (
            f"layers first and heads last, under the path of the module: {argument}={{{target.path!r}: statistic}}"
            if alone
            else f"layers first, heads last: {argument}={{{target.signal!r}: statistic[..., None, :]}}"
        )
        raise ValueError(
            f"{argument} of {target.path!r} have shape {jnp.shape(value)}, and layers and heads "
            f"{(*target.layers, target.entries)} fit several of its axes, {readings}. Give the statistic {fix}. What "
            f"muonjax.linen.watch and attention_fn sow needs no such help."
        )
    axes = readings[0]
    rest = tuple(axis for axis in range(array.ndim) if axis not in axes)
    return largest(jnp.transpose(array, (*axes, *rest)), tuple(range(len(axes), array.ndim)))


def _longer_axis(shape: tuple[int, ...], marker: tuple[int, ...]) -> int | None:
    """The axis of heads, on which the marker is one longer than the statistic; None where it does not belong to it."""
    more = [n - m for n, m in zip(marker, shape, strict=False)]
    return (
        more.index(1) if len(shape) == len(marker) and sorted(more) == [*[0] * (len(more) - 1), 1] else None
    )


def _readings(shape: tuple[int, ...], target: Target, heads: int | None) -> list[tuple[int, ...]]:
    """All axes that layers and heads can have by their sizes: heads are the last axis of each layer's statistic."""
    found = []
    for layers in itertools.combinations(range(len(shape)), len(target.layers)):
        rest = [axis for axis in range(len(shape)) if axis not in layers]
        last = rest[-1:] if heads is None else [axis for axis in rest if axis == heads]
        if [shape[axis] for axis in (*layers, *last)] == [*target.layers, target.entries]:
            found.append((*layers, *last))
    return found
