"""Check that a tree holds parameters, and read from its nodes which of them are tables."""

import reprlib
from collections.abc import Mapping
from typing import Any

import jax

from muonjax._routing.roles import EMBEDDING, Role
from muonjax._trees import Key, flatten_paths, is_masked, names
from muonjax._warn_user import warn_user

_COLLECTIONS = ("batch_stats", "cache", "intermediates", "losses", "metrics", "stats")


def check_parameters(params: Any, call: str = "dimension_numbers", *, warn: bool = True) -> None:
    """Raises TypeError for a module or an optimizer in place of parameters, and for what is no array among them.

    Warns of other collections beside them.
    """
    kind = type(params).__name__
    if callable(getattr(params, "dimension_numbers", None)):
        raise TypeError(f"{call}(params) got what inspect returned; it is second: {call}(params, program).")
    if hasattr(params, "update") and hasattr(params, "init") and isinstance(params, tuple):
        raise TypeError(f"{call}(params) got an optimizer, {kind}; give the parameters that it is to train.")
    is_one = jax.tree_util.all_leaves([params]) or isinstance(params, tuple)  # as hk.Transformed is
    if is_one and hasattr(params, "init") and hasattr(params, "apply"):
        raise TypeError(
            f"{call}(params) got the module {kind}; give its parameters, model.init(key, x)['params']."
        )
    if jax.tree_util.all_leaves([params]) and hasattr(params, "__dict__") and not hasattr(params, "dtype"):
        raise TypeError(
            f"{call}(params) got {kind}, which holds no arrays that JAX sees; of an NNX module give "
            "nnx.state(model, nnx.Param)."
        )
    for path, leaf in flatten_paths(params).items():
        is_number = hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex))
        if callable(leaf) or not (is_number or is_masked(leaf) or is_name(leaf)):
            raise TypeError(
                f"{call}: {path!r} is no array but {reprlib.repr(leaf)}. Give the arrays alone; for Equinox that is "
                "eqx.filter(model, eqx.is_inexact_array)."
            )
    if warn and isinstance(params, Mapping) and "params" in params:
        beside = [str(name) for name in params if name in _COLLECTIONS]
        if beside:
            warn_user(
                f"{call}(params) got {', '.join(beside)} beside 'params': an optimizer would train these too. "
                "Give variables['params'] alone."
            )


def is_name(leaf: Any) -> bool:
    """Whether a leaf is part of a path, in a list of pairs (path, array)."""
    return isinstance(leaf, Key)


def tables(params: Any) -> dict[str, Role]:
    """Paths of the parameters of modules whose type is called Embedding or Embed, as Equinox calls them."""

    def is_table(node: Any) -> bool:
        return type(node).__name__ in ("Embedding", "Embed") and not is_masked(node)

    return {
        "/".join(names((*path, *below))): EMBEDDING
        for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_table)
        if is_table(node)
        for below, _ in jax.tree_util.tree_leaves_with_path(node)
    }
