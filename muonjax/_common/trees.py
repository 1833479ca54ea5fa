"""Flatten parameter trees by path, broadcast prefix trees, and read the dtype of any leaf."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax


def is_masked(node: Any) -> bool:
    """Whether Optax has masked a leaf here (`optax.MaskedNode`)."""
    return isinstance(node, optax.MaskedNode)


def is_boxed(node: Any) -> bool:
    """Whether a node is a box of Flax around one array, with metadata such as its sharding."""
    return hasattr(node, "unbox") or hasattr(node, "get_metadata")


def without_box(node: Any) -> Any:
    """What is in a box of Flax, such as a variable of `nnx.Optimizer`; any other node as it is."""
    if not is_boxed(node):
        return node
    # Linen and NNX have different methods for it, but for JAX both are nodes with one child.
    (content,), _ = jax.tree_util.default_registry.flatten_one_level(node)
    return content


def names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """A key path as names, without the box of Flax at its end:
    `.value` of a metadata box or of an NNX variable.

    NNX initializes an optimizer with `kernel.value` and updates it with `kernel`:
    both must read the same.
    """
    # Boxes of Linen and variables of NNX are nodes whose one child is the attribute `value`. The
    # path alone does not show whether there are others.
    is_in_box = path[-1:] == (jax.tree_util.GetAttrKey("value"),)
    return _all_names(path[:-1] if is_in_box else path)


def flatten_with_names(tree: Any) -> tuple[list[tuple[str, ...]], list[Any]]:
    """The names on the path of each leaf, and the leaves, in the order of the tree.
    A masked leaf counts as a leaf, and None does not.

    {"dense": {"kernel": x, "bias": y}} gives [("dense", "bias"), ("dense", "kernel")] and [y, x]. A
    key that is a tuple is a path, as in Flax's `flatten_dict`. A box of Flax adds no name: an
    `nnx.Param` at "kernel" gives ("kernel",).

    Raises:
      ValueError: Two leaves with the same "/"-joined names, as of {"a/b": x, "a": {"b": y}}.
      TypeError: An `nnx.FlatState`, whose arrays have numbers for JAX, and no names.
    """
    # Only an `nnx.FlatState` has an attribute `paths`, and no other tree.
    if hasattr(tree, "paths"):
        raise TypeError(f"a {type(tree).__name__} has no names: give the nested state.")
    # Boxes are opened first: then a path has no `value` of a box, and all its names count, as
    # "value" in an Equinox module with `query`, `key` and `value`. (The function `names`, which
    # sees a path alone, drops a `value` at its end.)
    opened = jax.tree.map(
        without_box, tree, is_leaf=lambda node: is_masked(node) or is_boxed(node)
    )
    entries = jax.tree.leaves_with_path(opened, is_leaf=is_masked)
    paths = [_all_names(path) for path, _ in entries]
    # Names may have slashes, as Haiku's do.
    joined = ["/".join(path) for path in paths]
    if len({*joined}) < len(joined):
        name = max(joined, key=joined.count)
        raise ValueError(f"two leaves are both called {name!r}; rename one of them.")
    return paths, [leaf for _, leaf in entries]


def flatten_paths(tree: Any) -> dict[str, Any]:
    """Leaves by "/"-joined path, in the order of the tree;
    masked leaves are kept (see `flatten_with_names`)."""
    paths, leaves = flatten_with_names(tree)
    return dict(zip(map("/".join, paths), leaves, strict=True))


def dtype_of(leaf: Any) -> Any:
    """The dtype of an array, a tracer, a shape or a Python number."""
    # A typed random key has a dtype that NumPy does not know; a Python number has none.
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def tree_of(tree_or_function: Any, params: Any) -> Any:
    """Dimension numbers as a tree: the tree that was given, what a function returns for `params`,
    or what a `Program` says of them.

    What is a tree for JAX is a tree, also a model that is callable,
    such as an Equinox module or an `nnx.Module`.
    """
    is_leaf = jax.tree_util.all_leaves([tree_or_function])
    # A `Program` is no function, but has this method: `optax.inject_hyperparams`, which may be
    # around the optimizer, takes each argument that can be called for a schedule.
    if is_leaf and hasattr(tree_or_function, "dimension_numbers"):
        return tree_or_function.dimension_numbers(params)
    if not is_leaf or not callable(tree_or_function):
        return tree_or_function
    try:
        return tree_or_function(params)
    except TypeError as error:
        # A likely mistake is the loss itself in place of its program: it lacks the batch.
        error.add_note(
            "It got the parameters alone. For a loss, give muonjax.inspect(loss_fn, params, batch)."
        )
        raise


def broadcast_prefix(
    prefix: Any, tree: Any, *, is_leaf: Callable[[Any], bool], what: str
) -> list[Any]:
    """One entry of `prefix`, the tree or a prefix of it, for each leaf of `tree`. (For JAX a masked
    leaf is no leaf, and gets none.)

    {"a": 1, "b": 2} gives [1, 1, 2] for a tree {"a": {"kernel": x, "bias": y}, "b": z}.

    Args:
      prefix: The tree of entries.
      tree: The tree that it is for.
      is_leaf: What counts as an entry, as in `jax.tree.map`; None, for instance.
      what: Names the entries in the error, "the dimension numbers".

    Raises:
      ValueError: `prefix` is no prefix of `tree`; JAX's message names the node that differs.
    """
    try:
        # `tree` with entries in place of its leaves
        entries = jax.tree.broadcast(prefix, tree, is_leaf=is_leaf)
        # Flattened only down to the leaves of `tree`: an entry may be a tree for JAX, such as a
        # named tuple or None, and stays whole.
        return jax.tree.structure(tree).flatten_up_to(entries)
    except ValueError as error:
        raise ValueError(
            f"{what} are neither the tree of the parameters nor a prefix of it: "
            f"{' '.join(str(error).split())}"
        ) from None


def listed(items: Sequence[str], separator: str = "; ") -> str:
    """The first eight items for an error message, each at most 200 characters long,
    and how many more there are."""
    shown = [item if len(item) <= 200 else f"{item[:200]}…" for item in items[:8]]
    # A tree may have thousands of leaves, and a message is to be read.
    more = f" and {len(items) - 8:,} more" if len(items) > 8 else ""
    return separator.join(shown) + more


def _all_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The names of every key of a path: `layers[0].kernel.value` gives ("layers", "0", "kernel",
    "value")."""
    every_name = []
    for key in path:
        # A dictionary's key may itself be a path, whose keys are strings or numbers.
        inner = getattr(key, "key", None)
        if isinstance(inner, tuple):
            every_name.extend(_all_names(inner))
        elif isinstance(key, str | int):
            every_name.append(str(key))
        else:
            every_name.append(jax.tree_util.keystr((key,), simple=True))
    return tuple(every_name)
