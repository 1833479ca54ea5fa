"""Find attention modules by the names of their projections, whose axes routing tells."""

import re
from typing import Any

from muonjax._arguments import errors_of
from muonjax._clipping.matching import Modules, leaf_path, refuse_norms
from muonjax._clipping.sites import QK_NORMS, Site, mha_site
from muonjax._matrix_view import MuonDimensionNumbers, axes_of
from muonjax._routing.dimension_numbers import Route, routes
from muonjax._routing.roles import FUSED_KV, FUSED_QKV, INTERLEAVED, MLA_UP, layer_of, read_roles, words

INSPECT = (
    "your function says it: program = muonjax.inspect(loss_fn, params, batch), then "
    "muonjax.muonclip(learning_rate, program)"
)


def sites_from(params: Any, *, num_heads: int | None = None) -> tuple[Site, ...]:
    """The sites of the attention modules of a model, found by the names and shapes of their parameters.

    `muonjax.inspect` reads them from your function, for any attention and without names. Here a module counts as
    attention if it has a query and a key projection of its own, called as in Flax, MaxText, Transformers, axlearn and
    others; the axes of their kernels are those of `muonjax.dimension_numbers`. What can't be told is refused.

    Args:
      params: The parameters, or their shapes from `jax.eval_shape`.
      num_heads: Number of query heads, where kernels have heads and features merged in one axis, as with `nn.Dense`.

    Returns:
      A `Site` for each module.

    Raises:
      ValueError: No such module; one whose heads or stack of layers can't be told; queries, keys and values in one
        kernel, latent attention; one that normalizes its queries and keys; one that adds a relative position bias, as
        T5; norms around attention and feed-forward as in Gemma 2, which caps its logits.

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
    if any(re.fullmatch(r"rel\w*_bias", child) for names in modules.children.values() for child in names):
        raise ValueError(
            "the model adds relative position biases to its logits, as T5 does, which are neither measured nor scaled; "
            "to clip what comes before them, name its modules with mha_site."
        )
    try:
        found = [route for route in routes(modules.params, partial=True)[0] if isinstance(route, Route)]
    except ValueError:
        raise ValueError(
            f"the axis of layers can't be told among the parameters; {INSPECT}; or name the modules with mha_site."
        ) from None
    attentions: dict[str, dict[str, Route]] = {}  # projections by name; their paths below the module
    paths = [tuple(route.path.split("/")) for route in found]
    for path, route, role in zip(paths, found, read_roles(paths), strict=True):
        scope = layer_of(path)[0]
        depth = next((i for i in range(len(path)) if words(path[:i]) == scope), None)
        if depth is None or len(route.shape) < 2:
            continue
        name = "other" if role in (FUSED_QKV, FUSED_KV, INTERLEAVED, MLA_UP) else role.projection
        own = attentions.setdefault("/".join(path[:depth]), {})
        own.setdefault(name, route._replace(path=path[depth]))
    sites = [
        _site(root, own, modules, num_heads)
        for root, own in sorted(attentions.items())
        if "other" in own or own.keys() >= {"query", "key"}
    ]
    if not sites:
        raise ValueError(
            f"no attention that it knows among the parameters {sorted(modules.leaves)[:4]}, ...; {INSPECT}; or name "
            "yours with mha_site, mla_site or fused_qkv_site. A model without attention needs no clip: take "
            "muonjax.muon or optax.adamw."
        )
    return tuple(sites)


def _site(root: str, own: dict[str, Route], modules: Modules, num_heads: int | None) -> Site:
    _refuse(root, modules)
    if "other" in own:
        raise ValueError(
            f"names don't tell how {own['other'].path!r} of {root!r} is divided; {INSPECT}; or see mla_site and "
            "fused_qkv_site."
        )
    query, key, out = own["query"], own["key"], own.get("out")

    def refusal(what: str, fix: str = "") -> ValueError:
        return ValueError(
            f"{what} of {root!r} can't be told from {query.path!r} of shape {query.shape} and the kernels beside it; "
            f"{fix}{INSPECT}; or name the module with mha_site."
        )

    numbers, rank = query.numbers, len(query.shape)
    if not isinstance(numbers, MuonDimensionNumbers) or key.numbers != numbers:
        raise refusal("the axes")
    rows, columns = axes_of(numbers.reduction_axis), axes_of(numbers.output_axis)
    layers = tuple(axis for axis in range(rank) if axis not in rows + columns)
    # An output that is stored like the query tells no layers from inputs; who stores it so stacks on the first axis.
    o = out and out.numbers
    if layers not in ((), (0,)) and not (o and axes_of(o.output_axis) > axes_of(o.reduction_axis)):
        raise refusal("the axis of layers")
    merged = len(columns) == 1
    stored = leaf_path(root, f"{query.path}/kernel", modules).rpartition("/")[2]
    if merged and stored.startswith("weight") and rows < columns:  # what is (out, in) in PyTorch and Equinox
        raise refusal("the order of inputs and outputs")
    heads = num_heads if merged else query.shape[columns[0]]
    if not heads:
        raise refusal("the heads", "give num_heads: muonjax.sites_from(params, num_heads=...). Or ")
    size, rest = divmod(query.shape[columns[0]], heads)
    key_heads, key_rest = divmod(key.shape[columns[0]], size or 1)
    fits = not rest and not key_rest and key_heads and heads % key_heads == 0 and num_heads in (None, heads)
    if not fits or any(query.shape[axis] != key.shape[axis] for axis in layers + columns[1:]):
        raise refusal(f"{num_heads or heads} heads")
    letters = dict.fromkeys(rows, "i") | dict(zip(columns, ["(h d)"] if merged else "hd", strict=True))
    counts: dict[str, Any] = {"num_heads": heads, "num_kv_heads": key_heads} if merged else {}
    # From the end where it is the last: a bias has fewer axes than its kernel.
    axes = tuple(axis - rank if axis == rank - 1 else axis for axis in layers)
    layout = " ".join(letters[axis] for axis in range(rank) if axis in letters)
    return mha_site(
        re.escape(root), query=query.path, key=key.path, layout=layout, scan_axis=axes or None, **counts
    )


def _refuse(root: str, modules: Modules) -> None:
    """What can't be clipped, or needs no clip, as far as paths tell."""
    refuse_norms(root, QK_NORMS, modules)
    beside = modules.children.get(root.rpartition("/")[0], ())
    after = ", ".join(name for name in beside if re.match(r"post_.*(norm|ln)", name))
    if re.search("att|ln_0", after) and re.search("ffw|ffn|feed_?forward|mlp|ln_1", after):
        raise ValueError(
            f"the layer of {root!r} has norms after attention and feed-forward ({after}), as Gemma 2, which caps its "
            "logits: the cap bounds them without a clip, and parameters don't show it. If this one has none, name it "
            f"with mha_site; {INSPECT}."
        )
