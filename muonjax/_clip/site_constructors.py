"""The sites of usual attentions: which parts of their projections hold queries and keys."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from muonjax._clip.scale import Scale
from muonjax._clip.site import KEY_NORMS, Site
from muonjax._common.arguments import check_text, errors_of, whole_number

_AT_LEAST_ONE = ", at least 1."


def mha_site(
    path: str = ".*",
    *,
    query: str = "query",
    key: str = "key",
    layout: str = "i h d",
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    scan_axis: int | Sequence[int] | None = None,
) -> Site:
    """Multi-head, grouped-query and multi-query attention with one projection for queries and one
    for keys.

    The defaults fit `flax.linen.MultiHeadDotProductAttention` and `flax.nnx.MultiHeadAttention`. A
    projection has a `kernel`, and perhaps a `bias`; for other names write a `Site`.

    Args:
      path: Regular expression that matches the whole "/"-joined path of the modules
        (`re.fullmatch`; the rules of `dimension_numbers` search), such as "decoder/.*/attention";
        by default every module with a child `query`.
      query: Name of the query projection.
      key: Name of the key projection.
      layout: Axes of a kernel: i for the input, h for heads, d within a head; brackets for a merged
        axis. Flax's attention has "i h d", `nn.Dense` "i (h d)", a kernel stored (out, in)
        "(h d) i", Gemma's einsums "h i d".
      num_heads: Number of query heads; needed where h is in brackets.
      num_kv_heads: Number of key heads; None: `num_heads`. If query and key heads then differ in
        size, the clip raises once it gets the parameters.
      scan_axis: The axis of layers in stacked parameters, `variable_axes={"params": scan_axis}` of
        `nn.scan`, one for each level of stacking; None: the leading axes.

    Returns:
      A `Site` for `qk_clip`.

    Raises:
      ValueError: A path that is no regular expression, a layout that can't be read,
        head counts that don't divide.

    Example:
      >>> import muonjax
      >>> site = muonjax.mha_site("decoder/.*/attention")
      >>> [scale.path for scale in site.scales]
      ['query/kernel', 'query/bias', 'key/kernel', 'key/bias']
    """
    # Both may be None for a layout such as "i h d": the size of the axis h says how many there are.
    key_heads = num_heads if num_kv_heads is None else num_kv_heads
    with errors_of("mha_site"):
        check_text(query=query, key=key, layout=layout)
        _check_counts(num_heads=num_heads, num_kv_heads=num_kv_heads)
        # Two scales each: of the kernel and of the bias
        queries = _projection(query, "query", layout, entries=num_heads)
        keys = _projection(key, "key", layout, entries=key_heads)
        return Site(path=path, scales=queries + keys, scan_axis=scan_axis)


def mla_site(
    path: str = ".*",
    *,
    nope: int,
    query: str = "wq_b",
    key_value: str = "wkv_b",
    layout: str = "i h d",
    num_heads: int | None = None,
    scan_axis: int | Sequence[int] | None = None,
) -> Site:
    """Multi-head latent attention (DeepSeek, Kimi): each head has a part without position,
    and all share a rotary key.

    √γ goes to the query's first `nope` features and to the key's, γ to the query's rotary features,
    and nothing to the shared rotary key, the values and the latent projections:
    √γ·√γ·(nope part) + γ·1·(rotary part) = γ·logit.

    Args:
      path: As in `mha_site`.
      nope: Number of a head's features without position, first in both kernels: 128 in DeepSeek-V3.
      query: Name of the projection to a head's nope + rotary features: the second of a low-rank
        pair ("wq_b"), or a direct one ("wq" in DeepSeek, "query" in MaxText).
      key_value: Name of the projection from the latent to a head's nope + value features.
      layout: Axes of both kernels, as in `mha_site`: MaxText has "i h d", DeepSeek's flat kernels
        are "i (h d)" here and "(h d) i" where they are stored (out, in).
      num_heads: Number of heads; needed where h is in brackets.
      scan_axis: As in `mha_site`.

    Returns:
      A `Site` for `qk_clip`.

    Raises:
      ValueError: As `mha_site`, and `nope` < 1.

    Example:
      >>> import muonjax
      >>> site = muonjax.mla_site("layers/.*/mla", nope=128)
      >>> [(s.path, s.span, s.factor) for s in site.scales if not s.optional]
      [('wq_b/kernel', (0, 128), 'query'), ('wq_b/kernel', (128, None), 'whole'),
      ('wkv_b/kernel', (0, 128), 'key')]

    Source: Kimi K2 (arXiv 2507.20534), section 2.1.
    """
    with errors_of("mla_site"):
        check_text(query=query, key_value=key_value, layout=layout)
        whole_number("nope", nope, 1, _AT_LEAST_ONE)
        _check_counts(num_heads=num_heads)
        # √γ·√γ for the features without position, γ·1 for the rotary ones,
        # whose key all heads share.
        without_position: Any = {"entries": num_heads, "span": (0, nope)}
        queries = _projection(query, "query", layout, **without_position)
        keys = _projection(key_value, "key", layout, **without_position)
        rotary = _projection(
            query, "whole", layout, entries=num_heads, span=(nope, None)
        )
        # A norm of the keys would undo the clip, and is refused. Norms of the latents (q_norm,
        # q_layernorm, kv_norm) come before these projections and undo nothing: they are not in
        # KEY_NORMS.
        return Site(
            path=path,
            scales=queries + rotary + keys,
            scan_axis=scan_axis,
            norms=KEY_NORMS,
        )


def fused_qkv_site(
    path: str = ".*",
    *,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None = None,
    name: str = "qkv",
    layout: str = "i (3 h d)",
    scan_axis: int | Sequence[int] | None = None,
) -> Site:
    """Attention whose queries, keys and values come from one projection.

    Args:
      path: As in `mha_site`.
      num_heads: Number of query heads.
      head_dim: Features of a head.
      num_kv_heads: Number of key heads, and of value heads; None: as many.
      name: Name of the projection.
      layout: Axes of the kernel, as in `mha_site`, with 3 for queries, keys, values. "i (3 h d)":
        all queries, then all keys, then all values; "i 3 h d": the same from
        `DenseGeneral((3, heads, head_dim))`; "i (3 h) d" for grouped keys; "i (h 3 d)", "i h (3 d)"
        or "i h 3 d": head after head (GPT-NeoX).
      scan_axis: As in `mha_site`.

    Returns:
      A `Site` for `qk_clip`.

    Raises:
      ValueError: As `mha_site`; a layout by heads, or with an axis of 3, for grouped keys.

    Example:
      >>> import muonjax
      >>> site = muonjax.fused_qkv_site(num_heads=8, head_dim=64, num_kv_heads=2)
      >>> [(s.path, s.part, s.entries) for s in site.scales if not s.optional]
      [('qkv/kernel', (0, 512), 8), ('qkv/kernel', (512, 640), 2)]
    """
    key_heads = num_heads if num_kv_heads is None else num_kv_heads
    with errors_of("fused_qkv_site"):
        check_text(name=name, layout=layout)
        whole_number("num_heads", num_heads, 1, _AT_LEAST_ONE)
        whole_number("head_dim", head_dim, 1, _AT_LEAST_ONE)
        _check_counts(num_kv_heads=num_kv_heads)
        # In GPT-NeoX each head has its query, key and value side by side. Elsewhere the queries of
        # all heads come first, then all keys, then all values.
        by_head = layout.find("h") < layout.find("3")
        if key_heads != num_heads and (by_head or "(3 h" not in layout):
            raise ValueError(
                f"{layout=} can't have {num_heads=} and {num_kv_heads=}: grouped keys need all "
                "queries first, '(3 h d)' or '(3 h) d'; for another order write a Site by hand."
            )
        # The letters of the outputs in either order. Head after head, [q k v | q k v], the queries
        # are a span of each head's run; otherwise, [q q | k k | v v], a part of all columns. The
        # values take the rest of the kernel, and nothing scales them.
        orders = ("3hd", "h3d")
        if by_head:
            field = "span"
            width, end = head_dim, 2 * head_dim
        else:
            field = "part"
            width = num_heads * head_dim
            end = width + key_heads * head_dim
        of_query: Any = {"entries": num_heads, field: (0, width)}
        of_key: Any = {"entries": key_heads, field: (width, end)}
        queries = _projection(name, "query", layout, orders, **of_query)
        keys = _projection(name, "key", layout, orders, **of_key)
        return Site(path=path, scales=queries + keys, scan_axis=scan_axis)


def _projection(
    name: str,
    factor: str,
    layout: str,
    orders: Sequence[str] = ("hd",),
    **heads: Any,
) -> tuple[Scale, Scale]:
    """A `Scale` of a projection's kernel and one of its bias, which may be missing.

    Args:
      name: The name of the projection, "query".
      factor: Which factor of the logits both belong to: "query", "key", or "whole", a part of the
        queries that takes all of γ, as its key is shared by the heads.
      layout: Axes of the kernel: "i (h d)" has an axis of the input and one of outputs.
      orders: In which order the letters of the outputs may come;
        by default the heads before their features.
      **heads: Where the heads lie along the outputs, as fields of `Scale`. `entries`, the number of
        heads, is always given, perhaps as None.

    Raises:
      ValueError: The layout can't be read, or it does not show how many heads there are.
    """
    # The letters of each axis, without spaces and brackets where these are merged:
    # ["i", "hd"] of "i (h d)".
    merged = re.sub(r"\(([^()]*)\)", lambda axis: axis[1].replace(" ", ""), layout)
    letters = merged.split()
    rank = len(letters)
    outputs = [axis for axis in range(rank) if letters[axis] != "i"]
    # "hd" of "i (h d)", "3hd" of a fused "i (3 h d)"
    order = "".join(letters[axis] for axis in outputs)
    # One letter i for one axis of the input, and every other axis an output.
    if order not in orders or rank != len(outputs) + 1:
        wanted = " or ".join(map(" ".join, orders))
        raise ValueError(
            f"{layout=} can't be read: write i for the input and {wanted}, merged axes in "
            "brackets: 'i (h d)'."
        )
    # An axis of heads alone says how many there are. In a merged axis only `entries` does.
    if heads["entries"] is None and "h" not in letters:
        raise ValueError(f"{layout=} has its heads in a merged axis: give num_heads.")
    kernel = Scale(
        path=f"{name}/kernel",
        rank=rank,
        # `Scale` counts axes from the last: (-2, -1) in "i h d".
        axes=tuple(axis - rank for axis in outputs),
        factor=factor,
        **heads,
    )
    # A bias has the outputs of the kernel as its only axes,
    # and the heads lie along them in the same way.
    bias = dataclasses.replace(
        kernel,
        path=f"{name}/bias",
        rank=rank - 1,
        axes=tuple(range(1 - rank, 0)),
        optional=True,
    )
    return kernel, bias


def _check_counts(**counts: int | None) -> None:
    """Raise unless each count is at least 1, or None where it is left to the shapes."""
    for argument, count in counts.items():
        if count is not None:
            whole_number(argument, count, 1, _AT_LEAST_ONE)
