"""Find the modules that sites match in a tree of parameters,
and check that the clip can scale them."""

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from muonjax._clip.scale import PlacedScale, placed
from muonjax._clip.site import PlacedSite, Site
from muonjax._common.trees import dtype_of, flatten_paths, is_masked, listed


def below(root: str, path: str) -> str:
    """The path of something below the module `root`, which is "" for the whole tree."""
    return f"{root}/{path}" if root else path


def module_of(paths: Sequence[str]) -> str:
    """The path of the smallest module that holds all of these parameters."""
    return posixpath.commonpath([_parent(path) for path in paths] or [""])


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


class Modules:
    """The modules of a tree of parameters.

    Attributes:
      leaves: The parameters by path, {"decoder/query/kernel": array}.
      leaves_of: The paths of all parameters in a module, by the path of the module:
        "decoder/query", "decoder", and "" for the whole tree.
    """

    def __init__(self, params: Any):
        self.leaves = flatten_paths(params)
        self.leaves_of: dict[str, list[str]] = defaultdict(list)
        for leaf in self.leaves:
            # "decoder/query", "decoder" and "" hold "decoder/query/kernel".
            module = leaf
            while module:
                module = _parent(module)
                self.leaves_of[module].append(leaf)

    def is_trained(self, path: str) -> bool:
        """Whether there is a leaf of this path that is not masked."""
        leaf = self.leaves.get(path)
        return leaf is not None and not is_masked(leaf)


def place_sites(
    modules: Modules, sites: Iterable[Site]
) -> tuple[list[PlacedSite], set[str]]:
    """A site for every module that the sites match, checked against its parameters;
    and the names of the statistics to skip.

    `value_and_grad` measures all attentions of a program. The statistics of those with a parameter
    that does not train are skipped.
    """
    attentions: dict[str, PlacedSite] = {}
    not_trained: set[str] = set()
    for site in sites:
        # A site by hand is a pattern. If it finds no parameters, that is a mistake, and `_matched`
        # or `_placed_scales` raises. An exact site is one attention of a program.
        paths = [site.path] if site.exact else _matched(site, modules)
        for path in paths:
            # The key of a statistic: the path of its module, then the site's signal, which names it
            # where a module has several: "attention/" has none. The whole tree has the path "".
            name = below(path, site.signal).strip("/") or "max_logits"
            # In an attention that does not train a parameter is missing or masked here. If the site
            # is by hand, `_placed_scales` raises for it, but not for a bias that is missing.
            leaves = [below(path, scale.path) for scale in site.scales]
            if site.exact and not all(map(modules.is_trained, leaves)):
                not_trained.add(name)
                continue
            # With two patterns for one module its heads would be scaled twice.
            if name in attentions:
                raise ValueError(
                    f"two sites match {name!r}; narrow or merge them, or give each its signal."
                )
            scales = _placed_scales(site, path, leaves, modules)
            attentions[name] = PlacedSite(name, tuple(scales))
    # There is at least one site, and one by hand has a module by now, or has raised. So without any
    # attention, all sites are those of a program, and no attention of it trains here.
    if not attentions:
        names = listed(sorted(not_trained), ", ")
        raise ValueError(
            f"no attention of the program is trained here: parameters of {names} are missing or "
            "masked. Give the tree that was inspected, or take the optimizer without the clip, "
            "such as muonjax.muon."
        )
    return list(attentions.values()), not_trained


def _matched(site: Site, modules: Modules) -> list[str]:
    """The paths of the modules that a site matches; raises ValueError if there are none.

    The site's pattern has to match the path of the module, and the module has to have a child with
    the name of the site's first projection: with the default pattern ".*", `mha_site` finds the
    modules that have a `query`. What else the site scales is looked up later.
    """
    # The child is "query" for the scale of "query/kernel", and "q" for that of a bare array "q".
    first = site.scales[0].path
    child = _parent(first) or first
    # A path without wildcards can match itself alone, and is looked up: there may be a thousand
    # sites, and each search goes over all modules.
    is_plain = re.escape(site.path) == site.path
    candidates = [site.path] if is_plain else sorted(modules.leaves_of)
    matched = []
    for path in candidates:
        place = below(path, child)
        # The child is a module, or a bare array.
        has_child = place in modules.leaves_of or place in modules.leaves
        if has_child and re.fullmatch(site.path, path):
            matched.append(path)
    if matched:
        return matched
    holders = sorted({repr(_parent(leaf)) for leaf in modules.leaves})
    raise ValueError(
        f"the site {site.path!r} matches no module with {child!r}: it has to match a whole path, "
        f"and parameters are in [{listed(holders, ', ')}]. "
        "Give the projections' own names; a frozen one that is no parameter here can't be clipped."
    )


def _placed_scales(
    site: Site, path: str, leaves: Sequence[str], modules: Modules
) -> list[PlacedScale]:
    """The scales of a site on the module of this path, but for optional ones without a parameter.

    Raises ValueError or TypeError where the parameters do not fit.
    `leaves` are the paths of all scales' parameters.
    """
    scan_axis: Any = site.scan_axis  # a tuple after the checks of `Site`
    scales: list[PlacedScale] = []
    for scale, leaf in zip(site.scales, leaves, strict=True):
        # A layer without a bias has no leaf for it, and its optional scale is left out. A bias that
        # `optax.masked` hides is in `modules.leaves`, and `_checked_shape` refuses it: the clip
        # could not scale it together with its kernel.
        if not scale.optional or leaf in modules.leaves:
            shape = _checked_shape(path, leaf, modules)
            scales.append(placed(scale, leaf, shape, scan_axis))
    # `inspect` has proved that an exact site can be clipped. For a site by hand, names and shapes
    # have to tell: a norm would undo the clip, heads that do not fit could not be multiplied, and
    # an adapter would add what is not scaled.
    if not site.exact:
        # Only an attention has queries and keys. Factors of other names are those of a layer that
        # `signal_clip` scales: it may have norms, and need not have heads.
        if any(scale.factor in ("query", "key") for scale in site.scales):
            _refuse_norms(path, site.norms, modules)
            _check_heads(path, scales)
        _refuse_adapters(path, leaves, modules)
    # A statistic has one axis for each axis that counts layers, so these axes have the same sizes
    # in all kernels and biases.
    layers = {scale.leaf: scale.layers for scale in scales}
    if len(set(layers.values())) > 1:
        raise ValueError(
            f"parameters of {path!r} disagree on the stack of layers: {layers}; see scan_axis."
        )
    return scales


def _check_heads(path: str, scales: Sequence[PlacedScale]) -> None:
    """Raise unless queries and keys can be multiplied head by head.

    8 query heads of 64 features fit 8, 4, 2 or 1 key heads of 64,
    and a bias has as many heads and features as its kernel.
    """
    # `entries` of a scale counts its heads, and `features` the columns of each. The rotary queries
    # of latent attention, whose factor is "whole", have as many heads as the other queries.
    query_heads = {scale.entries for scale in scales if scale.factor != "key"}
    key_heads = {scale.entries for scale in scales if scale.factor == "key"}
    # Rotary queries are multiplied by a key of their own, which nothing scales, and may have
    # another number of features.
    features = {scale.features for scale in scales if scale.factor != "whole"}
    # A site without queries or without keys has an empty set, and is refused too.
    is_one_each = len(query_heads) == len(key_heads) == len(features) == 1
    if not is_one_each or max(query_heads) % max(key_heads) != 0:
        heads = [f"{x.leaf!r} {x.entries} of {x.features} features" for x in scales]
        # A frequent cause: mha_site(num_heads=4) without num_kv_heads reads a key that all heads
        # share, [d, 12], as 4 heads of 3 features, where the queries have 12.
        raise ValueError(
            f"heads of {path!r}, {', '.join(heads)}: query heads must be a multiple of key heads, "
            "with as many features each. Several query heads may share a key head: give "
            "num_kv_heads, and see the site's layout."
        )


def _refuse_adapters(path: str, scaled: Sequence[str], modules: Modules) -> None:
    """Refuse a projection with parameters that the clip does not scale,
    such as those of a LoRA adapter.

    If an attention at `path` scales "attn/query/kernel", then "attn/query/lora_a" is a part of the
    queries that keeps its size. `scaled` are the paths of the kernels and biases that the site
    names, also of biases that are not there.
    """
    # If the queries are a bare array of the attention, as "attn/q", its parent is the attention
    # itself, which may hold anything else.
    projections = {_parent(leaf) for leaf in scaled} - {path}
    inside = set()
    for projection in projections:
        # All parameters in it, those of modules inside too, "attn/query/lora/a".
        inside.update(modules.leaves_of.get(projection, ()))
    if others := sorted(inside.difference(scaled)):
        raise ValueError(
            f"{others} feed the queries or keys too. Merge them into the kernels."
        )


def _refuse_norms(path: str, norms: str, modules: Modules) -> None:
    """Refuse a module of which a child has the name of a norm, such as q_norm.

    A norm of queries or keys undoes the clip. `norms` is the site's pattern for such names; "" fits
    no name, so it allows all.
    """
    normalizing = set()
    for leaf in modules.leaves_of[path]:
        # "q_norm" of "attn/q_norm/scale", for the module "attn"
        child, _, _ = leaf.removeprefix(f"{path}/").partition("/")
        if re.fullmatch(norms, child, re.IGNORECASE):
            normalizing.add(child)
    if normalizing:
        raise ValueError(
            f"{path!r} normalizes its queries and keys ({', '.join(sorted(normalizing))}), so "
            "scaling their kernels can't change the logits. Take it out of the sites; if that norm "
            "has another purpose, give its Site norms=''."
        )


def _checked_shape(module: str, path: str, modules: Modules) -> tuple[int, ...]:
    """The shape of the parameter at `path`; raises unless it is trained and of floats that a factor
    can scale."""
    if not modules.is_trained(path):
        # A masked parameter is there, so the message must not say that it is missing.
        masked = " that is not masked out" if path in modules.leaves else ""
        raise ValueError(
            f"{module!r} has no parameter {path!r}{masked}. If it is frozen, or only an adapter is "
            f"trained, take {module!r} out of the sites, or put the clip after optax.masked. If it "
            "has another name, write a Site."
        )
    # A factor near 1 rounds to 1 in 8 bits, and integers have no place for it.
    leaf = modules.leaves[path]
    dtype = dtype_of(leaf)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
        raise TypeError(
            f"{path!r} is {dtype}; only floats can be scaled: clip in float32, then quantize."
        )
    return jnp.shape(leaf)
