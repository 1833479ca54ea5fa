"""Split the parameters between two optimizers, one for matrices and one for everything else, as routing says."""

import reprlib
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from muonjax._common.arguments import check_update, other_state, warn_user
from muonjax._common.platform import sharded_like
from muonjax._common.trees import dtype_of, flatten_paths, is_masked
from muonjax._matrices.matrix_view import (
    DimensionNumbersTree,
    matrix_pieces,
    resolve_dimension_numbers,
)
from muonjax._mesh.host_memory import offload
from muonjax._names.dimension_numbers import numbers_tree, routes
from muonjax._names.parameters import check_parameters
from muonjax._transforms.momentum import check_kind, has_int8


def partition_by_route(
    call: str,
    matrices: Callable[[Any], optax.GradientTransformation],
    others: Callable[[Any], optax.GradientTransformation],
    dimension_numbers: DimensionNumbersTree | None,
) -> optax.GradientTransformationExtraArgs:
    """`matrices(dimension numbers)` for the leaves that are matrices, `others(tree)` for all others.

    Args:
      call: Names the optimizer in errors.
      matrices: Makes the transformation of the matrices from their dimension numbers.
      others: Makes that of all other leaves from the whole tree.
      dimension_numbers: Which leaves are matrices, and how; None reads it off paths and shapes.
    """
    last: Any = None, None  # the last tree, as `_kinds` tells it, and its partition

    def decide(
        tree: Any, params: Any, *, warn: bool = False
    ) -> optax.GradientTransformationExtraArgs:
        nonlocal last
        # For the whole tree: routing looks at the neighbors of a leaf, which a partition hides.
        numbers, labels = _route(dimension_numbers, tree, params, call, warn=warn)
        inner: dict[Hashable, optax.GradientTransformation] = {
            "muon": matrices(numbers),
            "adam": offload(others(tree)),
        }
        if "fixed" in jax.tree.leaves(labels):
            inner["fixed"] = _fixed()
        # A function, for Optax would call a tree that is callable, as an Equinox module is.
        partition = optax.partition(inner, lambda _: labels)
        last = _kinds(tree, params), partition
        return partition

    def init(params: optax.Params):
        return decide(params, params, warn=True).init(params)

    def update(
        updates: optax.Updates, state: Any, params: Any = None, *unnamed: Any, **extra_args: Any
    ):
        check_update(call, updates, state, params, unnamed)
        params = _with_gradients(updates, params, call)
        kinds, partition = last
        if kinds != _kinds(updates, params):
            partition = decide(updates, params)
        _check_state(state, jax.eval_shape(partition.init, updates), call)
        updates, state = partition.update(updates, state, params, **extra_args)
        return sharded_as(params, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def sharded_as(params: Any, updates: Any) -> Any:
    """Updates on the shards of their parameters: with explicit axis types they come on those of the state."""
    return jax.tree.map(sharded_like, updates, params)


def _kinds(*trees: Any) -> list[Any]:
    """Structure, shapes and dtypes: all that routing depends on."""

    def kind(leaf: Any) -> Any:
        return getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf))

    return [(jax.tree.structure(tree), [*map(kind, jax.tree.leaves(tree))]) for tree in trees]


def check_program(call: str, argument: str, given: Any) -> None:
    """Raise for a setting without its name, or parameters, in place of a program or a tree."""
    for leaf in jax.tree.leaves(given, is_leaf=lambda x: hasattr(x, "reduction_axis")):
        if not (
            hasattr(leaf, "reduction_axis") or hasattr(leaf, "dimension_numbers") or callable(leaf)
        ):
            injected = f" optax.inject_hyperparams takes a function for a schedule: give it static_args={argument!r}."
            raise TypeError(
                f"{call}({argument}={reprlib.repr(given)}) must be what muonjax.inspect(loss_fn, params, batch) "
                f"returns, or dimension numbers. Settings go by name.{injected if isinstance(given, jax.Array) else ''}"
            )


def _fixed() -> optax.GradientTransformation:
    """Leave integers as they are: with AdamW's float update, weight decay would count them down."""

    def update(updates: Any, state: Any, params: Any = None):
        return jax.tree.map(jnp.zeros_like, updates if params is None else params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _route(given: Any, tree: Any, params: Any, call: str, *, warn: bool) -> tuple[Any, Any]:
    """Dimension numbers and the label, "muon", "adam" or "fixed", for every leaf of parameters or their gradients."""
    treedef = jax.tree.structure(tree)
    if given is None:
        flat = treedef.flatten_up_to(numbers_tree(*routes(tree, call=call, warn=warn)))
    else:
        check_parameters(tree, call, warn=warn)
        flat = resolve_dimension_numbers(given, tree, call=call)
    numbers = treedef.unflatten(flat)
    if any(flat):  # None for a tree that is one leaf would mean that it is a matrix
        # Here and not in the chain only: momentum would turn an integer leaf into a float one.
        matrix_pieces(numbers, tree, call=call)
    elif warn and flat:
        what = "params" if given is None else "params, program"
        warn_user(
            f"{call}: none of the parameters is a matrix for Muon; muonjax.tabulate({what}) says why."
        )
    trained = map(_is_trainable, jax.tree.leaves(params))
    labels = treedef.unflatten(
        "muon" if n is not None else "adam" if floating else "fixed"
        for n, floating in zip(flat, trained, strict=True)
    )
    return numbers, labels


def _with_gradients(updates: Any, params: Any, call: str) -> Any:
    """The parameters, each of which has a gradient of its shape; without what can't be trained and has none.

    In an Equinox module these are numbers and functions.
    """
    found, given = flatten_paths(updates), flatten_paths(params)
    fixed = {path for path in given if path not in found and not _is_trainable(given[path])}
    if fixed and given.keys() - fixed == found.keys():
        params = jax.tree.structure(updates, is_leaf=is_masked).unflatten(
            given[path] for path in found
        )
    elif lone := [path for path in (*given, *found) if not (path in found and path in given)]:
        what = (
            "gradient without a parameter" if lone[0] in found else "parameter without a gradient"
        )
        raise ValueError(
            f"{call}: {lone[0]!r} is a {what}; update(grads, state, params) needs equal trees."
        )
    for path, gradient in found.items():
        if is_masked(gradient) or is_masked(given[path]):
            continue
        got, want = jnp.shape(gradient), jnp.shape(given[path])
        if got != want:
            raise ValueError(
                f"{call}: the gradient of {path!r} has shape {got}, the parameter {want}."
            )
    return params


def _check_state(state: Any, expected: Any, call: str) -> None:
    """A restored state may have other dtypes, and meet other settings, but its arrays are those of these parameters.

    Otherwise momentum of another shape would broadcast, or Optax would speak of trees.
    """
    # A restored state may be of another class, with the same fields.
    if not isinstance(state, type(expected)) and not hasattr(state, "inner_states"):
        raise ValueError(other_state(call, state))
    check_kind(call, state, has_int8(expected))
    paths = [
        (jax.tree_util.keystr(path), leaf.shape)
        for path, leaf in jax.tree.leaves_with_path(expected)
    ]
    found = [jnp.shape(leaf) for leaf in jax.tree.leaves(state)]
    if found != [shape for _, shape in paths]:
        pairs = zip(paths, found, strict=False)
        differing = [f"{p} {list(want)} is {list(got)}" for (p, want), got in pairs if want != got]
        raise ValueError(
            f"{call}: this state was made for other parameters, another routing or another `adam` "
            f"({[*differing, f'{len(found)} arrays'][0]}); give the settings that it was made with, or call init."
        )


def _is_trainable(leaf: Any) -> bool:
    """Whether it is an array, or its shape, of real or complex numbers."""
    is_number = hasattr(leaf, "dtype") or isinstance(leaf, (float, complex))
    return is_number and jnp.issubdtype(dtype_of(leaf), jnp.inexact)
