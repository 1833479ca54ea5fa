"""Find the modules that sites match in a tree of parameters, and check that the clip can scale them."""

import posixpath
import re
from collections import Counter
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
    """The leaves of a tree of parameters by path, and the paths below each of its modules."""

    def __init__(self, params: Any):
        self.leaves = flatten_paths(params)
        self.inside: dict[str, list[str]] = {}  # "" is the whole tree
        for leaf in self.leaves:
            names = leaf.split("/")
            for depth in range(len(names)):
                module = "/".join(names[:depth])
                self.inside.setdefault(module, []).append(leaf)

    def has(self, path: str) -> bool:
        """Whether there is a module or leaf of this path."""
        return path in self.inside or path in self.leaves

    def is_trained(self, path: str) -> bool:
        """Whether there is a leaf of this path that is not masked."""
        leaf = self.leaves.get(path)
        return leaf is not None and not is_masked(leaf)


def find_sites(
    modules: Modules,
    sites: Iterable[Site],
) -> tuple[list[PlacedSite], set[str]]:
    """Every module that the sites match, checked against the parameters.

    Also returns which statistics are skipped: those of a program's attentions with parameters that do not train.
    """
    by_signal: dict[str, PlacedSite] = {}
    not_trained: set[str] = set()
    for site in sites:
        only = _only_path(site.path)
        # A site by hand raises below, because a pattern without parameters is a mistake there.
        if site.exact and only is not None:
            paths = [below(only, scale.path) for scale in site.scales]
            if not all(modules.is_trained(path) for path in paths):
                not_trained.add(only or site.signal)
                continue
        for root in _matched(site, only, modules):
            module = _placed(site, root, modules)
            if module.signal in by_signal:
                raise ValueError(
                    f"two sites match {root!r} by {site.signal!r}; narrow or merge them."
                )
            by_signal[module.signal] = module
    if not by_signal:
        raise ValueError(
            f"no attention of the program is trained here: the parameters lack {listed(sorted(not_trained), ', ')}. "
            "Give the tree that was inspected, or take the optimizer without the clip, such as muonjax.muon."
        )
    # A module has the name of its path in the state, unless several attentions share it.
    signals_of_module = Counter(module.path for module in by_signal.values())
    named = []
    for module in by_signal.values():
        is_alone = signals_of_module[module.path] == 1
        named.append(module._replace(name=module.path if is_alone else module.signal))
    return named, not_trained


def _only_path(pattern: str) -> str | None:
    """The only path that this regular expression matches, perhaps escaped; None if there may be others."""
    if re.fullmatch(r"(?:\w|/|\\\W)*", pattern) is None:
        return None
    return re.sub(r"\\(\W)", r"\1", pattern)


def _matched(site: Site, only: str | None, modules: Modules) -> list[str]:
    # The child that tells a site's module from others: the submodule of the first parameter.
    first = site.scales[0].path
    child = _parent(first) or first
    # A look-up and not a search, because a program may have sites for a thousand modules.
    candidates = sorted(modules.inside) if only is None else [only]
    matched = [
        root
        for root in candidates
        if modules.has(below(root, child)) and re.fullmatch(site.path, root)
    ]
    if not matched:
        roots = sorted(root for root in modules.inside if modules.has(below(root, child)))
        why = (
            "it has to match a whole path, one of"
            if roots
            else f"none has {child!r} among those of"
        )
        known = roots or sorted({_parent(path) for path in modules.leaves})
        raise ValueError(
            f"the site {site.path!r} matches no module with {child!r}: {why} "
            f"[{listed([repr(path) for path in known], ', ')}]. "
            "Give the projections' own names; a frozen one that is no parameter here can't be clipped."
        )
    return matched


def _placed(site: Site, root: str, modules: Modules) -> PlacedSite:
    """The site on one module."""
    scales: list[PlacedScale] = []
    scan_axis: Any = site.scan_axis  # a tuple by now
    for scale in site.scales:
        path = below(root, scale.path)
        if not scale.optional or modules.leaves.get(path) is not None:
            scales.append(placed(scale, path, _shape(root, path, modules), scan_axis))
    # A program has proved that the scales are complete, so no name is judged.
    if not site.exact:
        if any(scale.factor in ("query", "key") for scale in site.scales):
            _refuse_norms(root, site.norms, modules)
        _refuse_adapters(root, [below(root, scale.path) for scale in site.scales], modules)
    module = PlacedSite(root, below(root, site.signal), tuple(scales), site.threshold)
    _check_layers(module)
    _check_entries(module)
    return module


def _check_layers(module: PlacedSite) -> None:
    layers = {scale.leaf: scale.layers for scale in module.scales}
    if len(set(layers.values())) > 1:
        raise ValueError(
            f"parameters of {module.path!r} disagree on the stack of layers: {layers}; see scan_axis."
        )


def _check_entries(module: PlacedSite) -> None:
    entries_of: dict[str, int] = {}
    # A bias has as many heads as its kernel, and query heads are as many as key heads or a multiple.
    fits = module.entries % module.groups == 0
    for scale in module.scales:
        entries = entries_of.setdefault(scale.scale.factor, scale.entries)
        fits = fits and entries == scale.entries and entries in (module.entries, module.groups)
    if not fits:
        entries = {scale.leaf: scale.entries for scale in module.scales}
        raise ValueError(
            f"head counts of {module.path!r} {entries}: query heads must be a multiple of key heads."
        )


def _refuse_adapters(root: str, paths: Sequence[str], modules: Modules) -> None:
    """Refuse parameters next to the projections: an adapter adds to queries and keys, and would not be scaled."""
    projections = {_parent(path) for path in paths} - {root}
    inside = set()
    for projection in projections:
        inside.update(modules.inside.get(projection, ()))
    if others := sorted(inside.difference(paths)):
        raise ValueError(f"{others} feed the queries or keys too. Merge them into the kernels.")


_ANY_NORM = r"_?(layer_?norm|rms_?norm|norm|ln)_?\d*"


def _refuse_norms(root: str, norms: Sequence[str], modules: Modules) -> None:
    """Refuse a module that has a norm of queries and keys among its children, as their names tell."""
    if not norms:
        return
    children = set()
    for path in modules.inside.get(root, ()):
        child, _, _ = path.removeprefix(f"{root}/").partition("/")
        children.add(child)
    normalizing = [child for child in sorted(children) if _is_norm(child, (_ANY_NORM, *norms))]
    if normalizing:
        raise ValueError(
            f"{root!r} normalizes its queries and keys ({', '.join(normalizing)}), so scaling their kernels can't "
            "change the logits. Take it out of the sites; if that norm has another purpose, give its Site norms=()."
        )


def _is_norm(child: str, patterns: Sequence[str]) -> bool:
    return any(re.fullmatch(pattern, child, re.IGNORECASE) for pattern in patterns)


def _shape(root: str, path: str, modules: Modules) -> tuple[int, ...]:
    """The shape of a parameter that can be scaled."""
    if not modules.is_trained(path):
        masked = " that is not masked out" if path in modules.leaves else ""
        raise ValueError(
            f"{root!r} has no parameter {path!r}{masked}. If it is frozen, or only an adapter is trained, take "
            f"{root!r} out of the sites, or put the clip after optax.masked. If it has another name, write a Site."
        )
    leaf = modules.leaves[path]
    dtype = dtype_of(leaf)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
        raise TypeError(
            f"{path!r} is {dtype}; only floats can be scaled: clip in float32, then quantize."
        )
    return jnp.shape(leaf)
