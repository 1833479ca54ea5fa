"""Split the parameters between two optimizers, one for matrices and one for everything else,
as routing says."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from muonjax._common.arguments import (
    check_update,
    errors_of,
    message_for_other_state,
    shown,
    warn_once,
)
from muonjax._common.explicit_axes import sharded_like
from muonjax._common.trees import dtype_of, flatten_paths, is_masked
from muonjax._matrices.matrix_view import (
    DimensionNumbersTree,
    Pieces,
    matrix_pieces,
    resolve_dimension_numbers,
)
from muonjax._mesh.host_memory import offload
from muonjax._names.check_parameters import check_parameters
from muonjax._names.routes import routes


def partition_by_route(
    call: str,
    matrices: Callable[[Any], optax.GradientTransformation],
    others: optax.GradientTransformation,
    dimension_numbers: DimensionNumbersTree | None,
) -> optax.GradientTransformationExtraArgs:
    """`matrices(pieces)` for the leaves that are matrices, `others` for all others.

    Args:
      call: Names the optimizer in errors.
      matrices: Makes the transformation of the matrices from their pieces,
        which stand for dimension numbers.
      others: The transformation of all other leaves, such as AdamW.
        It gets a tree in which the matrices are masked.
      dimension_numbers: Which leaves are matrices, and how; None reads it off paths and shapes.
    """
    # The routing key and the partition of the last tree
    last: Any = (None, None)

    def partition_of(params: Any) -> optax.GradientTransformationExtraArgs:
        """The partition for these parameters: `matrices` makes the optimizer of those that are
        matrices, and `others`, such as AdamW, is that of the rest.

        Routing a large tree takes long, so `last` keeps the last partition and its key, for trees
        with the same paths, shapes and dtypes. One that was made while tracing serves later calls
        too, for it holds no tracers.
        """
        nonlocal last
        last_key, partition = last
        key = _routing_key(params)
        if key != last_key:
            # The whole tree is routed, since names look at the neighbors of a leaf, such as its
            # bias. Inside of the partition the leaves of the other optimizer are masked.
            pieces, labels = _route(dimension_numbers, params)
            inner: dict[Hashable, optax.GradientTransformation] = {
                "muon": matrices(pieces),
                # `offload` lets the state be in host memory; for the matrices' state `matrices`
                # does that itself.
                "adam": offload(others),
            }
            # Integers, such as a count of steps, get an update of zero:
            # AdamW's weight decay would count them down.
            if "fixed" in jax.tree.leaves(labels):
                inner["fixed"] = optax.stateless(
                    lambda _, params: optax.tree.zeros_like(params)
                )
            # Optax would call a tree of labels that is callable, as an Equinox module is. So it
            # gets a function that returns the tree.
            partition = optax.partition(inner, lambda _: labels)
            # One assignment sets both, because threads may share the optimizer.
            last = key, partition
        return partition

    @errors_of(call)
    def init(params):
        return partition_of(params).init(params)

    @errors_of(call)
    def update(updates, state, params=None, *unnamed, **extra_args):
        check_update(params, unnamed)
        params = _params_with_gradients(updates, params)
        partition = partition_of(params)
        # What the state should be like; nothing is allocated.
        _check_state(state, jax.eval_shape(partition.init, params))
        # Optax gives each part a tree in which the leaves of the others are masked.
        updates, state = partition.update(updates, state, params, **extra_args)
        # With explicit axis types they come on the shards of the state. Where that is divided and
        # the parameters are replicated, as in ZeRO, `apply_updates` would divide these too.
        return jax.tree.map(sharded_like, updates, params), state

    return optax.GradientTransformationExtraArgs(init, update)


def _routing_key(tree: Any) -> tuple[Any, list[Any]]:
    """Structure, shapes and dtypes of a tree: equal keys are routed equally."""
    leaves, treedef = jax.tree.flatten(tree)
    # A leaf need not be an array: a number of Python has its type alone.
    return treedef, [
        (getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves
    ]


def check_program(argument: str, given: Any) -> None:
    """Raise TypeError unless the value of this argument can say which leaves are matrices.

    A program can, and so can dimension numbers, a tree of them, or a function that makes such a
    tree from the parameters. `muon(1e-3, params)` is a likely mistake. The caller's `errors_of`
    puts its name before the message.
    """
    # A program and a function are leaves for JAX, and dimension numbers, which are trees of
    # integers, are leaves here. None is no leaf, so it passes.
    for leaf in jax.tree.leaves(given, is_leaf=_is_dimension_numbers):
        is_program = hasattr(leaf, "dimension_numbers")
        if _is_dimension_numbers(leaf) or is_program or callable(leaf):
            continue
        advice = ""
        # `optax.inject_hyperparams` takes a function of the parameters for a schedule: it calls it
        # with the count of steps, and what arrives here is the result.
        if isinstance(given, jax.Array):
            advice = (
                " optax.inject_hyperparams takes a function for a schedule: give it "
                f"static_args={argument!r}."
            )
        raise TypeError(
            f"({argument}={shown(given)}) must be what muonjax.inspect(loss_fn, params, batch) "
            f"returns, or dimension numbers. Settings go by name.{advice}"
        )


def _is_dimension_numbers(node: Any) -> bool:
    """Whether it is a `MuonDimensionNumbers` or `FusedDimensionNumbers`,
    which are trees for JAX."""
    return hasattr(node, "reduction_axis")


def _route(given: DimensionNumbersTree, params: Any) -> tuple[Pieces, Any]:
    """The matrices of Muon's leaves, and the tree of labels.

    {"kernel": w, "bias": b, "step": 3} gives the pieces of w and
    {"kernel": "muon", "bias": "adam", "step": "fixed"}.

    Args:
      given: What says which leaves are matrices: a program, dimension numbers, or None for names.
      params: The parameters.
    """
    leaves, treedef = jax.tree.flatten(params)
    # An entry for each leaf: its dimension numbers, or None for a leaf that is no matrix.
    # `routes` checks the parameters itself.
    if given is None:
        numbers = [answer.numbers for answer in routes(params).values()]
    else:
        check_parameters(params)
        numbers = resolve_dimension_numbers(given, params)
    if leaves and not any(numbers):
        warn_once(
            "muonjax: none of the parameters is a matrix for Muon; muonjax.tabulate says why."
        )
    labels = []
    # The leaves of the tree that `optax.partition` gives to the transformation of the matrices,
    # with all others masked: the pieces are for trees of this structure.
    muon_leaves = []
    for entry, leaf in zip(numbers, leaves, strict=True):
        if entry is not None:
            labels.append("muon")
            muon_leaves.append(leaf)
        else:
            # AdamW takes real and complex numbers. Integers stay as they are.
            labels.append("adam" if _is_trainable(leaf) else "fixed")
            muon_leaves.append(optax.MaskedNode())
    # This checks the axes of every matrix, so that a mistake shows before the first step.
    pieces = matrix_pieces(treedef.unflatten(numbers), treedef.unflatten(muon_leaves))
    return pieces, treedef.unflatten(labels)


def _params_with_gradients(updates: Any, params: Any) -> Any:
    """The parameters that have gradients, in the structure of the gradients;
    raises where the two don't fit.

    A leaf that can't be trained may lack a gradient, and is left out: {"w": w, "name": "mlp"} with
    the gradients {"w": g, "name": None} gives {"w": w, "name": None}.
    Such are the gradients that `eqx.filter_grad` returns.
    """
    gradients = flatten_paths(updates)
    leaves = flatten_paths(params)
    for path, leaf in leaves.items():
        if path not in gradients and _is_trainable(leaf):
            raise ValueError(
                f"{path!r} is a parameter without a gradient; {_EQUAL_TREES}"
            )
    kept = []
    for path, gradient in gradients.items():
        if path not in leaves:
            raise ValueError(
                f"{path!r} is a gradient without a parameter; {_EQUAL_TREES}"
            )
        leaf = leaves[path]
        # `optax.masked` masks the leaves that another optimizer takes.
        is_present = not is_masked(gradient) and not is_masked(leaf)
        # A gradient of another shape could broadcast.
        if is_present and jnp.shape(gradient) != jnp.shape(leaf):
            raise ValueError(
                f"the gradient of {path!r} has shape {jnp.shape(gradient)}, the parameter "
                f"{jnp.shape(leaf)}."
            )
        # Where one of them is masked, the gradient's entry keeps the structure of the gradients: a
        # masked one stays masked. If the parameter alone is masked, its gradient stands here.
        kept.append(leaf if is_present else gradient)
    # `gradients` is in the order of the tree, in which a masked entry counts as a leaf.
    return jax.tree.structure(updates, is_leaf=is_masked).unflatten(kept)


_EQUAL_TREES = "tx.update(grads, state, params) needs equal trees."


def _check_state(state: Any, expected: Any) -> None:
    """Raise unless the arrays of the state have the shapes of those in `expected`, which are the
    shapes of the state that `init` makes for these parameters.

    Otherwise momentum of another shape would broadcast, or Optax would speak of trees. A restored
    state may have other dtypes.
    """
    # A restored state may be of another class with the field of Optax's partition.
    if not isinstance(state, type(expected)) and not hasattr(state, "inner_states"):
        raise ValueError(message_for_other_state(state))
    shapes = list(map(jnp.shape, jax.tree.leaves(state)))
    entries = jax.tree.leaves_with_path(expected)
    if shapes == [leaf.shape for _, leaf in entries]:
        return
    # The first array of another shape tells most; else one of the states has more arrays.
    difference = f"{len(shapes)} arrays"
    for (path, leaf), shape in zip(entries, shapes, strict=False):
        if leaf.shape != shape:
            name = jax.tree_util.keystr(path)
            difference = f"{name} {list(leaf.shape)} is {list(shape)}"
            break
    raise ValueError(
        "this state was made for other parameters, another routing, another `adam`, int8, or a "
        "schedule "
        f"in place of a number ({difference}); give the settings that it was made with, call init, "
        "or muonjax.cast_momentum(state, mu_dtype) for another `mu_dtype`."
    )


def _is_trainable(leaf: Any) -> bool:
    """Whether it is an array, or its shape, of real or complex numbers."""
    is_number = hasattr(leaf, "dtype") or isinstance(leaf, (float, complex))
    return is_number and jnp.issubdtype(dtype_of(leaf), jnp.inexact)
