"""Sites: which attention modules to clip, and which of their parameters hold queries and keys."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from muonjax._clip.factors import Scale
from muonjax._common.arguments import axis_numbers, check_flag, check_pattern, check_text, shown, whole_number

# Names of the children of an attention module that normalize its queries and keys after their projections: "query_ln"
# in Flax, "query_norm" in MaxText, "_query_norm" in Gemma's library, "q_norm" and "q_layernorm" in Transformers,
# "norm_q" in Diffusers. As regular expressions, for there are many spellings.
_NORM = "(norm|ln|layer_?norm|rms_?norm|l2_?norm|scale)"
_KEY_NORMS = (rf"_?(k|key|qk)_?{_NORM}", rf"_?{_NORM}_?(k|key|qk)")
QK_NORMS = (*_KEY_NORMS, rf"_?(q|query)_?{_NORM}", rf"_?{_NORM}_?(q|query)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """Modules whose weights a clip scales, the parameters that it scales there, and the signal that it goes by.

    Make one with `mha_site`, `mla_site` or `fused_qkv_site`; by hand for an attention of another kind.

    Attributes:
      path: Regular expression that matches the whole "/"-joined path of the modules.
      scales: The parameters. For `qk_clip` each `factor` is "query", "key", or "rotary" (a part of the query whose
        counterpart is shared by all heads), and the powers are set by `qk_clip`.
      signal: Name of the statistic below the module.
      scan_axis: The axes, in a stacked parameter, that count layers, in the statistic's order; None: the leading ones.
      norms: Regular expressions for the names of children that forbid the clip, because they normalize queries or keys
        and so undo it; by default the names in use. () allows all.
      exact: Whether `scales` are known to be all that makes queries and keys, as a program shows it. What else is
        in the modules, such as norms and adapters, is then not judged by its name.

    Raises:
      ValueError: No scales, an axis that is no whole number, a path or norm that is no regular expression.
      TypeError: A field of another type.

    Example:
      >>> import muonjax
      >>> query = muonjax.Scale(path="q", rank=3, axes=(-2, -1), factor="query")  # a bare array (d, heads, size)
      >>> key = muonjax.Scale(path="k", rank=3, axes=(-2, -1), factor="key")
      >>> site = muonjax.Site(path="blocks/.*/attention", scales=(query, key))
    """

    path: str
    scales: tuple[Scale, ...]
    signal: str = "max_logits"
    scan_axis: tuple[int, ...] | None = None
    norms: tuple[str, ...] = QK_NORMS
    exact: bool = False

    def __post_init__(self):
        check_pattern("Site", "path", self.path)
        check_text("Site", signal=self.signal)
        if not isinstance(self.scales, (tuple, list)) or not all(isinstance(x, Scale) for x in self.scales):
            raise TypeError(f"Site(scales={shown(self.scales)}) must be a tuple of muonjax.Scale.")
        if not self.scales:
            raise ValueError(f"Site(path={self.path!r}, scales=()) scales nothing; name a parameter.")
        if self.scan_axis is not None:
            object.__setattr__(self, "scan_axis", axis_numbers("Site", "scan_axis", self.scan_axis))
        if not isinstance(self.norms, (tuple, list)):
            raise TypeError(
                f"Site(norms={shown(self.norms)}) must be a tuple of regular expressions; () allows all."
            )
        for pattern in self.norms:
            check_pattern("Site", "norms", pattern)
        check_flag("Site", "exact", self.exact)


Sites: TypeAlias = Site | Sequence[Site] | Any  # a `Program` has `sites`


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
    """Multi-head, grouped-query and multi-query attention with one projection for queries and one for keys.

    The defaults fit `flax.linen.MultiHeadDotProductAttention` and `flax.nnx.MultiHeadAttention`. A projection has a
    `kernel`, and perhaps a `bias`; for other names write a `Site`.

    Args:
      path: Regular expression that matches the whole "/"-joined path of the modules (`re.fullmatch`; the rules of
        `dimension_numbers` search), such as "decoder/.*/attention"; by default every module with a child `query`.
      query: Name of the query projection.
      key: Name of the key projection.
      layout: Axes of a kernel: i for the input, h for heads, d within a head; brackets for a merged axis. Flax's
        attention has "i h d", `nn.Dense` "i (h d)", a kernel stored (out, in) "(h d) i", Gemma's einsums "h i d".
      num_heads: Number of query heads; needed where h is in brackets.
      num_kv_heads: Number of key heads; None: as many. Refused if query and key heads then differ in size.
      scan_axis: The axis of layers in stacked parameters, `variable_axes={"params": scan_axis}` of `nn.scan`, one for
        each level of stacking; None: the leading axes.

    Returns:
      A `Site` for `qk_clip`.

    Raises:
      ValueError: A path that is no regular expression, a layout that can't be read, head counts that don't divide.

    Example:
      >>> import muonjax
      >>> site = muonjax.mha_site("decoder/.*/attention")
      >>> [scale.path for scale in site.scales]
      ['query/kernel', 'query/bias', 'key/kernel', 'key/bias']
    """
    call = "mha_site"
    check_text(call, path=path, query=query, key=key, layout=layout)
    num_heads, num_kv_heads = _head_counts(call, num_heads, num_kv_heads)
    kernel = _kernel(call, layout, ("hd",), num_heads)
    queries = _projection(query, *kernel, entries=num_heads, factor="query")
    keys = _projection(key, *kernel, entries=num_kv_heads, factor="key")
    return Site(path=path, scales=queries + keys, scan_axis=_axes(call, scan_axis))


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
    """Multi-head latent attention (DeepSeek, Kimi): each head has a part without position, and all share a rotary key.

    √γ goes to the query's first `nope` features and to the key's, γ to the query's rotary features, and nothing to
    the shared rotary key, the values and the latent projections: √γ·√γ·(nope part) + γ·1·(rotary part) = γ·logit.

    Args:
      path: As in `mha_site`.
      nope: Number of a head's features without position, first in both kernels: 128 in DeepSeek-V3.
      query: Name of the projection to a head's nope + rotary features: the second of a low-rank pair ("wq_b"), or a
        direct one ("wq" in DeepSeek, "query" in MaxText).
      key_value: Name of the projection from the latent to a head's nope + value features.
      layout: Axes of both kernels, as in `mha_site`: MaxText has "i h d", DeepSeek's flat kernels are "i (h d)" here
        and "(h d) i" where they are stored (out, in).
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
      [('wq_b/kernel', (0, 128), 'query'), ('wq_b/kernel', (128, None), 'rotary'), ('wkv_b/kernel', (0, 128), 'key')]

    Source: Kimi K2 (arXiv 2507.20534), section 2.1.
    """
    call = "mla_site"
    check_text(call, path=path, query=query, key_value=key_value, layout=layout)
    num_heads, _ = _head_counts(call, num_heads)
    nope = whole_number(call, "nope", nope, 1, " of features, at least 1.")
    kernel = _kernel(call, layout, ("hd",), num_heads)
    scales = (
        *_projection(query, *kernel, entries=num_heads, span=(0, nope), factor="query"),
        *_projection(query, *kernel, entries=num_heads, span=(nope, None), factor="rotary"),
        *_projection(key_value, *kernel, entries=num_heads, span=(0, nope), factor="key"),
    )
    # Norms of the latents (q_norm, q_layernorm, kv_norm) come before these projections: they undo nothing.
    scan_axes = _axes(call, scan_axis)
    return Site(path=path, scales=scales, scan_axis=scan_axes, norms=_KEY_NORMS)


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
      layout: Axes of the kernel, as in `mha_site`, with 3 for queries, keys, values. "i (3 h d)": all queries, then all
        keys, then all values; "i 3 h d": the same from `DenseGeneral((3, heads, head_dim))`; "i (3 h) d" for grouped
        keys; "i (h 3 d)", "i h (3 d)" or "i h 3 d": head after head (GPT-NeoX).
      scan_axis: As in `mha_site`.

    Returns:
      A `Site` for `qk_clip`.

    Raises:
      ValueError: As `mha_site`; a layout by heads, or with an axis of 3, for grouped keys.

    Example:
      >>> import muonjax
      >>> site = muonjax.fused_qkv_site(num_heads=8, head_dim=64, num_kv_heads=2)
      >>> [(s.path, s.start, s.size, s.entries) for s in site.scales if not s.optional]
      [('qkv/kernel', 0, 512, 8), ('qkv/kernel', 512, 128, 2)]
    """
    call = "fused_qkv_site"
    check_text(call, path=path, name=name, layout=layout)
    num_heads = whole_number(call, "num_heads", num_heads, 1, _HEADS)
    num_kv_heads = _head_counts(call, num_heads, num_kv_heads)[1] or num_heads
    head_dim = whole_number(call, "head_dim", head_dim, 1, " of features, at least 1.")
    kernel = _kernel(call, layout, ("3hd", "h3d"), num_heads)
    by_head = layout.index("h") < layout.index("3")
    if num_kv_heads != num_heads and (by_head or "(3 h" not in layout):
        raise ValueError(
            f"{call}(layout={layout!r}, num_heads={num_heads}, num_kv_heads={num_kv_heads}): grouped keys need all "
            "queries first, '(3 h d)' or '(3 h) d'; for another order write a Site by hand."
        )
    width = num_heads * head_dim
    if by_head:
        query, key = {"span": (0, head_dim)}, {"span": (head_dim, 2 * head_dim)}
    else:
        query, key = {"size": width}, {"start": width, "size": num_kv_heads * head_dim}
    queries = _projection(name, *kernel, entries=num_heads, factor="query", **query)
    keys = _projection(name, *kernel, entries=num_kv_heads, factor="key", **key)
    return Site(path=path, scales=queries + keys, scan_axis=_axes(call, scan_axis))


def _projection(name: str, rank: int, axes: tuple[int, ...], **part: Any) -> tuple[Scale, ...]:
    """Kernel and bias of one projection. The bias has the kernel's axes but the input's."""
    kernel = Scale(path=f"{name}/kernel", rank=rank, axes=axes, **part)
    last = tuple(range(-len(axes), 0))
    bias = dataclasses.replace(kernel, path=f"{name}/bias", rank=len(axes), axes=last, optional=True)
    return kernel, bias


def _kernel(call: str, layout: str, orders: Sequence[str], heads: int | None) -> tuple[int, tuple[int, ...]]:
    """Rank of a kernel of this layout, and its axes that are not the input's."""
    groups = re.findall(r"\(([^()]*)\)|(\S+)", layout)
    parts = [(merged or single).split() for merged, single in groups]
    order = "".join("".join(p) for p in parts if p != ["i"])
    if order not in orders or parts.count(["i"]) != 1:
        raise ValueError(
            f"{call}(layout={layout!r}) can't be read: write i for the input and "
            f"{' or '.join(' '.join(o) for o in orders)}, merged axes in brackets: 'i (h d)'."
        )
    if heads is None and ["h"] not in parts:
        raise ValueError(f"{call}(layout={layout!r}) has its heads in a merged axis: give num_heads.")
    return len(parts), tuple(i - len(parts) for i, p in enumerate(parts) if p != ["i"])


_HEADS = " of heads, at least 1."


def _head_counts(call: str, num_heads: Any, num_kv_heads: Any = None) -> tuple[int | None, int | None]:
    """The numbers of query and of key heads; None where a kernel's own axis says them."""
    if num_heads is not None:
        num_heads = whole_number(call, "num_heads", num_heads, 1, _HEADS)
    if num_kv_heads is None:
        return num_heads, num_heads
    num_kv_heads = whole_number(call, "num_kv_heads", num_kv_heads, 1, _HEADS)
    if num_heads is None or num_heads % num_kv_heads:
        raise ValueError(f"{call}({num_heads=}, {num_kv_heads=}): heads must be a multiple of key heads.")
    return num_heads, num_kv_heads


def _axes(call: str, scan_axis: Any) -> tuple[int, ...] | None:
    return None if scan_axis is None else axis_numbers(call, "scan_axis", scan_axis)
