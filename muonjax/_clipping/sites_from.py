"""Find attention modules by their parameters, so that nobody has to name them."""

import re
from typing import Any

from muonjax._clipping.errors import errors_of
from muonjax._clipping.matching import Modules, below
from muonjax._clipping.sites import QK_NORMS, Site, mha_site

PROJECTIONS = ("query", "key", "value", "out")  # of Flax's attention, Linen's and NNX's


def sites_from(params: Any) -> tuple[Site, ...]:
    """The sites of Flax's own attention modules, Linen's and NNX's, found by their parameters.

    A module counts as one if it has kernels `query`, `key`, `value` and `out` with an axis of heads. The axis that a
    stack of layers is on follows from their shapes. Attention of other kinds is left alone: give it a site of its own.

    Args:
      params: The parameters, or their shapes from `jax.eval_shape`.

    Returns:
      A `Site` a module.

    Raises:
      ValueError: No such module; one that normalises its queries and keys; a stack whose axis can't be told.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, muonjax
      >>> attention = nn.MultiHeadDotProductAttention(2)
      >>> params = jax.eval_shape(attention.init, jax.random.key(0), jnp.ones((1, 3, 8)))["params"]
      >>> [site.path for site in muonjax.sites_from({"block": {"attention": params}})]
      ['block/attention']
    """
    modules = Modules(params)
    with errors_of("sites_from"):
        sites = [site for root in modules.with_child("query/kernel") if (site := _site(root, modules))]
        if not sites:
            raise ValueError(
                f"none of Flax's attention modules among the parameters {sorted(modules.leaves)[:4]}, ...; name yours "
                "with mha_site, mla_site or fused_qkv_site."
            )
    return tuple(sites)


def _site(root: str, modules: Modules) -> Site | None:
    """The site of an attention module of Flax's; None where it is another module with a query."""
    query, key, value, out = (
        getattr(modules.leaves.get(below(root, f"{name}/kernel")), "shape", ()) for name in PROJECTIONS
    )
    if min(len(query), len(key), len(value), len(out)) < 3:
        return None
    if norms := [name for name in QK_NORMS if below(root, name) in modules.children]:
        raise ValueError(
            f"{root!r} normalizes its queries and keys ({', '.join(norms)}), which bounds its logits without a clip; "
            "name the other attention modules with mha_site."
        )
    return mha_site(re.escape(root), scan_axis=_stack_axis(root, query, out))


def _stack_axis(path: str, query: tuple[int, ...], out: tuple[int, ...]) -> int | None:
    """Axis of layers, from the query kernel (d, heads, head_dim) and the output kernel (heads, head_dim, d)."""
    if len(query) == 3:
        return None
    fits = [
        axis
        for axis in range(len(query))
        if len(query) == len(out) == 4
        and query[axis] == out[axis]
        and [n for i, n in enumerate(query) if i != axis][1:]
        == [n for i, n in enumerate(out) if i != axis][:2]
    ]
    if len(fits) != 1:
        raise ValueError(
            f"the axis of layers of {path!r} can't be told from its kernels {query} and {out}; name the "
            f"module with mha_site({re.escape(path)!r}, scan_axis=...)."
        )
    return fits[0]
