"""Find the modules that sites match in a tree of parameters, check that the clip can scale them, and match statistics.

The largest of several statistics of one attention counts, and NaN never hides a finite one.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from muonjax._clip.factors import Part, Target, overlap, part_of, with_powers
from muonjax._clip.sites import Site
from muonjax._common.arguments import shown
from muonjax._common.trees import dtype_of, flatten_paths, is_masked, listed

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32


def below(root: str, path: str) -> str:
    """The path of something below the module `root`, which is "" for the whole tree."""
    return f"{root}/{path}" if root else path


def module_of(paths: Sequence[str]) -> str:
    """The path of the smallest module that holds all of these parameters."""
    return posixpath.commonpath([path.rpartition("/")[0] for path in paths] or [""])


class Modules:
    """The leaves of a tree of parameters by path, and the paths below each of its modules: one walk for all."""

    def __init__(self, params: Any):
        self.leaves = flatten_paths(params)
        self.inside: dict[str, list[str]] = {}  # "" is the whole tree
        for leaf in self.leaves:
            names = leaf.split("/")
            for depth in range(len(names)):
                self.inside.setdefault("/".join(names[:depth]), []).append(leaf)

    def has(self, path: str) -> bool:
        """Whether there is a module or leaf of this path."""
        return path in self.inside or path in self.leaves


def as_sites(call: str, argument: str, sites: Any) -> tuple[Site, ...]:
    """One site or several, as a tuple; a `Program` has them."""
    found = getattr(sites, "sites", sites)
    several = (found,) if isinstance(found, Site) else found if isinstance(found, Sequence) else ()
    if not several or not all(isinstance(site, Site) for site in several):
        raise TypeError(
            f"{call}({argument}={shown(sites)}) must be what muonjax.inspect(loss_fn, params, batch) returns, "
            "or sites such as muonjax.mha_site(). Give all other settings by their names."
        )
    return tuple(several)


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
                raise ValueError(f"two sites match {root!r} by {site.signal!r}; narrow or merge them.")
            targets[target.signal] = target._replace(threshold=threshold)
    if not targets:
        raise ValueError(
            f"no attention of the program is trained here: the parameters lack {listed(sorted(not_trained), ', ')}. "
            "Give the tree that was inspected, or take the optimizer without the clip, such as muonjax.muon."
        )
    count = Counter(t.path for t in targets.values())
    found = [t._replace(name=t.path if count[t.path] == 1 else t.signal) for t in targets.values()]
    return found, not_trained


def find_attentions(modules: Modules, sites: Sequence[Site], threshold: Any) -> tuple[list[Target], set[str]]:
    """As `find_targets`, for QK-Clip: with its powers of γ; no part of a parameter is clipped twice."""
    found, not_trained = find_targets(modules, [(site, threshold) for site in sites])
    targets = [with_powers(target) for target in found]
    scaled: dict[str, list[tuple[int, Part]]] = {}
    for i, target in enumerate(targets):
        for part in target.parts:
            others = scaled.setdefault(part.path, [])
            if any(i != j and overlap(part, other) for j, other in others):
                raise ValueError(f"two sites scale {part.path!r}, which would be clipped twice.")
            others.append((i, part))
    return targets, not_trained


def _plain(path: str) -> str | None:
    """The only path that this regular expression matches, perhaps escaped; None if there may be others."""
    return re.sub(r"\\(\W)", r"\1", path) if re.fullmatch(r"(?:\w|/|\\\W)*", path) else None


def _matched(site: Site, plain: str | None, modules: Modules) -> list[str]:
    # The child that tells a site's module from others: the submodule of the first parameter.
    anchor = site.scales[0].path.rpartition("/")[0] or site.scales[0].path
    candidates = modules.inside if plain is None else [plain]  # no search, one look
    roots = sorted(root for root in candidates if modules.has(below(root, anchor)))
    matched = [root for root in roots if re.fullmatch(site.path, root)]
    if not matched:
        roots = sorted(root for root in modules.inside if modules.has(below(root, anchor)))
        known = roots or sorted({path.rpartition("/")[0] for path in modules.leaves})
        why = "it has to match a whole path, one of" if roots else f"none has {anchor!r} among those of"
        raise ValueError(
            f"the site {site.path!r} matches no module with {anchor!r}: {why} "
            f"[{listed(list(map(repr, known)), ', ')}]. "
            "Give the projections' own names; a frozen one that is no parameter here can't be clipped."
        )
    return matched


def _target(site: Site, root: str, modules: Modules) -> Target:
    paths = [below(root, scale.path) for scale in site.scales]
    parts = [
        part_of(scale, path, _shape(root, path, modules), site.scan_axis)
        for scale, path in zip(site.scales, paths, strict=True)
        if not scale.optional or modules.leaves.get(path) is not None
    ]
    if not site.exact:
        if {"query", "key"} & {scale.factor for scale in site.scales}:
            _refuse_norms(root, site.norms, modules)
        _refuse_adapters(root, paths, modules)
    if len({part.layers for part in parts}) > 1:
        layers = {part.path: part.layers for part in parts}
        raise ValueError(f"parameters of {root!r} disagree on the stack of layers: {layers}; see scan_axis.")
    counts = {(part.scale.factor, part.entries) for part in parts}  # a bias has as many heads as its kernel
    sizes = {n for _, n in counts}
    entries, groups = max(sizes), min(sizes)
    if len(counts) > len({factor for factor, _ in counts}) or entries % groups or sizes - {entries, groups}:
        shown = {part.path: part.entries for part in parts}
        raise ValueError(f"head counts of {root!r} {shown}: query heads must be a multiple of key heads.")
    signal = below(root, site.signal)
    return Target(root, signal, tuple(parts), parts[0].layers, entries, groups)


def _refuse_adapters(root: str, paths: Sequence[str], modules: Modules) -> None:
    """Refuse parameters next to the projections: an adapter adds to queries and keys, and would not be scaled."""
    projections = {path.rpartition("/")[0] for path in paths} - {root}
    feeding = {leaf for module in projections for leaf in modules.inside.get(module, ())}
    if others := sorted(feeding.difference(paths)):
        raise ValueError(f"{others} feed the queries or keys too. Merge them into the kernels.")


_ANY_NORM = r"_?(layer_?norm|rms_?norm|norm|ln)_?\d*"


def _refuse_norms(root: str, norms: Sequence[str], modules: Modules) -> None:
    """Refuse a module that has a norm of queries and keys among its children, as their names tell."""
    inside = modules.inside.get(root, ())
    children = dict.fromkeys(path.removeprefix(f"{root}/").partition("/")[0] for path in inside)
    patterns = (_ANY_NORM, *norms) if norms else ()
    found = [child for child in children if any(re.fullmatch(p, child, re.IGNORECASE) for p in patterns)]
    if found:
        raise ValueError(
            f"{root!r} normalizes its queries and keys ({', '.join(found)}), so scaling their kernels can't change the "
            "logits. Take it out of the sites; if that norm has another purpose, give its Site norms=()."
        )


def _shape(root: str, path: str, modules: Modules) -> tuple[int, ...]:
    """The shape of a parameter that can be scaled."""
    leaf = modules.leaves.get(path)
    if leaf is None or is_masked(leaf):
        masked = "" if leaf is None else " that is not masked out"
        raise ValueError(
            f"{root!r} has no parameter {path!r}{masked}. If it is frozen, or only an adapter is trained, take "
            f"{root!r} out of the sites, or put the clip after optax.masked. If it has another name, write a Site."
        )
    dtype = dtype_of(leaf)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
        raise TypeError(f"{path!r} is {dtype}; only floats can be scaled: clip in float32, then quantize.")
    return jnp.shape(leaf)


def match_statistics(
    argument: str, given: Any, targets: Sequence[Target], ignored: Collection[str]
) -> dict[str, Float32[Array, "*layers entries"]]:
    """The statistic of each target by its name.

    Args:
      argument: What `update` calls the statistics, for errors.
      given: The dict.
      targets: The modules that are clipped.
      ignored: Keys that may be in the dict without a target.
    """
    returned = ", as muonjax.value_and_grad returns it" if argument == "max_logits" else ""
    form = f"{argument} is a dict {{module path: array [*layers, heads]}}{returned}."
    if not isinstance(given, Mapping):
        raise TypeError(f"{argument}={type(given).__name__}: {form}")
    statistics = {str(path): value for path, value in given.items()}
    by_key = {t.name or t.signal: t for t in targets}
    missing = [key for key in by_key if key not in statistics]
    unclaimed = [key for key in statistics if key not in by_key and key not in ignored]
    if missing or unclaimed:
        raise ValueError(
            f"{argument} and the sites do not fit: sites without statistics [{listed(missing, ', ')}], statistics "
            f"without a site [{listed(unclaimed, ', ')}]. {form}"
        )
    return {t.name: _by_entry(argument, key, statistics[key], t) for key, t in by_key.items()}


def _by_entry(argument: str, key: str, value: Any, target: Target) -> Float32[Array, "*layers entries"]:
    """The largest over the axes of a batch, which lie between those of layers and of entries.

    A batch axis as long as an axis of layers is refused: `scan` and `vmap` stack micro-batches in front of the layers,
    and the shape can't tell that order from the documented one.
    """
    dtype = getattr(value, "dtype", type(value))
    kinds = jnp.floating, jnp.integer
    is_real = hasattr(value, "dtype") and any(jnp.issubdtype(dtype, kind) for kind in kinds)
    if not (is_real or dtype in (int, float)):
        what = getattr(dtype, "__name__", dtype)
        raise TypeError(f"{argument} of {key!r} is {what}; give an array of real numbers, [*layers, heads].")
    array = lax.stop_gradient(jnp.asarray(value)).astype(jnp.float32)
    if target.entries == 1 and array.shape == target.layers:
        array = array[..., None]  # a signal of one number per layer needs no axis for it
    elif array.ndim == 1 and set(target.layers) == {1}:
        array = array.reshape(*target.layers, -1)  # to a program a scan of length one is no loop
    layers = len(target.layers)
    sizes = (*target.layers, target.entries)
    if array.ndim <= layers or not array.size or (*array.shape[:layers], array.shape[-1]) != sizes:
        raise ValueError(
            f"{argument} of {key!r} has shape {jnp.shape(value)}; the parameters say {sizes}, layers before heads, and "
            "a batch between them. What value_and_grad returns fits the sites of muonjax.inspect."
        )
    batch = {size for size in array.shape[layers:-1] if size > 1}
    if batch.intersection(target.layers):
        raise ValueError(
            f"{argument} of {key!r} has shape {array.shape}, in which an axis of a batch is as long as that of layers: "
            f"they can't be told apart. Take the maximum over the batch; the parameters say {sizes}."
        )
    return largest(array, tuple(range(layers, array.ndim - 1)))


def larger(a: Float[Array, "*shape"], b: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The larger of two, entry by entry; one that is not finite counts only where neither is, and NaN shows there."""
    finite = jnp.isfinite(a)
    return jnp.where(finite == jnp.isfinite(b), jnp.maximum(a, b), jnp.where(finite, a, b))


def largest(x: Float[Array, " ..."], axes: tuple[int, ...]) -> Float[Array, " ..."]:
    """The largest along some axes, as `larger`."""
    finite = jnp.where(jnp.isfinite(x), x, -jnp.inf).max(axes, initial=-jnp.inf)
    return larger(finite, x.max(axes, initial=-jnp.inf))


def largest_of_devices(x: Float[Array, "*shape"], axis_name: str | tuple[str, ...]) -> Float[Array, "*shape"]:
    """The largest along mesh axes, as `larger`, by one all-reduce."""
    finite = jnp.where(jnp.isfinite(x), x, -jnp.inf)
    return larger(*lax.pmax(jnp.stack([finite, x]), axis_name))
