"""Check what `update` is given: the state of this optimizer, parameters, and a gradient for each of them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from muonjax._trees import dtype_of, flatten_paths, is_masked


def check_transformation(argument: str, given: Any) -> None:
    """Raise unless it is an Optax transformation; `argument` begins the message, as "muon(adam"."""
    if not (hasattr(given, "init") and hasattr(given, "update")):
        raise TypeError(f"{argument}={given!r}) must be an Optax transformation, such as optax.adamw(1e-3).")


def require_params(call: str, params: Any) -> None:
    """Raise where `update` was called without parameters."""
    if params is None:
        raise ValueError(f"{call} needs params: call tx.update(grads, state, params).")


def check_order(call: str, updates: Any, state: Any, params: Any) -> None:
    """Raise where the state stands in the place of the gradients or of the parameters, and they in its."""
    if params is None:
        return
    first, second, third = (jax.tree.structure(tree) for tree in (updates, state, params))
    order = "are exchanged; call tx.update(grads, state, params)"
    if first == second != third:
        raise ValueError(f"{call}: state and parameters {order}.")
    if first != second == third:
        raise ValueError(f"{call}: gradients and state {order}.")


def refuse_positional(unnamed: tuple[Any, ...]) -> None:
    """Raise for what stands after the parameters, where it would reach a member of the chain as something else."""
    if unnamed:
        raise TypeError(
            "update(grads, state, params) takes no fourth positional argument; give attention logits by their name, "
            "max_logits=."
        )


def other_state(call: str, state: Any) -> str:
    """The message for a state that another optimizer made, or whose tuples a checkpoint has lost."""
    if isinstance(state, Mapping):
        return (
            f"{call}: this state is a {type(state).__name__}, no tuple: a checkpoint that was restored without its "
            "structure. Restore it as jax.eval_shape(tx.init, params)."
        )
    kinds = {type(node).__name__ for node in jax.tree.leaves(state, is_leaf=_is_named) if _is_named(node)}
    kinds -= {"EmptyState", "MaskedState"}
    what = f", with {', '.join(sorted(kinds))}" if kinds else ""
    return f"{call}: this is the state of another optimizer{what}. Start anew with {call}(...).init(params)."


def _is_named(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def is_trainable(leaf: Any) -> bool:
    """Whether it is an array, or its shape, of real or complex numbers."""
    return (hasattr(leaf, "dtype") or isinstance(leaf, (float, complex))) and jnp.issubdtype(
        dtype_of(leaf), jnp.inexact
    )


def with_gradients(updates: Any, params: Any) -> Any:
    """The parameters without what can't be trained and has no gradient: numbers and functions in an Equinox module."""
    found, given = flatten_paths(updates), flatten_paths(params)
    lone = [path for path in given if path not in found]
    if not lone or any(is_trainable(given[path]) for path in lone) or not found.keys() <= given.keys():
        return params
    treedef = jax.tree.structure(updates, is_leaf=is_masked)
    return treedef.unflatten(given[path] for path in found)
