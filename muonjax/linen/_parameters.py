"""The Linen door's functions of a tree of parameters with LoHa adapters: adopt, split, merge, save, load.

An adapter's parameters lie at "<layer>/loha/" beside "<layer>/kernel". Every function here returns plain dicts:
boxes of metadata (`nn.with_partitioning`) are taken off.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from muonjax._adapters import lycoris as _lycoris
from muonjax._adapters.adapter import Adapter
from muonjax._adapters.hadamard import column_norms
from muonjax._adapters.lycoris import Place, layer_name
from muonjax._adapters.names import FACTORS, MAGNITUDE, SCALE, TRAINED
from muonjax.linen._loha import HOLDER


def adopt(params: Any, trained: Any) -> Any:
    """Puts the parameters of a trained model without adapters into those of the same model with adapters.

    DoRA's magnitudes become the norms of the trained kernels.

    Args:
      params: `model.init(...)["params"]` of the adapted model.
      trained: "params" of the plain one.

    Returns:
      A tree like `params`.

    Raises:
      ValueError: a parameter that only one of the two has, or of another shape; all are named.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, muonjax
      >>> x = jnp.ones((1, 6))
      >>> trained = nn.Dense(4).init(jax.random.key(0), x)["params"]
      >>> adapted = muonjax.linen.LoHaDense(4, rank=2)
      >>> params = muonjax.linen.adopt(adapted.init(jax.random.key(1), x)["params"], trained)
      >>> bool((params["kernel"] == trained["kernel"]).all())
      True
    """
    flat, found = _flat(params), _flat(trained)
    plain = {path for path in flat if path[-1] not in (*TRAINED, SCALE)}
    wrong = [f"{'/'.join(path)} is only in one" for path in sorted(plain ^ found.keys())]
    wrong += [
        f"{'/'.join(path)} has shape {found[path].shape}, the adapted model's {flat[path].shape}"
        for path in sorted(plain & found.keys())
        if found[path].shape != flat[path].shape
    ]
    if wrong:
        raise ValueError(f"adopt(params, trained): {'; '.join(wrong)}.")
    flat |= found
    for layer, adapter in _adapters(flat).items():
        if adapter.magnitude is not None:
            flat[(*layer, HOLDER, MAGNITUDE)] = _over_stack(_norms, "adopt", layer, adapter, flat)
    return unflatten_dict(flat)


def split_adapters(params: Any) -> tuple[Any, Any]:
    """(adapters, frozen): what trains, and everything else, kernels and scales; `join_adapters` undoes it.

    Differentiate with respect to the first alone, and no kernel gets a gradient.

    Args:
      params: the adapted model's.

    Returns:
      Two trees, with the leaves of `params` between them.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> x = jnp.ones((1, 6))
      >>> params = muonjax.linen.LoHaDense(4, rank=2).init(jax.random.key(0), x)["params"]
      >>> adapters, frozen = muonjax.linen.split_adapters(params)
      >>> len(jax.tree.leaves(adapters)), sorted(frozen)
      (4, ['bias', 'kernel', 'loha'])
    """
    flat = _flat(params)
    trained = {path: value for path, value in flat.items() if path[-1] in TRAINED}
    if not trained:
        raise ValueError("split_adapters(params): no LoHa adapter in it.")
    return unflatten_dict(trained), unflatten_dict({p: v for p, v in flat.items() if p not in trained})


def join_adapters(adapters: Any, frozen: Any) -> Any:
    """The parameters that `split_adapters` took apart.

    Args:
      adapters: the first tree that it returned.
      frozen: the second.

    Returns:
      The parameters, as before.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> x = jnp.ones((1, 6))
      >>> params = muonjax.linen.LoHaDense(4, rank=2).init(jax.random.key(0), x)["params"]
      >>> joined = muonjax.linen.join_adapters(*muonjax.linen.split_adapters(params))
      >>> jax.tree.structure(joined) == jax.tree.structure(params)
      True
    """
    return unflatten_dict({**_flat(frozen), **_flat(adapters)})


def merge(params: Any) -> Any:
    """The parameters of the plain model that does what the adapted one did: kernels with ΔW, no adapters.

    Args:
      params: the adapted model's.

    Returns:
      A tree as the plain model's.

    Raises:
      ValueError: no adapter in `params`; merging twice ends so.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> x = jnp.ones((1, 6))
      >>> params = muonjax.linen.LoHaDense(4, rank=2).init(jax.random.key(0), x)["params"]
      >>> sorted(muonjax.linen.merge(params))
      ['bias', 'kernel']
    """
    flat = _flat(params)
    adapters = _adapters(flat)
    if not adapters:
        raise ValueError("merge(params): no LoHa adapter in it; was it merged already?")
    for layer, adapter in adapters.items():
        flat[(*layer, "kernel")] = _over_stack(_merged, "merge", layer, adapter, flat)
        flat = {p: value for p, value in flat.items() if p[: len(layer) + 1] != (*layer, HOLDER)}
    return unflatten_dict(flat)


def unmerge(merged: Any, params: Any) -> Any:
    """The adapted model's parameters again, to rounding, from merged kernels and the adapters.

    Args:
      merged: what `merge` returned.
      params: a tree that holds the adapters; its kernels, if any, are not read.

    Returns:
      A tree like the adapted model's parameters.

    Raises:
      ValueError: no adapter in `params`, adapters in `merged`, or an adapter with a magnitude, whose norms
        `merge` dropped: keep the unmerged parameters instead.

    Example:
      >>> import jax, jax.numpy as jnp, muonjax
      >>> x = jnp.ones((1, 6))
      >>> params = muonjax.linen.LoHaDense(4, rank=2).init(jax.random.key(0), x)["params"]
      >>> again = muonjax.linen.unmerge(muonjax.linen.merge(params), params)
      >>> bool(jnp.allclose(again["kernel"], params["kernel"]))
      True
    """
    flat, given = _flat(merged), _flat(params)
    adapters = _adapters(given)
    if not adapters or _adapters(flat):
        raise ValueError(
            "unmerge(merged, params) needs merged kernels without, and adapters with, LoHa factors."
        )
    for layer, adapter in adapters.items():
        flat[(*layer, "kernel")] = _over_stack(Adapter.unmerge, "unmerge", layer, adapter, flat)
        flat |= {p: value for p, value in given.items() if p[: len(layer) + 1] == (*layer, HOLDER)}
    return unflatten_dict(flat)


def save_lycoris(
    params: Any,
    file: str | os.PathLike[str],
    *,
    name_of: Callable[[str], str] = layer_name,
    convolutions: str = "(?i)conv",
) -> None:
    """Writes the adapters in `params` as LyCORIS names and shapes them, to a safetensors file.

    Args:
      params: the adapted model's.
      file: its path; needs the `safetensors` package.
      name_of: from a layer's path, "Block_0/Dense_1", to its name in the file, "lycoris_Block_0_Dense_1".
      convolutions: a regular expression searched in a layer's path. A kernel of three axes alone does not
        tell whether its first is a window, and files order such a kernel's rows differently.

    Raises:
      ValueError: no adapter in `params`, adapters stacked by `nn.scan`, two layers of one name.
    """
    flat = _flat(params)
    found = {
        "/".join(layer): (
            adapter,
            _place(layer, flat[(*layer, "kernel")], adapter.factors[1].shape[-1], convolutions),
        )
        for layer, adapter in _adapters(flat).items()
    }
    if not found:
        raise ValueError("save_lycoris(params, …): no LoHa adapter in it.")
    _lycoris.write(file, found, name_of)


def load_lycoris(
    params: Any,
    file: str | os.PathLike[str],
    *,
    name_of: Callable[[str], str] = layer_name,
    convolutions: str = "(?i)conv",
) -> Any:
    """The adapted model's parameters with the adapters of a LyCORIS file in place of its own.

    Args:
      params: the adapted model's, made with the file's rank, `decompose` and `tucker`.
      file: as in `save_lycoris`.
      name_of: as in `save_lycoris`.
      convolutions: as in `save_lycoris`.

    Returns:
      A tree like `params`.

    Raises:
      ValueError: a tensor that is missing, misshapen, unknown or of no adapted layer, or an adapter of another
        rank or kind than the model's; all are named.
    """
    flat = _flat(params)
    adapters = _adapters(flat)
    places = {
        "/".join(layer): _place(layer, flat[(*layer, "kernel")], adapter.factors[1].shape[-1], convolutions)
        for layer, adapter in adapters.items()
    }
    found = _lycoris.read(file, places, name_of)
    wrong = []
    for layer, own in adapters.items():
        if (adapter := found.get("/".join(layer))) is None:
            continue  # a file may hold fewer layers than the model adapts
        # The module would not read a tensor that it does not expect: it must be the module of this file.
        theirs, ours = ({name: value.shape for name, value in a.named().items()} for a in (adapter, own))
        if theirs != ours:
            wrong.append(f"{'/'.join(layer)} is {_kind(adapter)} in the file, {_kind(own)} in the model")
            continue
        values = adapter.named() | {SCALE: adapter.scale}
        paths = {name: (*layer, HOLDER, name) for name in values}
        flat |= {path: jnp.asarray(values[name], flat[path].dtype) for name, path in paths.items()}
    if wrong:
        raise ValueError(
            f"{os.fspath(file)} was not loaded: {'; '.join(wrong)}; make the model like the file."
        )
    return unflatten_dict(flat)


def _kind(adapter: Adapter) -> str:
    return (
        f"rank={adapter.factors[0].shape[-1]}, tucker={adapter.cores is not None}, "
        f"decompose={adapter.magnitude is not None}"
    )


def _place(layer: tuple[str, ...], kernel: jax.Array, outputs: int, convolutions: str) -> Place:
    if kernel.ndim > 2 and re.search(convolutions, "/".join(layer)):
        return Place(kernel.shape, kernel.ndim - 1, kernel.ndim - 2)
    axes = 1
    while math.prod(kernel.shape[-axes:]) < outputs:
        axes += 1
    return Place(kernel.shape, kernel.ndim - axes)


def _merged(adapter: Adapter, kernel: jax.Array) -> jax.Array:
    return adapter.merge(kernel)[0]


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


def _flat(params: Any) -> dict[tuple[str, ...], jax.Array]:
    flat: Any = flatten_dict(nn.unbox(params))
    return dict(flat)


def _adapters(flat: Mapping[tuple[str, ...], jax.Array]) -> dict[tuple[str, ...], Adapter]:
    """The adapters by the path of their layer."""
    layers = {path[:-2] for path in flat if path[-2:] == (HOLDER, FACTORS[0])}
    lost = sorted("/".join(layer) for layer in layers if (*layer, HOLDER, SCALE) not in flat)
    if lost:
        raise ValueError(
            f"The adapters of {', '.join(lost)} have lost their {SCALE}; join_adapters puts back what split_adapters "
            "took."
        )
    return {
        layer: Adapter.of({p[-1]: value for p, value in flat.items() if p[:-1] == (*layer, HOLDER)})
        for layer in sorted(layers)
    }
