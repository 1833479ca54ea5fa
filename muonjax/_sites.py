"""Where to clip: which parameters make an attention's logits, and where their head axis is."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from muonjax._routing import names

Side = Literal["query", "key"]


@dataclasses.dataclass(frozen=True)
class Factor:
    """One parameter of a site, and how the clip scales it.

    Attributes:
      path: relative to the attention module, "query/kernel".
      side: the query's or the key's half of the logit.
      head_axis: of one layer's parameter, counted from its end.
      optional: a bias may be missing, a kernel may not.
    """

    path: str
    side: Side
    head_axis: int = -2
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class Site:
    """An attention module, or all modules whose path matches: what `qk_clip` watches and scales.

    Attributes:
      path: regular expression that the "/"-joined path of the module must match in full.
      factors: its parameters.
      scan_axis: where a stack of layers has its axis in the parameters (`nn.scan`, `nnx.vmap`).
    """

    path: str
    factors: tuple[Factor, ...]
    scan_axis: int = 0


def mha_site(path: str = ".*", *, scan_axis: int = 0) -> Site:
    """Flax's multi-head attention, Linen or NNX: kernels (d, heads, size) and their biases.

    Args:
      path: regular expression for the "/"-joined path of the modules, such as "blocks/.*/attention"; all
        multi-head attentions by default.
      scan_axis: the axis of layers in stacked parameters.

    Example:
      >>> import muonjax
      >>> muonjax.mha_site("decoder/.*").path
      'decoder/.*'
    """
    return Site(
        path,
        tuple(
            Factor(f"{side}/{name}", side, optional=name == "bias")
            for side in ("query", "key")
            for name in ("kernel", "bias")
        ),
        scan_axis,
    )


def flatten_paths(tree: Any) -> dict[str, Any]:
    """Leaves by "/"-joined path, masked nodes among them."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    return {"/".join(names(path)): leaf for path, leaf in leaves}


@dataclasses.dataclass(frozen=True)
class Found:
    """One attention module of a parameter tree, with the factors that it has."""

    name: str
    site: Site
    factors: Mapping[str, Factor]  # by full parameter path
    heads: Mapping[Side, int]
    stack: tuple[int, ...]  # sizes of the stack axes in front of the heads, in its statistic


def find_sites(params: Any, sites: Sequence[Site], *, call: str) -> dict[str, Found]:
    """Every module that a site matches, by path; a site that matches none is an error."""
    leaves = flatten_paths(params)
    found: dict[str, Found] = {}
    for site in sites:
        anchor = site.factors[0].path
        count = 0
        for path in leaves:
            if path != anchor and not path.endswith("/" + anchor):
                continue
            name = path[: -len(anchor)].rstrip("/")
            if re.fullmatch(site.path, name) and name not in found:
                found[name] = _describe(name, site, leaves, call)
                count += 1
        if not count:
            shown = ", ".join(sorted(leaves)[:4])
            raise ValueError(
                f"{call}: the site {site.path!r} matches no module with a parameter {anchor!r}; the parameters "
                f"are {shown}, ... Correct its path."
            )
    return found


def _describe(name: str, site: Site, leaves: Mapping[str, Any], call: str) -> Found:
    prefix = f"{name}/" if name else ""
    factors, heads, stacks = {}, {}, {}
    for norm in ("query_ln", "key_ln", "q_norm", "k_norm"):
        if any(path.startswith(f"{prefix}{norm}/") for path in leaves):
            raise ValueError(
                f"{call}: {name!r} normalizes its queries and keys ({norm}), so scaling their kernels can't change "
                "the logits; take this module out of the sites: it needs no clip."
            )
    for factor in site.factors:
        path = prefix + factor.path
        if path not in leaves:
            if factor.optional:
                continue
            raise ValueError(f"{call}: the site {name!r} has no parameter {path!r}.")
        leaf = leaves[path]
        if isinstance(leaf, optax.MaskedNode):
            raise ValueError(
                f"{call}: {path!r} is masked out of the optimizer, so its logits can't be clipped; take {name!r} "
                "out of the sites, or train it."
            )
        rank = 3 if factor.path.endswith("kernel") else 2
        stack = (site.scan_axis % leaf.ndim,) if leaf.ndim == rank + 1 else ()
        if leaf.ndim not in (rank, rank + 1):
            raise ValueError(
                f"{call}: {path!r} has shape {leaf.shape}; a multi-head attention's has {rank} axes."
            )
        factors[path] = factor
        size = leaf.shape[_head_axis(factor, leaf.ndim, stack)]
        if heads.setdefault(factor.side, size) != size:
            raise ValueError(
                f"{call}: {path!r} has {size} heads on its axis, its neighbours {heads[factor.side]}."
            )
        stacks[path] = tuple(leaf.shape[axis] for axis in stack)
    if len(set(stacks.values())) > 1:
        raise ValueError(f"{call}: the parameters of {name!r} disagree on the stack of layers: {stacks}.")
    if heads["query"] % heads["key"]:
        raise ValueError(f"{call}: {name!r} has {heads['query']} query heads on {heads['key']} key heads.")
    return Found(name, site, factors, heads, next(iter(stacks.values())))


def _head_axis(factor: Factor, rank: int, stack: tuple[int, ...]) -> int:
    """The head axis of a stacked parameter: that of one layer's, with the stack axis put back in."""
    return [axis for axis in range(rank) if axis not in stack][factor.head_axis]


def broadcast_heads(scale: jax.Array, found: Found, path: str, leaf: jax.Array) -> jax.Array:
    """`scale` [*stack, heads] shaped so that it multiplies the parameter at `path`."""
    stack = (found.site.scan_axis % leaf.ndim,) if found.stack else ()
    axes = (*stack, _head_axis(found.factors[path], leaf.ndim, stack))
    shape = [leaf.shape[axis] if axis in axes else 1 for axis in range(leaf.ndim)]
    return jnp.transpose(scale, sorted(range(len(axes)), key=axes.__getitem__)).reshape(shape)


def match_statistics(statistics: Any, found: Mapping[str, Found], *, call: str) -> dict[str, jax.Array]:
    """The maximum logits of each found module, float32 [*stack, heads], out of what Flax sowed."""
    given: dict[str, list[jax.Array]] = {}
    for path, value in flatten_paths(statistics).items():
        parts = [part for part in path.split("/") if part != "intermediates"]
        if "max_logits" in parts:
            parts = parts[: parts.index("max_logits")]
        elif path not in found:
            continue  # other things that the model sowed
        given.setdefault("/".join(parts), []).append(value)
    unclaimed = sorted(set(given) - set(found))
    missing = sorted(set(found) - set(given))
    if unclaimed or missing:
        raise ValueError(
            f"{call}: max_logits and sites do not fit: sites without statistics {missing}, statistics without a "
            f"site {unclaimed}. Use muonjax's attention_fn in every attention that a site names, and only there."
        )
    result = {}
    for name, values in given.items():
        largest = values[0].astype(jnp.float32)
        for value in values[1:]:
            largest = jnp.maximum(largest, value.astype(jnp.float32))
        want = (*found[name].stack, found[name].heads["query"])
        if largest.shape != want:
            raise ValueError(
                f"{call}: max_logits of {name!r} have shape {largest.shape}; the parameters say {want}."
            )
        result[name] = jax.lax.stop_gradient(largest)
    return result
