"""Make one dictionary for a log of what an optimizer's state keeps: counts, rates,
what clips and monitors measured."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from muonjax._common.trees import dtype_of, names, without_box

# What Optax's guards against bad gradients call their numbers, and what a log calls them.
_GUARDS = {"total_notfinite": "num_not_finite", "should_skip": "is_skipped"}


def metrics(state: Any) -> dict[str, Any]:
    """What an optimizer's state keeps for a log, as one flat mapping from names to numbers.

    - `count`: how many updates there were, where a part of the state counts them;
      of several counts the largest;
    - `learning_rate`: the rate of the last update, under a schedule of muonjax's optimizers or
      where `optax.inject_hyperparams` keeps it;
    - `adam_learning_rate`: the same of the leaves that are no matrices. With a schedule of your
      own, give `adam=optax.inject_hyperparams(optax.adamw)(schedule)`: the state of
      `optax.adamw(schedule)` has no rate;
    - `num_not_finite`: how many gradients had a NaN or an infinity,
      where `optax.apply_if_finite` counts them;
    - `is_skipped`: 1 if `optax.MultiSteps` skipped the last step by `optax.skip_large_updates` or
      `optax.skip_not_finite`, and 0 if not.

    What clips and monitors have measured is found wherever they are: in a chain at any depth, in
    `optax.MultiSteps`, in Flax's `TrainState.opt_state`, in `nnx.Optimizer.opt_state`, and in
    `nnx.state` of an optimizer or train state. For each `QKClipState`

    - `qk_clip/largest`: the largest signal that the last clip went by; for `qk_clip` a logit;
    - `qk_clip/num_clipped`, `qk_clip/total_clipped`: heads that the last clip scaled,
      and the sum over all clips;
    - `qk_clip/share_clipped`: the heads that the last clip scaled, over all heads;
    - `qk_clip/smallest_factor`: the smallest γ at the last clip, 1 if nothing was scaled;
    - `qk_clip/largest/<module>`: the largest signal of one module, over its heads and layers.

    For each `MonitorState` its `monitor/muon/<statistic>` and `monitor/adam/<statistic>`. Those of
    a second clip or monitor are numbered: `qk_clip_1/largest`.

    Args:
      state: The state of any optimizer.

    Returns:
      A dictionary of Python floats; it waits for the step that computes them. Inside of `jit` it is
      one of float32 arrays. NaN means that it was not measured yet. A state that keeps nothing of
      this gives an empty dictionary.

    Example:
      >>> import jax.numpy as jnp, muonjax
      >>> params = {"attention": {n: {"kernel": jnp.ones((8, 2, 4))} for n in ("query", "key")}}
      >>> tx = muonjax.muonclip(1e-3, muonjax.mha_site(), threshold=100.0)
      >>> statistics = {"attention": jnp.array([400.0, 50.0])}
      >>> updates, state = tx.update(params, tx.init(params), params, max_logits=statistics)
      >>> log = muonjax.metrics(state)
      >>> log["count"], log["qk_clip/num_clipped"]
      (1.0, 1.0)
    """
    values = _counts_and_rates(state)
    num_parts = Counter[str]()
    for part in _parts(state):
        is_clip = "maxima" in part
        kind = "qk_clip" if is_clip else "monitor"
        measured = _of_clip(part) if is_clip else part["statistics"]
        # The first is monitor/…, the second monitor_1/….
        prefix = f"{kind}_{num_parts[kind]}" if num_parts[kind] else kind
        num_parts[kind] += 1
        for name, value in measured.items():
            values[f"{prefix}/{name}"] = without_box(value)

    # The maximum of nothing is -inf; a log has NaN for it, as for what a monitor has not measured.
    log = {}
    if any(isinstance(value, Tracer) for value in values.values()):
        for name, value in values.items():
            x = jnp.asarray(value, jnp.float32)
            log[name] = jnp.where(x == -jnp.inf, jnp.nan, x)
        return log
    # There is one wait for the device, and not one for each value.
    for name, number in jax.device_get(values).items():
        log[name] = math.nan if number == -math.inf else float(number)
    return log


def _counts_and_rates(state: Any) -> dict[str, Any]:
    """{"count": ..., "learning_rate": ..., "adam_learning_rate": ..., "num_not_finite": ...,
    "is_skipped": ...}: those of these numbers that the state holds.

    Parts of an optimizer count by themselves, and one in `optax.MultiSteps` counts less often: the
    largest count is nearest to the number of steps. A rate is kept by `optax.inject_hyperparams`.
    """
    values: dict[str, Any] = {}
    for path, number in jax.tree.leaves_with_path(state):
        # All of these are scalars.
        if jnp.ndim(number) > 0:
            continue
        # Such as "inner_states/adam/inner_state/2/hyperparams" and "learning_rate"
        holder, _, name = "/".join(names(path)).rpartition("/")
        # A parameter may be called "count" too, but it is a floating-point number.
        is_integer = not jnp.issubdtype(dtype_of(number), jnp.inexact)
        if name == "learning_rate" and holder.endswith("hyperparams"):
            # `optax.partition` keeps the states of its parts in `inner_states`, by the names of the
            # parts: "muon" and "adam" in muonjax's optimizers. The innermost one around the rate
            # says whose it is.
            _, _, part = holder.rpartition("inner_states/")
            rate = "adam_learning_rate" if part.startswith("adam/") else name
            values[rate] = number
        elif name == "count" and is_integer:
            values[name] = jnp.maximum(number, values.get(name, 0))
        elif name in _GUARDS and is_integer:
            # `optax.apply_if_finite` keeps "total_notfinite", and `optax.MultiSteps` "should_skip".
            # `_GUARDS` has their names in a log, "num_not_finite" and "is_skipped".
            values[_GUARDS[name]] = number
    return values


def _parts(state: Any) -> Iterator[Mapping[str, Any]]:
    """The fields of each clip and monitor in a state, the outer ones first:
    a monitor may be around another one."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: bool(_fields(node)))
    for node in nodes:
        fields = _fields(node)
        if fields:
            yield fields
            yield from _parts(fields.get("inner"))


def _fields(node: Any) -> Mapping[str, Any]:
    """The fields of a clip or a monitor: of its named tuple,
    or of the mapping that `nnx.state` makes of one."""
    fields = node._asdict() if hasattr(node, "_asdict") else node
    if not isinstance(fields, Mapping):
        return {}
    # The fields tell them, because serialization does not keep classes.
    is_clip = fields.keys() >= {"count", "maxima", "factors", "clips"}
    is_monitor = fields.keys() == {"inner", "count", "statistics"}
    return fields if is_clip or is_monitor else {}


def _of_clip(state: Mapping[str, Any]) -> dict[str, Any]:
    """The statistics of a clip over all of its modules, and the largest signal of each module."""
    largest = -jnp.inf
    smallest = 1.0
    num_heads = 0
    num_clipped = 0
    total_clipped = 0
    measured = {}
    for path in state["factors"]:
        # Arrays [*layers, heads]. `nnx.Optimizer` has each array of its state in a box.
        signal = without_box(state["maxima"][path]).max()
        factor = without_box(state["factors"][path])
        largest = jnp.maximum(largest, signal)
        smallest = jnp.minimum(smallest, factor.min())
        num_heads += factor.size
        num_clipped += jnp.sum(factor < 1)
        total_clipped += jnp.sum(without_box(state["clips"][path]))
        measured[f"largest/{path}"] = signal
    return measured | {
        "largest": largest,
        "num_clipped": num_clipped,
        "share_clipped": num_clipped / num_heads,
        "total_clipped": total_clipped,
        "smallest_factor": smallest,
    }
