"""Flatten what optimizer states keep for a log into one dictionary of numbers."""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from muonjax._common.trees import dtype_of, names, unboxed


def metrics(state: Any) -> dict[str, Any]:
    """What an optimizer's state keeps for a log, as one flat mapping from names to numbers.

    - `count`: how many updates there were, where a part of the state counts them; of several counts the largest;
    - `learning_rate`, where `optax.inject_hyperparams` keeps it.

    What clips and monitors have measured is found wherever they are: in a chain at any depth, in `optax.MultiSteps`, in
    Flax's `TrainState.opt_state`, in `nnx.Optimizer.opt_state`, and in `nnx.state` of an optimizer or train state. For
    each `QKClipState`

    - `qk_clip/largest`: the largest signal that the last clip went by; for `qk_clip` a logit;
    - `qk_clip/num_clipped`, `qk_clip/total_clipped`: heads that the last clip scaled, and the sum over all clips;
    - `qk_clip/smallest_factor`: the smallest γ at the last clip, 1 if nothing was scaled;
    - `qk_clip/largest/<module>`: the largest signal of one module, over its heads and layers.

    For each `MonitorState` its `monitor/<group>/<statistic>`. Those of a second clip or monitor are numbered:
    `qk_clip_1/largest`.

    Args:
      state: The state of any optimizer.

    Returns:
      A dictionary of Python floats; it waits for the step that computes them. Inside of `jit` it is one of float32
      arrays. NaN means that it was not measured yet. A state that keeps nothing of this gives an empty dictionary.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> params = {"attention": {n: {"kernel": jnp.ones((8, 2, 4))} for n in ("query", "key")}}
      >>> tx = muonjax.muonclip(1e-3, muonjax.mha_site(), threshold=100.0)
      >>> statistics = {"attention": jnp.array([400.0, 50.0])}
      >>> updates, state = tx.update(params, tx.init(params), params, max_logits=statistics)
      >>> found = muonjax.metrics(state)
      >>> found["count"], found["qk_clip/num_clipped"]
      (1.0, 1.0)
    """
    leaves = [(names(path), leaf) for path, leaf in jax.tree.leaves_with_path(state) if not jnp.shape(leaf)]
    found = {path[-1]: x for path, x in leaves if path[-2:] == ("hyperparams", "learning_rate")}
    # A parameter of this name is no integer.
    counts = [x for path, x in leaves if path[-1:] == ("count",) and jnp.issubdtype(dtype_of(x), jnp.integer)]
    found |= {"count": functools.reduce(jnp.maximum, counts)} if counts else {}
    seen = Counter[str]()
    for part in _parts(state):
        name, values = ("qk_clip", _of_clip(part)) if "maxima" in part else ("monitor", _of_monitor(part))
        prefix = f"{name}_{seen[name]}" if seen[name] else name
        seen[name] += 1
        found |= {f"{prefix}/{key}": value for key, value in values.items()}
    # The maximum of nothing is -inf; a log has NaN for it, as for what a monitor has not measured.
    if any(isinstance(value, Tracer) for value in found.values()):
        numbers = {key: jnp.asarray(value, jnp.float32) for key, value in found.items()}
        return {key: jnp.where(value == -jnp.inf, jnp.nan, value) for key, value in numbers.items()}
    return {key: math.nan if x == -math.inf else float(x) for key, x in jax.device_get(found).items()}


def _parts(state: Any) -> Iterator[Mapping[str, Any]]:
    for node in jax.tree.leaves(state, is_leaf=lambda node: bool(_fields(node))):
        if fields := _fields(node):
            yield fields
            yield from _parts(fields.get("inner"))


def _fields(node: Any) -> Mapping[str, Any]:
    """What a clip or a monitor keeps, by name: of its named tuple, or of the mapping that `nnx.state` makes of one."""
    fields = node if isinstance(node, Mapping) else node._asdict() if hasattr(node, "_asdict") else {}
    is_clip = fields.keys() >= {"count", "maxima", "factors", "clips"}
    return fields if is_clip or fields.keys() == {"inner", "count", "statistics"} else {}


def _of_clip(state: Mapping[str, Any]) -> dict[str, Any]:
    maxima, factors, clips = (
        {path: unboxed(x) for path, x in state[name].items()} for name in ("maxima", "factors", "clips")
    )
    largest = {path: signal.max() for path, signal in maxima.items()}
    smallest = [factor.min() for factor in factors.values()]
    return {
        "largest": functools.reduce(jnp.maximum, largest.values(), -jnp.inf),
        "num_clipped": sum(jnp.sum(factor < 1) for factor in factors.values()),
        "total_clipped": sum(jnp.sum(count) for count in clips.values()),
        "smallest_factor": functools.reduce(jnp.minimum, smallest, 1.0),
        **{f"largest/{path}" if path else "largest/model": value for path, value in largest.items()},
    }


def _of_monitor(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{group}/{name}": unboxed(value)
        for group, statistics in state["statistics"].items()
        for name, value in statistics.items()
    }
