"""`jax.value_and_grad` that also returns each head's largest attention logit,
for any JAX function."""

import functools
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from muonjax._common.nnx_models import functions_for, is_model
from muonjax._common.trees import flatten_paths
from muonjax._inspect.program import check_arrays, find_maxima, named_call


def value_and_grad(
    fun: Callable[..., Any], argnums: Any = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` that also returns the largest attention logits of each head,
    for any JAX function.

    The logits are read from the program: a softmax computes their maximum anyway, which becomes one
    more output. Loss and gradients stay as they are, to the bit under `jax.jit`. Only the arguments
    `argnums` are traced; everything else that `fun` is given or reads stays as it is: Python's
    flags and strings, arrays and tracers of enclosing transformations, mutable `Ref`s. As under
    `jax.jit`, `fun` can't branch in Python on a value computed from the traced arguments.

    Args:
      fun: Returns a scalar, or with `has_aux` a scalar and a tree of anything.
        Its first argument may be an NNX model.
      argnums: The positional arguments to differentiate by, as in `jax.value_and_grad`, the
        parameters first. For an NNX model as in `nnx.value_and_grad`, an `nnx.DiffState` too.
      has_aux: Whether `fun` returns a pair (loss, aux).

    Returns:
      A function of `fun`'s arguments that returns ((loss, max_logits), grads), or with `has_aux`
      ((loss, (aux, max_logits)), grads). `max_logits` has for each attention that can be clipped
      exactly an array [*layers, heads], float32, by its name in `Program.attentions`: the largest
      logit after scale and mask; where a bias is added, without it.

    Raises:
      ValueError: No attention is found in `fun`, or none that can be clipped;
        with the reasons and their lines.
      TypeError: `fun` returns no scalar, or with `has_aux` no pair;
        a parameter is a function or an integer.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> def loss(params, x):
      ...   q, k, v = (jnp.einsum("btd,dhs->bths", x, params[name]) for name in "qkv")
      ...   return jnp.mean(jax.nn.dot_product_attention(q, k, v) ** 2)
      >>> params = {name: jnp.ones((8, 2, 4)) for name in "qkv"}
      >>> (value, max_logits), grads = muonjax.value_and_grad(loss)(params, jnp.ones((1, 3, 8)))
      >>> tx = muonjax.muonclip(1e-3, muonjax.inspect(loss, params, jnp.ones((1, 3, 8))))
      >>> updates, state = tx.update(grads, tx.init(params), params, max_logits=max_logits)
      >>> {name: maxima.shape for name, maxima in max_logits.items()}
      {'max_logits': (2,)}
    """
    if not isinstance(has_aux, bool):
        raise TypeError(
            f"value_and_grad(fun, has_aux={reprlib.repr(has_aux)}) must be True or False; the "
            "arguments of fun come later: value_and_grad(fun)(params, batch)."
        )

    @functools.wraps(fun)
    def value_and_gradients(*args: Any, **kwargs: Any) -> Any:
        # `muonjax.nnx` if the first argument is an NNX model, whose parameters Flax's own
        # transformation separates from its state; None for any other.
        library = functions_for(args[0]) if args else None
        if library is not None:
            return library.value_and_grad_of_model(
                _with_max_logits, fun, argnums, has_aux
            )(*args, **kwargs)
        # A model as a later argument is refused, and a leaf without a derivative, with its path.
        # Where an argument is missing, `jax.value_and_grad` says so.
        for i in jax.tree.leaves(argnums):
            if i < len(args):
                _check_differentiable(named_call("value_and_grad", fun), args[i])
        # To JAX the largest logits are an `aux`: so `has_aux` is true also if the caller's is not.
        measured = _with_max_logits(fun, argnums, has_aux)
        return jax.value_and_grad(measured, argnums, has_aux=True)(*args, **kwargs)

    return value_and_gradients


def _with_max_logits(
    fun: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool
) -> Callable[..., tuple[Any, Any]]:
    """`fun` that returns (loss, max_logits), or with `has_aux` (loss, (aux, max_logits)):
    what is differentiated.

    Each call traces `fun` to a jaxpr whose inputs are the arguments `argnums`, and runs it with the
    largest logits as further results, {name of the attention: [*layers, heads]}. The caller's
    `jax.value_and_grad`, or Flax's for an NNX model, differentiates this run.
    """
    call = named_call("value_and_grad", fun)  # for errors

    @functools.wraps(fun)
    def measured(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # By which arguments it is differentiated: `argnums` is one number, or several.
        chosen = jax.tree.leaves(argnums)
        parameters = [args[i] for i in chosen]
        aux: Any = None  # what `fun` returned with the loss while it was traced

        def loss_and_traced(*parameters: Any) -> list[Any]:
            """The loss and the tracers in `aux`: the results of the jaxpr, by which its run
            replaces the tracers. All else, such as strings, stays in `aux`."""
            nonlocal aux
            # All other arguments are what they were: flags, strings,
            # tracers of enclosing transformations.
            arguments = list(args)
            for i, parameter in zip(chosen, parameters, strict=True):
                arguments[i] = parameter
            # Without `has_aux` `aux` is None. `call` is "value_and_grad(loss)", say, for errors.
            loss, aux = _loss_and_aux(call, fun(*arguments, **kwargs), has_aux)
            traced = [x for x in jax.tree.leaves(aux) if isinstance(x, Tracer)]
            return [loss, *traced]

        closed = jax.make_jaxpr(loss_and_traced)(*parameters)
        # In the jaxpr the arrays of all other arguments, such as the batch, are constants, and so
        # is a mask that `fun` makes in NumPy. The reader decides by the numbers of the mask, and
        # must not by those of the batch: `given` has the arrays that are data.
        given = jax.tree.leaves((args, kwargs))
        # What a run of the jaxpr returns, and the largest logits of each attention, by name. An
        # error is raised if no attention can be clipped.
        (loss, *arrays), max_logits = find_maxima(closed, parameters, call, given)
        if not has_aux:
            return loss, max_logits
        # `aux` with the results of the run in place of its tracers, in the same order.
        results = iter(arrays)
        aux = jax.tree.map(lambda x: next(results) if isinstance(x, Tracer) else x, aux)
        return loss, (aux, max_logits)

    return measured


def _loss_and_aux(call: str, result: Any, has_aux: bool) -> tuple[Any, Any]:
    """The loss in what `fun` returned, and what comes with it, or None.

    Raises:
      TypeError: As in `value_and_grad`.
    """
    if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
        raise TypeError(
            "value_and_grad(fun, has_aux=True) needs a pair (loss, aux) from fun, got "
            f"{reprlib.repr(result)}."
        )
    loss, aux = result if has_aux else (result, None)
    # A pair without `has_aux` is the usual mistake. Whether an array is a scalar, JAX checks.
    if not jax.tree_util.all_leaves([loss]):
        raise TypeError(
            f"{call} needs one scalar from fun, got a {type(loss).__name__}; return the sum of "
            "several losses, or call value_and_grad(fun, has_aux=True) if fun returns (loss, aux)."
        )
    return loss, aux


def _check_differentiable(call: str, params: Any) -> None:
    """Raise for a leaf that has no derivative, with its path: JAX's own error has only its type."""
    # A first argument that is a model goes to `nnx.value_and_grad`. Any other one,
    # such as a teacher's, does not.
    if is_model(params):
        raise TypeError(f"{call}: an NNX model must be the first argument of fun.")
    check_arrays(call, params)
    # Integers may be counters in the state of an NNX model, given in the model's place. A Python
    # number has no dtype: JAX itself takes a float and refuses an integer.
    for path, leaf in flatten_paths(params).items():
        if hasattr(leaf, "dtype") and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"{call}: {path!r} is {leaf.dtype}, which has no derivative; give it to the loss "
                "in another argument, not among the arguments to differentiate by. An NNX model is "
                "given itself."
            )
