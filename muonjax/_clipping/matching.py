"""Before the clip, third of four: the modules that sites match in a tree of parameters, checked against it."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from muonjax._clipping.factors import Scale, count_entries, stack_sizes
from muonjax._clipping.sites import Site
from muonjax._trees import flatten_paths, is_masked


class Target(NamedTuple):
    """One module that a site matched. All static, so that every mistake raises while tracing."""

    path: str  # of the module
    signal: str  # full path of the statistic
    scales: tuple[Scale, ...]  # with full paths and known `entries`; only parameters that exist
    layers: tuple[int, ...]  # sizes of the axes of stacked layers
    scan_axis: tuple[int, ...] | None
    entries: int  # of the signal, a layer
    groups: int  # how many groups of entries share a key head; `entries` where none do


def find_targets(call: str, params: Any, sites: Site | Iterable[Site]) -> list[Target]:
    """Every module that the sites match, checked against the parameters."""
    leaves = flatten_paths(params)
    targets: dict[tuple[str, str], Target] = {}
    for site in as_sites(call, sites):
        roots = _roots(site, leaves)
        if not any(re.fullmatch(site.path, root) for root in roots):
            raise ValueError(
                f"{call}: the site {site.path!r} matches no module{_instead(site, roots, leaves)}"
            )
        for root in roots:
            if not re.fullmatch(site.path, root):
                continue
            target = _target(call, site, root, leaves)
            if (root, target.signal) in targets:
                raise ValueError(
                    f"{call}: two sites match {root!r}, which would be clipped twice; narrow their paths."
                )
            targets[root, target.signal] = target
    return list(targets.values())


def as_sites(call: str, sites: Any) -> tuple[Site, ...]:
    """One site or several, as a tuple."""
    # A string is several strings, too.
    iterable = isinstance(sites, Iterable) and not isinstance(sites, str)
    several: tuple[Any, ...] = (sites,) if isinstance(sites, Site) else tuple(sites) if iterable else ()
    if not several or not all(isinstance(site, Site) for site in several):
        raise TypeError(
            f"{call}(sites={sites!r}) needs a Site or several, and clips nothing without; make one with mha_site(path)."
        )
    return several


def _instead(site: Site, roots: Sequence[str], leaves: Iterable[str]) -> str:
    """The rest of the sentence: what a site that matches no module could have matched."""
    anchor = _anchor(site)
    if roots:
        return f" with {anchor!r}: it has to match a whole path, one of {_some(roots)}."
    modules = sorted({path.rpartition("/")[0] for path in leaves})
    return (
        f": none has {anchor!r} among the parameters of {_some(modules)}. Give the site the projections' own names; a "
        "frozen one that is not among the parameters can't be clipped."
    )


def _some(names: Sequence[str]) -> str:
    return f"{list(names[:8])}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _anchor(site: Site) -> str:
    """The child that tells a site's module from others: the submodule of the first parameter."""
    path = site.scales[0].path
    return path.rpartition("/")[0] or path


def _roots(site: Site, leaves: Iterable[str]) -> list[str]:
    """Modules that have the site's anchor, even if only with an adapter or a masked leaf in it."""
    pattern = re.compile(rf"(?:(.*)/)?{re.escape(_anchor(site))}(?:/.*)?")
    return sorted({match[1] or "" for path in leaves if (match := pattern.fullmatch(path))})


def _target(call: str, site: Site, root: str, leaves: Mapping[str, Any]) -> Target:
    norms = [norm for norm in site.norms if any(path.startswith(_below(root, norm) + "/") for path in leaves)]
    if norms:
        raise ValueError(
            f"{call}: {root!r} normalizes its queries and keys ({', '.join(norms)}), so scaling their "
            f"kernels can't change the logits. Take it out of the sites, by a path that matches only the others: the "
            f"norm bounds them already."
        )
    scales, layers = [], {}
    for scale in site.scales:
        path = _below(root, scale.path)
        leaf = leaves.get(path)
        if leaf is None and scale.optional:
            continue
        if leaf is None:
            raise ValueError(
                f"{call}: {root!r} has no parameter {path!r}. If only an adapter or one of query and key is "
                f"trained, its logits can't be clipped: take it out of the sites."
            )
        if is_masked(leaf):
            raise ValueError(
                f"{call}: {path!r} is masked out of this transformation, so it can't be scaled. If it is frozen, "
                f"take {root!r} out of the sites; if another optimizer has it, put the clip after optax.masked or "
                f"optax.partition, not inside."
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"{call}: {path!r} is {leaf.dtype}; only floating-point weights can be scaled.")
        scale = dataclasses.replace(scale, path=path)
        layers[path] = stack_sizes(call, scale, leaf.shape, site.scan_axis)
        scales.append(
            dataclasses.replace(scale, entries=count_entries(call, scale, leaf.shape, site.scan_axis))
        )
    _refuse_adapters(call, root, [_below(root, s.path) for s in site.scales], leaves)
    if len(set(layers.values())) > 1:
        raise ValueError(
            f"{call}: the parameters of {root!r} disagree on the stack of layers: {layers}; see scan_axis."
        )
    counts = {(scale.factor, scale.entries) for scale in scales}  # a bias has as many heads as its kernel
    sizes = [n for _, n in counts]
    entries, groups = max(sizes), min(sizes)
    if len(counts) > len({s.factor for s in scales}) or entries % groups or {*sizes} - {entries, groups}:
        shown = {scale.path: scale.entries for scale in scales}
        raise ValueError(
            f"{call}: the head counts of {root!r} do not fit each other: {shown}. Query heads have to be a multiple of "
            f"key heads, and a bias has its kernel's; see the site's layout and num_heads."
        )
    return Target(
        path=root,
        signal=_below(root, site.signal),
        scales=tuple(scales),
        layers=layers[scales[0].path],
        scan_axis=site.scan_axis,
        entries=entries,
        groups=groups,
    )


def _below(root: str, path: str) -> str:
    return f"{root}/{path}" if root else path


def _refuse_adapters(call: str, root: str, known: Sequence[str], leaves: Mapping[str, Any]) -> None:
    """What an adapter adds to queries and keys would not be scaled with the kernel beside it."""
    modules = {path.rpartition("/")[0] for path in known} - {root}
    others = [p for p in leaves if p not in known and any(p.startswith(f"{m}/") for m in modules)]
    if others:
        raise ValueError(
            f"{call}: {others} feed the queries or keys of {root!r} too, and its site can't scale them. "
            f"Merge them into the kernels, or take the module out of the sites."
        )
