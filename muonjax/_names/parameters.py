"""Check that what callers give is a tree of parameters, and read what its modules say of them."""

import reprlib
from collections.abc import Mapping
from typing import Any

import jax

from muonjax._common import trees
from muonjax._common.arguments import warn_user
from muonjax._names import roles
from muonjax._names.roles import Role

_CALLS = "program = muonjax.inspect(loss_fn, params, batch), then muonjax.muon(2e-3, program)"
INSPECT = f"Better: {_CALLS}."
# Flax's other collections of variables.
_COLLECTIONS = ("batch_stats", "cache", "intermediates", "losses", "metrics", "stats")


def check_parameters(params: Any, *, warn: bool = True) -> None:
    """Raise TypeError if this is a module or an optimizer, or has no arrays.

    Warns of other collections next to them.
    """
    if callable(getattr(params, "dimension_numbers", None)):
        raise TypeError("(params) got what inspect returned; give it second, after the parameters.")
    if _has_no_arrays(params):
        kind = type(params).__name__
        raise TypeError(f"(params) got {kind} and no arrays, such as model.init(key, x)['params'].")
    for path, leaf in trees.flatten_paths(params).items():
        is_number = hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex))
        if callable(leaf) or not (is_number or trees.is_masked(leaf)):
            raise TypeError(
                f"{path!r} is no array but {reprlib.repr(leaf)}: "
                "eqx.filter(model, eqx.is_inexact_array)."
            )
    if warn and isinstance(params, Mapping) and "params" in params:
        beside = ", ".join(str(name) for name in params if name in _COLLECTIONS)
        if beside:
            warn_user(f"The parameters have {beside} too: give variables['params'] alone.")


def _has_no_arrays(params: Any) -> bool:
    """Whether this is a module or an optimizer, and not what they make."""
    is_leaf = jax.tree_util.all_leaves([params])
    if is_leaf and hasattr(params, "__dict__") and not hasattr(params, "dtype"):
        return True
    # An optimizer and Haiku's `Transformed` are tuples of functions.
    makes_others = hasattr(params, "apply") or hasattr(params, "update")
    return hasattr(params, "init") and makes_others and (is_leaf or isinstance(params, tuple))


def types_of_modules(params: Any) -> dict[str, Role]:
    """What modules say and names can't, by the path of a parameter.

    The type of a module shows an embedding. Its settings show the groups of a kernel, or the letters
    of an einsum.

    Raises:
      TypeError: Axes with names, as Haliax's and penzai's arrays have them: a program reads these
      better.
    """
    types: dict[str, Role] = {}
    nodes = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda node: _has_named_axes(node) or _type(node) is not None
    )
    for path, node in nodes:
        if _has_named_axes(node):
            name = "/".join(trees.names(path))
            raise TypeError(f"{name!r} has axes with names, which nothing reads here. {INSPECT}")
        role = _type(node)
        if role is not None:
            for rest, _ in jax.tree_util.tree_leaves_with_path(node):
                types["/".join(trees.names((*path, *rest)))] = role
    return types


def _has_named_axes(node: Any) -> bool:
    return hasattr(node, "named_axes") or (hasattr(node, "array") and hasattr(node, "axes"))


def _type(node: Any) -> Role | None:
    # In Flax, or in Equinox.
    groups = getattr(node, "feature_group_count", getattr(node, "groups", 1))
    if hasattr(node, "einsum_str") or (isinstance(groups, int) and groups > 1):
        return roles.SPECIAL
    return roles.EMBEDDING if type(node).__name__ in ("Embedding", "Embed") else None
