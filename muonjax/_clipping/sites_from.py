"""Find attention modules by the names and shapes of their parameters, so that nobody has to name them."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from muonjax._clipping.errors import errors_of
from muonjax._clipping.matching import Modules, leaf_path, norms_of
from muonjax._clipping.sites import QK_NORMS, Site, fused_qkv_site, mha_site

# Names of projections in Flax, MaxText, Transformers, T5, Diffusers, Equinox and others.
PAIRS = (
    *(("query", "key"), ("q_proj", "k_proj"), ("query_proj", "key_proj"), ("wq", "wk"), ("q", "k")),
    *(("to_q", "to_k"), ("q_lin", "k_lin"), ("q_einsum", "k_einsum")),
)
FUSED = ("qkv", "qkv_proj", "c_attn", "query_key_value", "in_proj", "qkv_einsum")
OUTPUTS = (
    *("out", "o_proj", "out_proj", "attn_vec_einsum", "output_proj", "c_proj"),
    *("proj", "wo", "o", "to_out", "out_lin"),
)
# Latent attention, keys and values in one kernel: found to be attention, but read by `inspect` alone.
OTHERS = ("wkv_b", "kv_b_proj", "wkv_a", "kv_a_proj_with_mqa", "kv_einsum")
RELATIVE = ("relative_attention_bias", "relpos_bias", "relative_position_bias")

INSPECT = (
    "your function says it: program = muonjax.inspect(loss_fn, params, batch), then "
    "muonjax.muonclip(learning_rate, program)"
)


def sites_from(params: Any, *, num_heads: int | None = None) -> tuple[Site, ...]:
    """The sites of the attention modules of a model, found by the names and shapes of their parameters.

    `muonjax.inspect` reads them from your function, for any attention and without names. Here a module counts as
    attention if it has a query and a key projection, or one for both, by the names that Flax, MaxText, Transformers,
    axlearn, Levanter and others use. The order of a kernel's axes and the axis that a stack of layers is on follow from
    the shapes of query, key and output. What can't be told is refused.

    Args:
      params: The parameters, or their shapes from `jax.eval_shape`.
      num_heads: Number of query heads, where kernels have heads and features merged in one axis, as with `nn.Dense`.

    Returns:
      A `Site` for each module.

    Raises:
      ValueError: No such module; one whose heads or stack of layers can't be told; one that normalizes its queries and
        keys; one that adds a relative position bias, as T5; norms around attention and feed-forward as in Gemma 2,
        which caps its logits; latent attention.

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
            f"no attention that it knows among the parameters {sorted(modules.leaves)[:4]}, ...; {INSPECT}; or name "
            "yours with mha_site, mla_site or fused_qkv_site. A model without attention needs no clip: take "
            "muonjax.muon or optax.adamw."
        )
    return tuple(sites)


class _Reading(NamedTuple):
    """One way to read the axes of the query, key and output kernels of a module."""

    layout: str  # as in `mha_site`
    stack: int | None  # the axis of layers
    heads: int  # 0 where the kernels don't tell
    key_heads: int
    size: int  # of a head


def _site(root: str, modules: Modules, num_heads: int | None) -> Site | None:
    children = modules.children[root]
    kernels = {name: shape for name in children if (shape := _shape(root, name, modules))}
    pair = next((pair for pair in PAIRS if kernels.keys() >= {*pair}), None)
    fused = next(((name,) for name in FUSED if name in kernels), None)
    names: Sequence[str] | None = pair or fused
    other = next((name for name in OTHERS if name in children), None)
    if names is None and other is None:
        return None
    _refuse(root, modules)
    if other or not names:
        raise ValueError(
            f"names don't tell how {other!r} of {root!r} is divided; {INSPECT}; or see mla_site."
        )
    query, key = kernels[names[0]], kernels[names[-1]]
    output = _output(root, modules)
    stored = leaf_path(root, f"{names[0]}/kernel", modules).rpartition("/")[2]
    found = list(_readings(_layouts(names, stored), query, key, output, num_heads))
    if any("(h d)" in r.layout for r in found):
        apart = [r for r in found if "(h d)" not in r.layout and num_heads in (None, r.heads)]
        # An output that is stored like the query also fits a stack of Dense layers, of any number of heads.
        found = apart if apart and query != output else apart + [r for r in found if "(h d)" in r.layout]
    if len(found) != 1 or not found[0].heads:
        raise ValueError(_message(root, names, query, found, num_heads))
    layout, stack, heads, key_heads, size = found[0]
    # From the end where it is the last: a bias has fewer axes than its kernel.
    axis = -1 if stack == len(query) - 1 else stack
    counts: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": key_heads,
        "layout": layout,
        "scan_axis": axis,
    }
    if pair is None:
        return fused_qkv_site(re.escape(root), head_dim=size, name=names[0], **counts)
    if "(" not in layout:
        counts |= {"num_heads": None, "num_kv_heads": None}
    return mha_site(re.escape(root), query=pair[0], key=pair[1], **counts)


def _layouts(names: Sequence[str], stored: str) -> Sequence[str]:
    if len(names) == 2:
        merged = "(h d) i" if stored == "weight" else "i (h d)"
        return ("h i d",) if names[0].endswith("einsum") else ("i h d", merged)
    if names[0].endswith("einsum"):
        return ("3 h i d",)
    flat = ("(3 h d) i", "i (3 h d)") if names[0] == "c_attn" else ()  # GPT-2: queries, keys, values
    return ("i 3 h d", "3 i h d", "i h 3 d", "i (3 h) d", *flat)


def _message(
    root: str, names: Sequence[str], query: Any, found: Sequence[_Reading], num_heads: int | None
) -> str:
    what = "the axis of layers" if found else "the axes" if num_heads is None else f"{num_heads} heads"
    fix = ""
    if any(not reading.heads for reading in found):
        what, fix = "the heads", "give num_heads: muonjax.sites_from(params, num_heads=...). Or "
    return (
        f"{what} of {root!r} can't be told from {names[0]!r} of shape {query} and the kernels beside it; {fix}"
        f"{INSPECT}; or name the module with {'mha_site' if len(names) == 2 else 'fused_qkv_site'}."
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
            f"none, name it with mha_site; {INSPECT}."
        )


def _readings(
    layouts: Sequence[str],
    query: tuple[int, ...],
    key: tuple[int, ...],
    output: tuple[int, ...],
    num_heads: int | None,
) -> Iterator[_Reading]:
    """Every layout and axis of layers with which the kernels fit each other; a fused one is query and key."""
    for layout in layouts:
        groups = re.findall(r"\([^()]*\)|\w", layout)
        for stack in _stacks(len(query) - len(groups), query, key, output):
            q, k, o = (_without(shape, stack) for shape in (query, key, output))
            if len(k) != len(q):
                continue
            sizes, of_keys = (dict(zip(groups, shape, strict=True)) for shape in (q, k))
            match layout:
                case "i (h d)" | "(h d) i":
                    heads, width = num_heads or 0, sizes["(h d)"]
                    size, rest = divmod(width, heads or 1)
                    fits = not rest and (not o or o[groups.index("i")] == width)
                    key_heads, rest = divmod(of_keys["(h d)"], size if heads else 1)
                case "i (3 h d)" | "(3 h d) i":
                    heads = key_heads = num_heads or 0
                    size, rest = divmod(sizes["i"], heads or 1)
                    fits = sizes["(3 h d)"] == 3 * sizes["i"]
                case "i (3 h) d":
                    heads, size = next((pair for pair in (o[:2], o[1:]) if o[2:] and pair[1] == q[2]), (0, 0))
                    key_heads, rest = divmod(sizes["(3 h)"] - heads, 2)
                    fits = heads > 0 and _is_output(o, heads, size, stack)
                case _:
                    heads, size, key_heads, rest = sizes["h"], sizes["d"], of_keys["h"], 0
                    fits = of_keys["d"] == size and sizes.get("3", 3) == 3
                    fits = fits and (_is_output(o, heads, size, stack) if o or "3" in layout else True)
            if fits and not rest and (not heads or (key_heads > 0 and heads % key_heads == 0)):
                yield _Reading(layout, stack, heads, key_heads, size)


def _stacks(count: int, *shapes: tuple[int, ...]) -> Sequence[int | None]:
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
