"""Find the modules that sites match in a tree of parameters, and check that the clip can scale them."""

import numbers
import posixpath
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from muonjax._clip.factors import Target, part_of
from muonjax._clip.sites import Site
from muonjax._common.trees import dtype_of, flatten_paths, is_masked, listed


def below(root: str, path: str) -> str:
    """The path of something below the module `root`, which is "" for the whole tree."""
    return f"{root}/{path}" if root else path


def module_of(paths: Sequence[str]) -> str:
    """The path of the smallest module that holds all of these parameters."""
    return posixpath.commonpath([path.rpartition("/")[0] for path in paths] or [""])


class Modules:
    """The leaves of a tree of parameters by path, and the names of the children of each module: one walk for all."""

    def __init__(self, params: Any):
        self.leaves = flatten_paths(params)
        self.children: dict[str, dict[str, None]] = {}  # dictionaries as ordered sets
        self._roots: dict[str, list[str]] = {}
        for leaf in self.leaves:
            names = leaf.split("/")
            for depth, child in enumerate(names):
                self.children.setdefault("/".join(names[:depth]), {})[child] = None

    def has(self, path: str) -> bool:
        """Whether there is a module or leaf of this path."""
        return path in self.children or path in self.leaves

    def with_child(self, path: str) -> list[str]:
        """All modules that have `path` below them."""
        if path not in self._roots:
            self._roots[path] = sorted(module for module in self.children if self.has(below(module, path)))
        return self._roots[path]

    def leaves_below(self, module: str) -> list[str]:
        """Paths of the leaves of a module and of the modules in it."""
        found = []
        for child in self.children.get(module, ()):
            path = below(module, child)
            found += [path] if path in self.leaves else self.leaves_below(path)
        return found


def as_sites(call: str, sites: Any) -> tuple[Site, ...]:
    """One site or several, as a tuple; a `Program` has them."""
    if sites is None:
        first = "100.0" if call == "qk_clip" else "2e-3"
        raise ValueError(
            "it needs to know where attention is, and your function says it. These two lines make the optimizer:\n"
            f"  program = muonjax.inspect(loss_fn, params, batch)\n  tx = muonjax.{call}({first}, program)"
        )
    found = getattr(sites, "sites", sites)
    several = (found,) if isinstance(found, Site) else tuple(found) if isinstance(found, Iterable) else ()
    if several and all(isinstance(site, Site) for site in several):
        return several
    given = f"threshold={sites!r}" if isinstance(sites, numbers.Real) else reprlib.repr(sites)
    raise TypeError(
        f"{given} stands where it takes what muonjax.inspect(loss_fn, params, batch) returns, or sites such as "
        "muonjax.mha_site(). Give all other settings by their names."
    )


def find_targets(modules: Modules, sites: Iterable[tuple[Site, Any]]) -> tuple[list[Target], set[str]]:
    """Every module that the sites match, checked against the parameters, with the threshold of its site.

    Also the keys of the statistics of a program's attentions whose parameters are not all trained: they are skipped.
    """
    targets: dict[str, Target] = {}
    not_trained: set[str] = set()
    for site, threshold in sites:
        plain = _plain(site.path)
        leaves = [] if plain is None else [modules.leaves.get(below(plain, s.path)) for s in site.scales]
        if site.exact and any(leaf is None or is_masked(leaf) for leaf in leaves):
            not_trained.add(plain or site.signal)
            continue
        for root in _matched(site, plain, modules):
            target = _target(site, root, modules)
            if target.signal in targets:
                raise ValueError(
                    f"two sites match {root!r} by the signal {site.signal!r}, which would be clipped twice; narrow "
                    "their paths, or merge their scales."
                )
            targets[target.signal] = target._replace(threshold=threshold)
    if not targets:
        raise ValueError(
            f"no attention of the program is trained here: the parameters lack {listed(sorted(not_trained), ', ')}. "
            "Give the tree that was inspected, or take the optimizer without the clip, such as muonjax.muon."
        )
    count = Counter(t.path for t in targets.values())
    return [
        t._replace(name=t.path if count[t.path] == 1 else t.signal) for t in targets.values()
    ], not_trained


def _plain(path: str) -> str | None:
    """The only path that this regular expression matches, perhaps escaped; None if there may be others."""
    return re.sub(r"\\(\W)", r"\1", path) if re.fullmatch(r"(?:\w|/|\\\W)*", path) else None


def _matched(site: Site, plain: str | None, modules: Modules) -> list[str]:
    # The child that tells a site's module from others: the submodule of the first parameter.
    anchor = site.scales[0].path.rpartition("/")[0] or site.scales[0].path
    if plain is not None:  # no search, one look
        matched = [plain] if modules.has(below(plain, anchor)) else []
    else:
        matched = [root for root in modules.with_child(anchor) if re.fullmatch(site.path, root)]
    if matched:
        return matched
    if roots := modules.with_child(anchor):
        raise ValueError(
            f"the site {site.path!r} matches no module with {anchor!r}: it has to match a whole path, one of "
            f"[{listed(list(map(repr, roots)), ', ')}]."
        )
    parents = sorted({repr(path.rpartition("/")[0]) for path in modules.leaves})
    raise ValueError(
        f"the site {site.path!r} matches no module: none has {anchor!r} among the parameters of "
        f"[{listed(parents, ', ')}]. Give the site the projections' own names; a frozen one that is not among the "
        "parameters can't be clipped."
    )


def _target(site: Site, root: str, modules: Modules) -> Target:
    paths = [leaf_path(root, scale.path, modules) for scale in site.scales]
    parts = [
        part_of(scale, path, _shape(root, path, modules), site.scan_axis)
        for scale, path in zip(site.scales, paths, strict=True)
        if not scale.optional or modules.leaves.get(path) is not None
    ]
    if not site.exact:
        if {"query", "key"} & {scale.factor for scale in site.scales}:
            refuse_norms(root, site.norms, modules, parts[0].size // parts[0].entries)
        _refuse_adapters(root, paths, modules)
    if len({part.layers for part in parts}) > 1:
        layers = {part.path: part.layers for part in parts}
        raise ValueError(
            f"the parameters of {root!r} disagree on the stack of layers: {layers}; see scan_axis."
        )
    counts = {(part.scale.factor, part.entries) for part in parts}  # a bias has as many heads as its kernel
    sizes = {n for _, n in counts}
    entries, groups = max(sizes), min(sizes)
    if len(counts) > len({factor for factor, _ in counts}) or entries % groups or sizes - {entries, groups}:
        shown = {part.path: part.entries for part in parts}
        raise ValueError(
            f"the head counts of {root!r} do not fit each other: {shown}. Query heads have to be a multiple of key "
            f"heads, and a bias has its kernel's; see the site's layout and num_heads."
        )
    signal = below(root, site.signal)
    return Target(root, signal, tuple(parts), parts[0].layers, entries, groups)


def _refuse_adapters(root: str, paths: Sequence[str], modules: Modules) -> None:
    """Refuse parameters next to the projections: an adapter adds to queries and keys, and would not be scaled."""
    projections = {path.rpartition("/")[0] for path in paths} - {root}
    feeding = {path for module in projections for path in modules.leaves_below(module)}
    if others := sorted(feeding.difference(paths)):
        raise ValueError(
            f"{others} feed the queries or keys of {root!r} too, and its site can't scale them. Merge them into the "
            f"kernels, or take the module out of the sites."
        )


NAMES = {"kernel": ("kernel", "w", "weight", "weights"), "bias": ("bias", "b")}  # in the libraries for JAX


def leaf_path(root: str, path: str, modules: Modules) -> str:
    """The path of a parameter below a module, also under the name of another library: "query/w" for "query/kernel"."""
    asked = below(root, path)
    projection, _, leaf = asked.rpartition("/")
    if asked in modules.leaves or leaf not in NAMES:
        return asked
    if leaf == "kernel" and projection in modules.leaves:  # an array by itself
        return projection
    for name in NAMES[leaf]:
        candidate = below(projection, name)
        if candidate in modules.leaves:
            return candidate
        if len(inside := modules.leaves_below(candidate)) == 1:  # in a box: "query/w/0"
            return inside[0]
    return asked


def refuse_norms(root: str, norms: Sequence[str], modules: Modules, size: int | None = None) -> None:
    """Refuse a module that normalizes its queries and keys, as the names of its children tell, or, if they say no more
    than "norm", their length: the size of a head."""

    def normalizes(child: str) -> bool:
        if any(re.fullmatch(norm, child, re.IGNORECASE) for norm in norms):
            return True
        inside = modules.leaves_below(below(root, child)) if norms and NORM.fullmatch(child) else ()
        return any(jnp.shape(modules.leaves[path])[-1:] == (size,) for path in inside)

    if found := [child for child in modules.children.get(root, ()) if normalizes(child)]:
        raise ValueError(
            f"{root!r} normalizes its queries and keys ({', '.join(found)}), so scaling their kernels can't change the "
            "logits: the norm bounds them already. Take it out of the sites, by a path that matches only the others; "
            "if that norm has another purpose, give its Site norms=()."
        )


NORM = re.compile(r"_?(layer_?norm|rms_?norm|norm|ln)_?\d*", re.IGNORECASE)


def _shape(root: str, path: str, modules: Modules) -> tuple[int, ...]:
    """The shape of a parameter that can be scaled."""
    leaf = modules.leaves.get(path)
    if leaf is None:
        raise ValueError(
            f"{root!r} has no parameter {path!r}. If only an adapter or one of query and key is trained, its logits "
            f"can't be clipped: take it out of the sites."
        )
    if is_masked(leaf):
        raise ValueError(
            f"{path!r} is masked out of this transformation, so it can't be scaled. If it is frozen, take {root!r} "
            f"out of the sites; if another optimizer has it, put the clip after optax.masked or optax.partition, not "
            f"inside."
        )
    dtype = dtype_of(leaf)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{path!r} is {dtype}; only floating-point weights can be scaled.")
    if jnp.finfo(dtype).bits < 16:
        raise TypeError(
            f"{path!r} is {dtype}, whose few bits lose nearly every factor; keep master weights in float32, clip "
            f"those, and quantize afterwards."
        )
    return jnp.shape(leaf)
