"""`jax.value_and_grad` that also returns each head's largest attention logit, for any JAX function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from muonjax._program.rewrite import Probe, report

FindProbes = Callable[[ClosedJaxpr, int], Iterable[tuple[str, Probe]]]


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    find_probes: FindProbes,
) -> Callable[..., tuple[Any, Any]]:
    """The value, the largest logits and the gradients of `fun`.

    Only the arguments `argnums` are traced. Everything else that `fun` is given or reads stays as it is: Python's flags
    and strings, arrays and tracers from around, mutable `Ref`s. As under `jax.jit`, `fun` can't branch in Python on a
    value computed from the traced arguments. The derivative is JAX's own.

    Args:
        fun: returns a scalar, or with `has_aux` a scalar and a tree of anything.
        argnums: the positional arguments to differentiate by.
        has_aux: whether `fun` returns a pair.
        find_probes: called with the jaxpr of `fun` and how many leaves the differentiated arguments have; returns a
            name and a probe for each attention site.

    Returns:
        A function of `fun`'s arguments that returns `((loss, max_logits), grads)`, with `has_aux`
        `((loss, (aux, max_logits)), grads)`. `max_logits` has an array `[*layers, heads]` for each site, by name.

    Raises:
        ValueError: if no attention is found in `fun`.
    """

    @functools.wraps(fun)
    def measured(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        chosen = [argnums] if isinstance(argnums, int) else list(argnums)
        leaves, structure = jax.tree.flatten([args[i] for i in chosen])
        aux_leaves: list[Any] = []
        aux_structure: Any = None

        def traced(*leaves: Any) -> list[Any]:
            nonlocal aux_leaves, aux_structure
            given = list(args)
            for i, argument in zip(chosen, jax.tree.unflatten(structure, leaves), strict=True):
                given[i] = argument
            result = fun(*given, **kwargs)
            if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
                raise TypeError(
                    f"value_and_grad(fun, has_aux=True) needs a pair (loss, aux) from fun, got {result!r}."
                )
            loss, aux = result if has_aux else (result, None)
            aux_leaves, aux_structure = jax.tree.flatten(aux)
            return [loss, *filter(_is_traced, aux_leaves)]

        closed = jax.make_jaxpr(traced)(*leaves)
        sites = list(find_probes(closed, len(leaves)))
        if not sites:
            raise ValueError(
                f"value_and_grad({getattr(fun, '__name__', fun)}) finds no attention: no softmax of a product of two "
                "activations; use jax.value_and_grad."
            )
        loss, *results = jaxpr_as_fun(report(closed, [probe for _, probe in sites]))(*leaves)
        arrays = iter(results)
        aux_leaves = [next(arrays) if _is_traced(leaf) else leaf for leaf in aux_leaves]
        max_logits = dict(zip((name for name, _ in sites), arrays, strict=True))
        return loss, (jax.tree.unflatten(aux_structure, aux_leaves), max_logits) if has_aux else max_logits

    return jax.value_and_grad(measured, argnums, has_aux=True)


def _is_traced(leaf: Any) -> bool:
    """Whether a result depends on a trace; all others, arrays or not, are kept beside it."""
    return isinstance(leaf, Tracer)
