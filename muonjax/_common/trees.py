"""Flatten parameter trees by path, broadcast prefix trees, and read the dtype of any leaf."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax


def is_masked(node: Any) -> bool:
    """Whether Optax has masked a leaf here (`optax.MaskedNode`)."""
    return isinstance(node, optax.MaskedNode)


def unboxed(leaf: Any) -> jax.Array:
    """The array in a leaf of a state: `nnx.Optimizer` keeps each in a variable."""
    return jax.tree.leaves(leaf)[0]


def names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """A key path as names, without the box of Flax at its end: `.value` of a metadata box or of an NNX variable.

    NNX initializes an optimizer with `kernel.value` and updates it with `kernel`: both must read the same.
    """
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name in ("value", "raw_value"):
        path = path[:-1]
    return _all_names(path)


def flatten_with_names(tree: Any) -> tuple[list[tuple[str, ...]], list[Any], Any]:
    """Names of the path of each leaf, the leaves, and the structure. Masked leaves are kept, None has no leaf.

    Two leaves or modules never have the same "/"-joined names: {"a/b": x, "a": {"b": y}} is refused. An attribute
    called `value` among others, as an attention module of dataclasses has it, is a name and not a box.

    A key that is a tuple is a path, as in Flax's `flatten_dict`; so is the path of an array in an `nnx.FlatState`.
    """
    found, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_masked)
    found = [(_named(path, tree), leaf) for path, leaf in found]
    below = Counter(path[:-1] for path, _ in found)  # a box holds one leaf
    plain = [names(path) if below[path[:-1]] == 1 else _all_names(path) for path, _ in found]
    if any("/" in name for path in plain for name in path):
        _refuse_equal(plain)
    return plain, [leaf for _, leaf in found], treedef


def leaf_paths(tree: Any) -> list[tuple[str, ...]]:
    """Names of the path of each leaf that is not masked, in the order of `jax.tree.leaves`."""
    paths, leaves, _ = flatten_with_names(tree)
    return [path for path, leaf in zip(paths, leaves, strict=True) if not is_masked(leaf)]


def _refuse_equal(paths: list[tuple[str, ...]]) -> None:
    spelled: dict[str, tuple[str, ...]] = {}
    for path in paths:
        for end in range(1, len(path) + 1):
            name = "/".join(path[:end])
            if spelled.setdefault(name, path[:end]) != path[:end]:
                raise ValueError(f"two modules or leaves are both called {name!r}; rename one of them.")


def flatten_paths(tree: Any) -> dict[str, Any]:
    """Leaves by "/"-joined path, in the order of the tree; masked leaves are kept (see `flatten_with_names`)."""
    paths, leaves, _ = flatten_with_names(tree)
    return dict(zip(map("/".join, paths), leaves, strict=True))


def joined(path: Iterable[Any]) -> str:
    """Names joined by "/"; a name that contains a slash is quoted, so that no two paths read the same."""
    return "/".join(repr(str(name)) if "/" in str(name) else str(name) for name in path)


def dtype_of(leaf: Any) -> Any:
    """The dtype of an array, a tracer, a shape or a Python number."""
    # A typed random key has a dtype that NumPy does not know; a Python number has none.
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def tree_of(tree_or_function: Any, params: Any) -> Any:
    """The tree itself, or what the function returns for `params`, or what a `Program` says of them.

    A tree may be callable too (an Equinox module, an `nnx.Module`): only what has no structure is a function.
    """
    is_leaf = jax.tree_util.all_leaves([tree_or_function])
    # No method __call__: optax.inject_hyperparams would take a program for a schedule.
    if is_leaf and hasattr(tree_or_function, "dimension_numbers"):
        return tree_or_function.dimension_numbers(params)
    is_partial = isinstance(tree_or_function, jax.tree_util.Partial)
    if not (is_partial or (callable(tree_or_function) and is_leaf)):
        return tree_or_function
    try:
        return tree_or_function(params)
    except TypeError as error:
        error.add_note(
            "It got the parameters alone. Of a loss, give muonjax.inspect(loss_fn, params, batch)."
        )
        raise


def broadcast_prefix(
    prefix: Any, tree: Any, *, is_leaf: Callable[[Any], bool] | None = None, call: str, what: str
) -> list[Any]:
    """One entry of `prefix`, the tree or a prefix of it, for each leaf of `tree` (a masked leaf does not count).

    Args:
      prefix: The tree of entries.
      tree: The tree that it is for.
      is_leaf: What counts as an entry, as in `jax.tree.map`; None, for instance.
      call: Names the caller in the error.
      what: Names the entries in the error, "the dimension numbers".

    Raises:
      ValueError: `prefix` is no prefix of `tree`; names the first leaf without an entry, or entry without a leaf.
    """
    try:
        # Up to the leaves of `tree`, for an entry may be a tree itself, as a named tuple or None is.
        return jax.tree.structure(tree).flatten_up_to(jax.tree.broadcast(prefix, tree, is_leaf=is_leaf))
    except ValueError as error:
        containers = f"the containers differ. {' '.join(str(error).split())}"
        difference = _difference(prefix, tree, is_leaf) or containers
        why = f"{call}: {what} are neither the tree of the parameters nor a prefix of it: {difference}."
        raise ValueError(why) from None


def listed(items: Sequence[str], separator: str = "; ", most: int = 8) -> str:
    """The first items for an error message, each at most 200 characters long, and how many more there are."""
    shown = separator.join(item if len(item) <= 200 else f"{item[:200]}…" for item in items[:most])
    return shown + (f" and {len(items) - most:,} more" if len(items) > most else "")


def _difference(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool] | None) -> str:
    """The first leaf without an entry, or entry without a leaf; nothing where the paths agree."""
    entries = [names(path) for path, _ in jax.tree_util.tree_leaves_with_path(prefix, is_leaf=is_leaf)]
    leaves = [names(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    lone = [path for path in leaves if not any(path[: len(entry)] == entry for entry in entries)]
    if lone:
        return f"the leaf {'/'.join(lone[0])!r} has no entry"
    lone = [entry for entry in entries if not any(path[: len(entry)] == entry for path in leaves)]
    return f"the entry {'/'.join(lone[0])!r} has no leaf" if lone else ""


def _named(path: tuple[Any, ...], tree: Any) -> tuple[Any, ...]:
    """The key path with the path that an `nnx.FlatState` keeps with its arrays in place of an index."""
    index = getattr(path[0], "key", getattr(path[0], "idx", None)) if path else None
    if isinstance(index, int) and hasattr(tree, "paths") and not hasattr(tree, "dtype"):
        return (jax.tree_util.DictKey(tuple(tree.paths[index])), *path[1:])
    return path


def _all_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(name for key in path for name in _names_of(key))


def _names_of(key: Any) -> tuple[str, ...]:
    inner = getattr(key, "key", None)
    if isinstance(inner, tuple):
        return tuple(name for part in inner for name in _names_of(part))
    return (str(key) if isinstance(key, str | int) else jax.tree_util.keystr((key,), simple=True),)
