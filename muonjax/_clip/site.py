"""A clip with its statistic: described by hand for all modules that a pattern matches,
and placed on one module."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from muonjax._clip.scale import PlacedScale, Scale
from muonjax._common.arguments import (
    axis_numbers,
    check_flag,
    check_pattern,
    check_text,
    errors_of,
    shown,
)

# Names of the children of an attention module that normalize its queries and keys after their
# projections: "query_ln" in Flax, "query_norm" in MaxText, "_query_norm" in Gemma's library,
# "q_norm" and "q_layernorm" in Transformers, "norm_q" in Diffusers. A child called norm may come
# before the projections, but names do not say where it is.
_NORM = "(layer_?norm|rms_?norm|l2_?norm|norm|ln)"
KEY_NORMS = (
    rf"_?{_NORM}_?\d*|_?(k|key|qk)_?({_NORM}|scale)|_?({_NORM}|scale)_?(k|key|qk)"
)
QK_NORMS = rf"{KEY_NORMS}|_?(q|query)_?({_NORM}|scale)|_?({_NORM}|scale)_?(q|query)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """Modules whose weights a clip scales, the parameters that it scales there,
    and the signal that it goes by.

    Make one with `mha_site`, `mla_site` or `fused_qkv_site`; by hand for an attention of another
    kind, or for another signal (`signal_clip`).

    Attributes:
      path: Regular expression that matches the whole "/"-joined path of the modules.
      scales: The parameters. For `qk_clip` each `factor` is "query", "key", or "whole" (a part of
        the query that takes all of γ, since its keys are shared by all heads); `qk_clip` sets the
        powers.
      signal: Name of the statistic below the module, where it has several. By default the statistic
        has the path of the module, or is "max_logits" at the root.
      scan_axis: The axes, in a stacked parameter, that count layers,
        in the statistic's order; None: the leading ones.
      norms: Regular expression for the names of children that forbid the clip, because they
        normalize queries or keys and so undo it; by default the names in use. "" allows all norms.
      exact: Whether `scales` are known to be all that makes queries and keys, as a program shows
        it. Then `path` is that of one module and no pattern, and what else is in it, such as norms
        and adapters, is not judged by its name.

    Raises:
      ValueError: A number out of its range, a path or norm that is no regular expression.
      TypeError: No scales, or a field of another type.

    Example:
      >>> import muonjax
      >>> # Bare arrays (d, heads, size).
      >>> query = muonjax.Scale(path="q", rank=3, axes=(-2, -1), factor="query")
      >>> key = muonjax.Scale(path="k", rank=3, axes=(-2, -1), factor="key")
      >>> site = muonjax.Site(path="blocks/.*/attention", scales=(query, key))
    """

    path: str
    scales: tuple[Scale, ...]
    signal: str = ""
    scan_axis: int | Sequence[int] | None = None
    norms: str = QK_NORMS
    exact: bool = False

    @errors_of("Site")
    def __post_init__(self):
        """Check each field, so that a mistake raises where the site is made, and make `scan_axis` a
        tuple."""
        check_flag(exact=self.exact)
        check_text(path=self.path, signal=self.signal)
        # The path of an exact site is that of one module. Other paths are patterns.
        if not self.exact:
            check_pattern("path", self.path)
        check_pattern("norms", self.norms)
        # An empty sequence is refused too: a site without scales would clip nothing.
        if not _is_sequence_of(Scale, self.scales):
            raise TypeError(
                f"(scales={shown(self.scales)}) must be a sequence of muonjax.Scale, at least one."
            )
        if self.scan_axis is not None:
            axes = axis_numbers("scan_axis", self.scan_axis)
            # (2,) for 2. The dataclass is frozen: `self.scan_axis = axes` would raise.
            object.__setattr__(self, "scan_axis", axes)


def _is_sequence_of(kind: type, several: Any) -> bool:
    """Whether this is a sequence of objects of one kind, and not an empty one."""
    is_several = isinstance(several, Sequence) and len(several) > 0
    return is_several and all(isinstance(each, kind) for each in several)


Sites: TypeAlias = Site | Sequence[Site] | Any  # a `Program` has `sites`


def as_sites(argument: str, sites: Any) -> tuple[Site, ...]:
    """One site, several of them, or those of a `Program`, as a tuple.

    Raises TypeError, which names the argument, for anything else, also for an empty sequence. A
    `Program` without an attention that can be clipped raises ValueError.
    """
    # `Program.sites` makes the sites anew, warns of attentions that can't be clipped, and raises
    # ValueError if none can be: it is read once.
    several = getattr(sites, "sites", sites)
    if isinstance(several, Site):
        several = (several,)
    if not _is_sequence_of(Site, several):
        # In `muonclip(2e-3, 100.0)` the second argument is meant as the threshold, so the message
        # ends with how settings are given.
        raise TypeError(
            f"({argument}={shown(sites)}) must be what muonjax.inspect(loss_fn, params, batch) "
            "returns, or sites such as muonjax.mha_site(). Give all other settings by their names."
        )
    return tuple(several)


class PlacedSite(NamedTuple):
    """A `Site` on one module, with the shapes of its parameters.

    Nothing here is an array, so that every mistake raises while tracing.

    Attributes:
      name: Its key in the clip's state and statistics: the path of the module, "decoder/attention",
        and where a module has several statistics, the name of this one, `Site.signal`.
      scales: What is scaled, without the optional parameters that the module lacks.
    """

    name: str
    scales: tuple[PlacedScale, ...]

    @property
    def entries(self) -> int:
        """Entries of the signal in one layer: the query heads of an attention,
        which has no more key heads."""
        return max(scale.entries for scale in self.scales)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the statistic: [*layers, entries]."""
        # `_placed_scales` has seen that all parameters have the same layers.
        return (*self.scales[0].layers, self.entries)
