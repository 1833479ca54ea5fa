"""Parameter trees of Linen models with LoHa adapters: adopt trained ones, split, join, merge and unmerge them.

An adapter's parameters are at "<layer>/loha/" beside "<layer>/kernel". Every function returns plain dicts, without
boxes of metadata (`nn.with_partitioning`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from muonjax._adapters.adapter import FACTORS, MAGNITUDE, SCALE, TRAINED, Adapter
from muonjax._adapters.hadamard import column_norms
from muonjax._trees import listed
from muonjax.linen._loha import HOLDER


def adopt(params: Any, trained: Any) -> Any:
    """The parameters of a model with adapters, with those of the same trained model without adapters in them.

    DoRA's magnitudes become the norms of the trained kernels.

    Args:
      params: `model.init(...)["params"]` of the adapted model.
      trained: "params" of the plain one.

    Returns:
      A tree like `params`.

    Raises:
      ValueError: If only one of the two has a parameter, or it has another shape; the first ones are named.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, muonjax
      >>> x = jnp.ones((1, 6))
      >>> trained = nn.Dense(4).init(jax.random.key(0), x)["params"]
      >>> adapted = muonjax.linen.LoHaDense(4, rank=2)
      >>> params = muonjax.linen.adopt(adapted.init(jax.random.key(1), x)["params"], trained)
      >>> bool((params["kernel"] == trained["kernel"]).all())
      True
    """
    flat, found = flat_parameters(params), flat_parameters(trained)
    plain = {path for path in flat if path[-1] not in (*TRAINED, SCALE)}
    wrong = [f"{'/'.join(path)} is only in one" for path in sorted(plain ^ found.keys())]
    wrong += [
        f"{'/'.join(path)} has shape {found[path].shape}, the adapted model's {flat[path].shape}"
        for path in sorted(plain & found.keys())
        if found[path].shape != flat[path].shape
    ]
    if wrong:
        raise ValueError(f"adopt(params, trained): {listed(wrong)}.")
    flat |= found
    for layer, adapter in adapters_in(flat).items():
        if adapter.magnitude is not None:
            flat[(*layer, HOLDER, MAGNITUDE)] = _over_stack(_norms, "adopt", layer, adapter, flat)
    return unflatten_dict(flat)


def split_adapters(params: Any) -> tuple[Any, Any]:
    """Splits parameters into (adapters, frozen): what trains, and kernels, scales and everything else.

    Differentiate with respect to the first alone: then no kernel gets a gradient. `join_adapters` is the inverse.

    Args:
      params: The adapted model's parameters.

    Returns:
      Two trees; each leaf of `params` is in one of them.

    Raises:
      ValueError: If `params` has no adapter.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> x = jnp.ones((1, 6))
      >>> params = muonjax.linen.LoHaDense(4, rank=2).init(jax.random.key(0), x)["params"]
      >>> adapters, frozen = muonjax.linen.split_adapters(params)
      >>> len(jax.tree.leaves(adapters)), sorted(frozen)
      (4, ['bias', 'kernel', 'loha'])
    """
    flat = flat_parameters(params)
    trained = {path: value for path, value in flat.items() if path[-1] in TRAINED}
    if not trained:
        raise ValueError("split_adapters(params): no LoHa adapter in it.")
    return unflatten_dict(trained), unflatten_dict({p: v for p, v in flat.items() if p not in trained})


def join_adapters(adapters: Any, frozen: Any) -> Any:
    """Joins the two trees of `split_adapters` to the parameters that they were.

    Args:
      adapters: The first tree.
      frozen: The second tree.

    Returns:
      The adapted model's parameters.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> x = jnp.ones((1, 6))
      >>> params = muonjax.linen.LoHaDense(4, rank=2).init(jax.random.key(0), x)["params"]
      >>> joined = muonjax.linen.join_adapters(*muonjax.linen.split_adapters(params))
      >>> jax.tree.structure(joined) == jax.tree.structure(params)
      True
    """
    return unflatten_dict({**flat_parameters(frozen), **flat_parameters(adapters)})


def merge(params: Any) -> Any:
    """Parameters of the plain model with the adapted model's outputs: kernels with ΔW added, no adapters.

    Args:
      params: The adapted model's parameters.

    Returns:
      A tree like the plain model's parameters.

    Raises:
      ValueError: If `params` has no adapter, as after merging.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> x = jnp.ones((1, 6))
      >>> params = muonjax.linen.LoHaDense(4, rank=2).init(jax.random.key(0), x)["params"]
      >>> sorted(muonjax.linen.merge(params))
      ['bias', 'kernel']
    """
    flat = flat_parameters(params)
    adapters = adapters_in(flat)
    if not adapters:
        raise ValueError("merge(params): no LoHa adapter in it; was it merged already?")
    for layer, adapter in adapters.items():
        flat[(*layer, "kernel")] = _over_stack(lambda a, w: a.merge(w)[0], "merge", layer, adapter, flat)
        flat = {p: value for p, value in flat.items() if p[: len(layer) + 1] != (*layer, HOLDER)}
    return unflatten_dict(flat)


def unmerge(merged: Any, params: Any) -> Any:
    """The adapted model's parameters from merged kernels and the adapters; exact up to rounding.

    Args:
      merged: What `merge` returned.
      params: A tree that holds the adapters; its kernels, if any, are not read.

    Returns:
      A tree like the adapted model's parameters.

    Raises:
      ValueError: If `params` has no adapter, `merged` has one, or an adapter has a magnitude: its norms are not in
        `merged`, so keep the unmerged parameters instead.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> x = jnp.ones((1, 6))
      >>> params = muonjax.linen.LoHaDense(4, rank=2).init(jax.random.key(0), x)["params"]
      >>> again = muonjax.linen.unmerge(muonjax.linen.merge(params), params)
      >>> bool(jnp.allclose(again["kernel"], params["kernel"]))
      True
    """
    flat, given = flat_parameters(merged), flat_parameters(params)
    adapters = adapters_in(given)
    if not adapters or adapters_in(flat):
        raise ValueError(
            "unmerge(merged, params) needs merged parameters without LoHa factors, and params with them."
        )
    for layer, adapter in adapters.items():
        flat[(*layer, "kernel")] = _over_stack(Adapter.unmerge, "unmerge", layer, adapter, flat)
        flat |= {p: value for p, value in given.items() if p[: len(layer) + 1] == (*layer, HOLDER)}
    return unflatten_dict(flat)


def _norms(adapter: Adapter, kernel: jax.Array) -> jax.Array:
    return column_norms(kernel.reshape(-1, adapter.factors[1].shape[-1]))


def _over_stack(
    function: Callable[[Adapter, jax.Array], jax.Array],
    call: str,
    layer: tuple[str, ...],
    adapter: Adapter,
    flat: Mapping[tuple[str, ...], jax.Array],
) -> jax.Array:
    """`function` of an adapter and its kernel, also where `nn.scan` has stacked both along leading axes."""
    path = (*layer, "kernel")
    stack = adapter.factors[0].ndim - 2
    sizes = {leaf.shape[:stack] for leaf in (*adapter.factors, flat[path])}
    if len(sizes) > 1 or adapter.factors[0].shape[-1] != adapter.factors[1].shape[-2]:
        raise ValueError(
            f"{call}: the adapter at {'/'.join(layer)!r} is stacked along another axis than its first, with factors "
            f"of shapes {[factor.shape for factor in adapter.factors]}; scan with variable_axes={{'params': 0}}."
        )
    for _ in range(stack):
        function = jax.vmap(function)
    return function(adapter, flat[path])


def flat_parameters(params: Any) -> dict[tuple[str, ...], jax.Array]:
    """Parameters by path, without the boxes of metadata."""
    flat: Any = flatten_dict(nn.unbox(params))
    return dict(flat)


def adapters_in(flat: Mapping[tuple[str, ...], jax.Array]) -> dict[tuple[str, ...], Adapter]:
    """The adapters by the path of their layer."""
    layers = {path[:-2] for path in flat if path[-2:] == (HOLDER, FACTORS[0])}
    lost = sorted("/".join(layer) for layer in layers if (*layer, HOLDER, SCALE) not in flat)
    if lost:
        raise ValueError(
            f"The adapters of {listed(lost, ', ')} have no {SCALE}; join_adapters adds the frozen parameters."
        )
    return {
        layer: Adapter.of({p[-1]: value for p, value in flat.items() if p[:-1] == (*layer, HOLDER)})
        for layer in sorted(layers)
    }
