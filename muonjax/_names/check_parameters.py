"""Check that what callers give is a tree of parameters, and read what its modules say of them."""

from collections.abc import Mapping
from typing import Any

import jax

from muonjax._common import trees
from muonjax._common.arguments import warn_once
from muonjax._names import roles
from muonjax._names.roles import Role

INSPECT = (
    "Better: program = muonjax.inspect(loss_fn, params, batch), then muonjax.muon(2e-3, "
    "program)."
)
# Flax's other collections of variables.
_COLLECTIONS = ("batch_stats", "cache", "intermediates", "losses", "metrics", "stats")


def check_parameters(params: Any) -> None:
    """Raise TypeError unless this is a tree of arrays, or of their shapes,
    as a module or a `Program` is not.

    Warns of collections next to the parameters, as `model.init` of Flax returns them.
    """
    if callable(getattr(params, "dimension_numbers", None)):
        raise TypeError(
            "(params) got what inspect returned; give it second, after the parameters."
        )
    leaves = trees.flatten_paths(params)
    for path, leaf in leaves.items():
        is_number = hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex))
        # A type such as jnp.float32 has a dtype too.
        is_array = is_number and not callable(leaf)
        # Shapes, numbers, and what Optax has masked may be leaves too.
        if not (is_array or trees.is_masked(leaf)):
            raise TypeError(
                f"(params) got {type(leaf).__name__} for the array {path!r}: give arrays alone, as "
                "model.init(key, x)['params'] or eqx.filter(model, eqx.is_inexact_array)."
            )
    # Names alone don't tell that batch_stats/norm/mean is a running mean and no parameter:
    # it would go to AdamW.
    if isinstance(params, Mapping) and "params" in params:
        beside = ", ".join(str(name) for name in params if name in _COLLECTIONS)
        if beside:
            warn_once(
                f"The parameters have {beside} too: give variables['params'] alone."
            )


def types_of_modules(params: Any) -> dict[str, Role]:
    """The roles that types and settings of modules show and names can't,
    by the path of the parameter.

    An `eqx.nn.Embedding` is an embedding under any name. All others that show something have the
    role SPECIAL, which no name decides: such a kernel goes to Adam, with a warning. Settings show
    that a kernel has groups, that it belongs to an einsum with letters of its own, or that its axes
    have names, as those of penzai and Haliax.
    """
    roles_by_path: dict[str, Role] = {}
    # `_type` gives a role to some modules, and None to all else. So the leaves here are these
    # modules, and the arrays outside of them.
    nodes = jax.tree.leaves_with_path(params, is_leaf=lambda node: bool(_type(node)))
    for path, node in nodes:
        if role := _type(node):
            # The module's bias gets the role too; the caller ignores it where names show a bias.
            for rest, _ in jax.tree.leaves_with_path(node):
                roles_by_path["/".join(trees.names((*path, *rest)))] = role
    return roles_by_path


def _type(node: Any) -> Role | None:
    """The role of a module's parameters, if its type or its settings show it."""
    # penzai's arrays have `named_axes`, Haliax's have `array` and `axes`.
    is_haliax = hasattr(node, "array") and hasattr(node, "axes")
    has_named_axes = hasattr(node, "named_axes") or is_haliax
    # Flax calls the groups of a convolution feature_group_count, Equinox groups.
    groups = getattr(node, "feature_group_count", getattr(node, "groups", 1))
    is_grouped = isinstance(groups, int) and groups > 1
    if has_named_axes or is_grouped or hasattr(node, "einsum_str"):
        return roles.SPECIAL
    return roles.EMBEDDING if type(node).__name__ in ("Embedding", "Embed") else None
