"""Match each module with its statistic, in any of the trees that Flax hands back."""

import functools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from muonjax._clipping.matching import Target
from muonjax._trees import flatten_paths


def match_statistics(argument: str, tree: Any, targets: Sequence[Target]) -> list[jax.Array]:
    """The targets' statistics, float32 [*layers, entries].

    Either the tree names signals, as Flax's intermediates do among much else, or it names modules; then all of it must
    be statistics.
    """
    signals = {t.signal: i for i, t in enumerate(targets)}
    attentions = Counter(t.path for t in targets)
    modules = {t.path: i for i, t in enumerate(targets) if attentions[t.path] == 1}
    found: list[list[Any]] = [[] for _ in targets]
    others, by_module = [], False
    for path, value in flatten_paths(tree).items():
        path = path.removeprefix("intermediates/")
        if path not in signals and path not in modules:
            path = re.sub(r"(/value)?/\d+$", "", path)  # Flax's plain `sow` appends to a tuple
        if path in signals:
            found[signals[path]].append(value)
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
            f"{unclaimed}. Use muonjax's attention_fn in every attention that a site names, called with "
            f"sow_weights=True, and only there; and pass what Flax collected."
        )
    return [_largest(argument, t, values) for t, values in zip(targets, found, strict=True)]


def _largest(argument: str, target: Target, values: list[Any]) -> jax.Array:
    want = (*target.layers, target.entries)
    for value in values:
        # A signal of one number per layer needs no axis for it.
        if jnp.shape(value) not in ({want, want[:-1]} if target.entries == 1 else {want}):
            raise ValueError(
                f"{argument} of {target.path!r} have shape {jnp.shape(value)}; the parameters say {want}, layers "
                "before heads. Stacked layers need nn.scan(variable_axes={'intermediates': 0})."
            )
    arrays = [lax.stop_gradient(jnp.asarray(value)).astype(jnp.float32).reshape(want) for value in values]
    return functools.reduce(jnp.maximum, arrays)
