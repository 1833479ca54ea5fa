"""Beside the way of the gradient: how an adapter's parameters are called, in parameter trees and in files.

Names only, so that what looks at trees of parameters need not know adapters.
"""

from typing import Any

import jax

from muonjax._trees import names

FACTORS: tuple[str, str, str, str] = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
CORES: tuple[str, str] = ("hada_t1", "hada_t2")
SCALE: str = "hada_scale"
MAGNITUDE: str = "dora_scale"
TRAINED = (*FACTORS, *CORES, MAGNITUDE)


def adapter_mask(params: Any) -> Any:
    """A tree like `params` of bools: True for what trains in an adapter, False for everything else.

    For `optax.masked`; what it masks out passes through, so set it to zero (see the example). Cheaper, since
    frozen kernels then get no gradient: differentiate the adapters alone (`muonjax.linen.split_adapters`; in
    NNX, `nnx.DiffState(0, LoHaParam)`).

    Args:
      params: a tree of parameters, Linen's or the pure state of an NNX model; leaves of any shape.

    Returns:
      A tree of bools like `params`.

    Example:
      >>> import optax
      >>> params = {"kernel": 1.0, "loha": {"hada_w1_a": 2.0, "hada_scale": 0.5}}
      >>> adapter_mask(params)
      {'kernel': False, 'loha': {'hada_scale': False, 'hada_w1_a': True}}
      >>> labels = jax.tree.map(lambda trains: "train" if trains else "freeze", adapter_mask(params))
      >>> tx = optax.partition({"train": optax.adam(1e-3), "freeze": optax.set_to_zero()}, labels)
    """

    def trains(path: Any, _: Any) -> bool:
        return bool(path) and names(path)[-1] in TRAINED

    return jax.tree_util.tree_map_with_path(trains, params)
