"""Find attention modules by their parameters, so that nobody has to name them."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from muonjax._clipping.errors import errors_of
from muonjax._clipping.factors import Scale
from muonjax._clipping.matching import Modules, leaf_path, norms_of
from muonjax._clipping.sites import QK_NORMS, Site, fused_qkv_site, mha_site

# Names of projections in Flax, MaxText, Transformers, T5, Gemma's library, Diffusers, Equinox and others.
PAIRS = (
    *(("query", "key"), ("q_proj", "k_proj"), ("query_proj", "key_proj"), ("q_einsum", "kv_einsum")),
    *(("q_einsum", "k_einsum"), ("wq", "wk"), ("q", "k"), ("to_q", "to_k"), ("q_lin", "k_lin")),
)
FUSED = ("qkv", "qkv_proj", "qkv_einsum", "c_attn", "query_key_value", "in_proj")
OUTPUTS = (
    *("out", "o_proj", "out_proj", "attn_vec_einsum", "output_proj", "c_proj"),
    *("proj", "wo", "o", "to_out", "out_lin"),
)
LATENT = ("wkv_b", "kv_b_proj", "wkv_a", "kv_a_proj_with_mqa")
LATENT_QUERIES = ("wq_b", "q_b_proj", "wq", "q_proj", "query")
RELATIVE = ("relative_attention_bias", "relpos_bias", "relative_position_bias")


def sites_from(params: Any, *, num_heads: int | None = None) -> tuple[Site, ...]:
    """The sites of the attention modules of a model, found by the names and shapes of their parameters.

    A module counts as attention if it has a query and a key projection, or one for both, by the names that Flax,
    MaxText, Gemma's library, Transformers, axlearn, Levanter and others use. The order of a kernel's axes and the axis
    that a stack of layers is on follow from the shapes of query, key and output. What can't be told is refused.

    Args:
      params: The parameters, or their shapes from `jax.eval_shape`.
      num_heads: Number of query heads, where kernels have heads and features merged in one axis, as with `nn.Dense`.

    Returns:
      A `Site` for each module.

    Raises:
      ValueError: No such module; one whose heads or stack of layers can't be told; one that normalizes its queries and
        keys; one that adds a relative position bias, as T5; norms around attention and feed-forward as in Gemma 2,
        which caps its logits; latent attention, which needs `mla_site`.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, muonjax
      >>> attention = nn.MultiHeadDotProductAttention(2)
      >>> params = jax.eval_shape(attention.init, jax.random.key(0), jnp.ones((1, 3, 8)))["params"]
      >>> [site.path for site in muonjax.sites_from({"block": {"attention": params}})]
      ['block/attention']
    """
    with errors_of("sites_from"):
        return find_sites(Modules(params), num_heads)


def find_sites(modules: Modules, num_heads: int | None = None) -> tuple[Site, ...]:
    """`sites_from` for an index of the parameters."""
    if any(name in children for children in modules.children.values() for name in RELATIVE):
        raise ValueError(
            "the model adds relative position biases to its logits, as T5 does, which are neither measured nor scaled; "
            "to clip what comes before them, name its modules with mha_site."
        )
    sites = [site for root in sorted(modules.children) if (site := _site(root, modules, num_heads))]
    if not sites:
        raise ValueError(
            f"no attention that it knows among the parameters {sorted(modules.leaves)[:4]}, ...; name yours with "
            "mha_site, mla_site or fused_qkv_site. A model without attention needs no clip: take muonjax.muon or "
            "optax.adamw."
        )
    return tuple(sites)


def _site(root: str, modules: Modules, num_heads: int | None) -> Site | None:
    children = modules.children[root]
    if not children.keys().isdisjoint(LATENT):
        site = _latent_site(root, modules, num_heads)
        raise ValueError(
            f"{root!r} is latent attention; say how its heads are divided with {site}, where nope is the number of a "
            "head's features without position."
        )
    kernels = {name: _shape(root, name, modules) for name in children}
    pair = next(((q, k) for q, k in PAIRS if kernels.get(q) and kernels.get(k)), None)
    fused = next((name for name in FUSED if kernels.get(name)), None)
    if pair is None and fused is None:
        return None
    _refuse(root, modules)
    output = _output(root, modules)
    if pair is not None:
        return _pair_site(root, pair, (kernels[pair[0]], kernels[pair[1]]), output, num_heads, modules)
    assert fused is not None
    return _fused_site(root, fused, kernels[fused], output, num_heads, modules)


def _pattern(root: str, modules: Modules) -> str:
    """A regular expression for the module, and for all of its name in other layers."""
    every = re.sub(r"\d+", r"\\d+", re.escape(root))
    alike = [m for m in modules.children if re.fullmatch(every, m)]
    return every if len(alike) > 1 else re.escape(root)


def _call(site: str, path: str, **arguments: Any) -> str:
    """The source of a call, to be pasted; ... stands for what only the caller knows."""
    shown = (f"{k}={'...' if v is ... else repr(v)}" for k, v in arguments.items() if v is not None)
    return f"muonjax.{site}({', '.join([repr(path), *shown])})"


def _latent_site(root: str, modules: Modules, num_heads: int | None) -> str:
    """The call of `mla_site` for a module, as far as its kernels tell."""
    kernels = {name: shape for name in modules.children[root] if (shape := _shape(root, name, modules))}
    query = next((name for name in LATENT_QUERIES if name in kernels), "wq_b")
    key = next((name for name in ("wkv_b", "kv_b_proj") if name in kernels), "wkv_b")
    down = next((kernels[name] for name in ("wkv_a", "kv_a_proj_with_mqa") if name in kernels), ())
    rank = len(down) or 2  # of a latent projection; a kernel with heads apart has one axis more
    stacks = _stacks(rank - 2, *kernels.values()) if down else [None]
    stack = stacks[0] if len(stacks) == 1 else ...
    flat = len(kernels.get(query, ())) == rank
    if flat:
        stored = leaf_path(root, f"{query}/kernel", modules).rpartition("/")[2]
        layout, heads = "(h d) i" if stored == "weight" else "i (h d)", num_heads or ...
    else:
        layout, heads = None, None
    nope: Any = ...
    if down and stack is not ... and key in kernels and query in kernels and heads is not ...:
        out, into = (-2, -1) if layout == "(h d) i" else (-1, -2 if flat else -3)
        down, kv, q = (_without(shape, stack) for shape in (down, kernels[key], kernels[query]))
        rotary = down[out] - kv[into]
        nope = (q[out] // heads if heads else q[-1]) - rotary
    return _call(
        "mla_site",
        _pattern(root, modules),
        nope=nope,
        query=None if query == "wq_b" else query,
        key_value=None if key == "wkv_b" else key,
        layout=layout,
        num_heads=heads,
        scan_axis=stack or None,
    )


def _shape(root: str, name: str, modules: Modules) -> tuple[int, ...]:
    """The shape of a projection's kernel; () where it has none, or no axes for inputs and outputs."""
    shape = tuple(getattr(modules.leaves.get(leaf_path(root, f"{name}/kernel", modules)), "shape", ()))
    return shape if len(shape) > 1 else ()


def _output(root: str, modules: Modules) -> tuple[int, ...]:
    """The shape of the output kernel, in the module or up to three levels above; () where there is none."""
    names = OUTPUTS
    for _ in range(4):
        for name in names:
            if shape := _shape(root, name, modules):
                return shape
        if not root:
            break
        root, names = root.rpartition("/")[0], ("o_proj", "out_proj", "c_proj")
    return ()


def _refuse(root: str, modules: Modules) -> None:
    """What can't be clipped, or needs no clip, as far as paths tell."""
    if norms := norms_of(root, QK_NORMS, modules):
        raise ValueError(
            f"{root!r} normalizes its queries and keys ({', '.join(norms)}), which bounds its logits without a clip; "
            "name the other attention modules with mha_site."
        )
    parent = root.rpartition("/")[0]
    around = [name for name in modules.children.get(parent, ()) if re.match(r"post_.*(norm|ln)", name)]
    kinds = [r"att|ln_0", r"ffw|ffn|feed_?forward|mlp|ln_1"]
    if all(any(re.search(kind, name) for name in around) for kind in kinds):
        raise ValueError(
            f"the layer of {root!r} has norms after attention and feed-forward ({', '.join(around)}), as Gemma 2, "
            f"which caps its logits: the cap bounds them without a clip, and parameters don't show it. If this one has "
            f"none, name it with muonjax.mha_site({_pattern(root, modules)!r})."
        )


class _Reading(NamedTuple):
    """One way to read the axes of the query, key and output kernels of a module."""

    layout: str
    scan_axis: int | None
    heads: int
    key_heads: int
    size: int  # of a head


def _pair_site(
    root: str, names: Any, shapes: Any, output: Any, num_heads: int | None, modules: Modules
) -> Site:
    query, key = names
    stored = leaf_path(root, f"{query}/kernel", modules).rpartition("/")[2]
    merged = "(h d) i" if stored == "weight" else "i (h d)"
    layouts = ("h i d",) if query.endswith("einsum") else ("i h d", merged)
    together = key.startswith("kv")  # keys and values, on an axis of two in front
    # An output that is stored like the query also fits a stack of Dense layers, of any number of heads (0).
    rival = 0 if num_heads is None and shapes[0] == output else num_heads

    def read(in_brackets: bool, num_heads: int | None) -> list[_Reading]:
        chosen = [layout for layout in layouts if ("(" in layout) == in_brackets]
        return [r for layout in chosen for r in _readings(layout, shapes, output, num_heads, together)]

    found, flat = read(False, num_heads), read(True, rival)
    if flat and (not found or shapes[0] == output):
        found = [r for r in found if num_heads in (None, r.heads)] + flat
    reading = _only(root, names, found, shapes[0], num_heads, modules)
    heads = (reading.heads, reading.key_heads) if "(" in reading.layout else (None, None)
    site = mha_site(
        re.escape(root),
        query=query,
        key=key,
        layout=reading.layout,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        scan_axis=reading.scan_axis,
    )
    if not together:
        return site
    part: dict[str, Any] = {
        "start": 0,
        "size": reading.key_heads * reading.size,
        "entries": reading.key_heads,
    }
    keys = Scale(path=f"{key}/kernel", rank=4, axes=(-4, -3, -1), factor="key", **part)
    scales = (*(scale for scale in site.scales if scale.factor == "query"), keys)
    return Site(path=site.path, scales=scales, scan_axis=site.scan_axis)


def _readings(
    layout: str, shapes: Any, output: Any, num_heads: int | None, together: bool
) -> Iterator[_Reading]:
    """Every stack axis with which the three kernels fit each other."""
    query, key = shapes
    parts = len(layout.split()) if "(" not in layout else 2
    for stack in _stacks(len(query) - parts, query, key, output):
        q, k, o = (_without(shape, stack) for shape in (query, key, output))
        if together:
            k = k[1:] if k[:1] == (2,) else ()
        if len(q) != parts or len(k) != parts:
            continue
        if "(" in layout:
            axis = 0 if layout == "(h d) i" else 1
            heads = q[axis] if num_heads == 0 else num_heads
            if heads is None or q[axis] % heads:
                continue
            size = q[axis] // heads
            key_heads, rest = divmod(k[axis], size)
            fits = not rest and (not o or o[1 - axis] == q[axis])
        else:
            at = layout.split()
            heads, size = q[at.index("h")], q[at.index("d")]
            key_heads = k[at.index("h")]
            fits = k[at.index("d")] == size and (not o or _is_output(o, heads, size, stack))
        if fits and key_heads and heads % key_heads == 0:
            last = stack is not None and stack == len(query) - 1
            yield _Reading(layout, -1 if last else stack, heads, key_heads, size)


def _stacks(count: int, *shapes: tuple[int, ...]) -> list[int | None]:
    """Axes that may count layers, if `count` is 1: those that are as long in all kernels."""
    present = [shape for shape in shapes if shape]
    axes = range(min(map(len, present)) if count == 1 else 0)
    return [None] if count == 0 else [axis for axis in axes if len({shape[axis] for shape in present}) == 1]


def _without(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    return shape if axis is None or not shape else tuple(n for i, n in enumerate(shape) if i != axis)


def _is_output(shape: tuple[int, ...], heads: int, size: int, stack: int | None) -> bool:
    """Whether an output kernel, (heads, size, d) or (d, heads, size) or merged, has these heads."""
    if len(shape) == 2:
        return heads * size in shape
    # Stored like the query, it can't tell layers from inputs; who stores it so stacks on the first axis.
    return len(shape) == 3 and (
        (heads, size) == shape[:2] or (stack in (None, 0) and (heads, size) == shape[1:])
    )


def _fused_site(
    root: str,
    name: str,
    shape: tuple[int, ...],
    output: tuple[int, ...],
    num_heads: int | None,
    modules: Modules,
) -> Site:
    found = []
    for stack in [None, *range(len(shape))]:
        if stack is None or not output or shape[stack] == (*output, *shape)[stack]:
            found += _fused_readings(name, _without(shape, stack), _without(output, stack), stack, num_heads)
    if len(found) != 1:
        first = (
            "give num_heads, muonjax.sites_from(params, num_heads=...), or "
            if name == "c_attn" and num_heads is None
            else ""
        )
        site = _call(
            "fused_qkv_site",
            _pattern(root, modules),
            name=None if name == "qkv" else name,
            **dict.fromkeys(("num_heads", "head_dim", "num_kv_heads", "layout", "scan_axis"), ...),
        )
        raise ValueError(
            f"the parts of {name!r} of {root!r}, of shape {shape}, can't be told; {first}name the module with {site}."
        )
    ((layout, stack, heads, key_heads, size),) = found
    return fused_qkv_site(
        re.escape(root),
        num_heads=heads,
        head_dim=size,
        num_kv_heads=key_heads,
        name=name,
        layout=layout,
        scan_axis=-1 if stack is not None and stack == len(shape) - 1 else stack,
    )


def _fused_readings(
    name: str, own: tuple[int, ...], output: tuple[int, ...], stack: int | None, num_heads: int | None
) -> Iterator[_Reading]:
    """Every way to read the axes of a fused kernel of one layer that fits the output kernel."""
    if len(own) == 4:
        for layout in ("3 h i d",) if name.endswith("einsum") else ("i 3 h d", "3 i h d", "i h 3 d"):
            axes = layout.split()
            heads, size = own[axes.index("h")], own[axes.index("d")]
            if own[axes.index("3")] == 3 and _is_output(output, heads, size, stack):
                yield _Reading(layout, stack, heads, heads, size)
    if len(own) == 3 and len(output) == 3:
        for heads, size in {output[:2], output[1:]}:
            key_heads, rest = divmod(own[1] - heads, 2)
            fits = _is_output(output, heads, size, stack) and size == own[2] and not rest
            if fits and key_heads > 0 and heads % key_heads == 0:
                yield _Reading("i (3 h) d", stack, heads, key_heads, size)
    if len(own) == 2 and name == "c_attn" and num_heads is not None:  # GPT-2: queries, keys, values
        for layout, axis in (("(3 h d) i", 0), ("i (3 h d)", 1)):
            size, rest = divmod(own[1 - axis], num_heads)
            if own[axis] == 3 * own[1 - axis] and not rest:
                yield _Reading(layout, stack, num_heads, num_heads, size)


def _only(
    root: str,
    names: tuple[str, str],
    found: list[_Reading],
    query: tuple[int, ...],
    num_heads: int | None,
    modules: Modules,
) -> _Reading:
    unknown = any("(" in reading.layout for reading in found) and num_heads is None
    if len(found) == 1 and not unknown:
        return found[0]
    named = {k: v for k, v in zip(("query", "key"), names, strict=True) if v != k}
    path = _pattern(root, modules)
    if num_heads is None and (unknown or not found):
        raise ValueError(
            f"the heads of {root!r} can't be told from its query kernel {query}; give num_heads: "
            "muonjax.sites_from(params, num_heads=...)."
        )
    if found and not names[1].startswith("kv"):
        calls = " or ".join(
            _call(
                "mha_site",
                path,
                **named,
                layout=None if r.layout == "i h d" else r.layout,
                num_heads=r.heads if "(" in r.layout else None,
                num_kv_heads=r.key_heads if "(" in r.layout and r.key_heads != r.heads else None,
                scan_axis=r.scan_axis,
            )
            for r in found
        )
        raise ValueError(
            f"the axis of layers of {root!r} can't be told from its query kernel {query}: name the module with {calls}."
        )
    raise ValueError(
        f"the query kernel {query} of {root!r} does not fit its key, its output and {num_heads} heads; name the module "
        f"with {_call('mha_site', path, **named, layout=..., num_heads=..., num_kv_heads=..., scan_axis=...)}, or "
        "write its Site."
    )
