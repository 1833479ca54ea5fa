"""Entries of a parameter that a factor scales, head by head: described by hand, and placed on a parameter."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np

from muonjax._common.arguments import (
    axis_numbers,
    check_flag,
    check_range,
    check_text,
    errors_of,
    shown,
    whole_number,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """Multiply by γ**power, entry by entry, the part of one parameter that feeds a signal.

    The signal has entries: heads, output dimensions, or groups of them. Flatten the parameter's `axes`, take `size`
    positions from `start`: they are `entries` runs of equal length, and of each run the positions `span` are scaled.
    The queries of a kernel that makes queries, keys and values group by group, [q q k v | q q k v], are in two `groups`
    with a `gap` of k and v between them. A kernel (d, heads, head_dim) is `axes=(-2, -1)`, and the keys of a fused
    (d, 3·heads·head_dim) are `axes=(-1,)`, `start=heads·head_dim`, `size=heads·head_dim`, `entries=heads`.

    Attributes:
      path: The parameter's path below the site's module: "query/kernel".
      rank: Number of axes of one layer's parameter; the further ones of a stacked parameter count layers.
      axes: The axes of one layer's parameter, negative, that hold the entries.
      entries: How many there are; None: the length of the first of the axes. 1 for a signal of one number per
        layer.
      start: First position on the flattened axes.
      size: How many positions; None: all from `start`.
      span: (first, end) within the run of each entry; an end of None is the end of the run.
      groups: How many equal groups of entries there are with a gap between them.
      gap: How many positions lie between one group and the next.
      power: The exponent of γ.
      factor: Name of the linear factor that the parameter belongs to; a kernel and its bias share one.
      optional: Whether the parameter may be missing, as a bias may.

    Raises:
      ValueError: A number out of its range; while tracing, if the parameter's shape does not fit.
      TypeError: A field of another type.

    Example:
      >>> import muonjax
      >>> keys = muonjax.Scale(path="kv/kernel", rank=2, entries=4, size=32, power=0.5, factor="key")  # (d, 2·32)
      >>> keys.span  # all eight features of each of the four heads
      (0, None)
    """

    path: str
    rank: int
    axes: tuple[int, ...] = (-1,)
    entries: int | None = None
    start: int = 0
    size: int | None = None
    span: tuple[int, int | None] = (0, None)
    groups: int = 1
    gap: int = 0
    power: float = 1.0
    factor: str = "output"
    optional: bool = False

    @errors_of("Scale")
    def __post_init__(self):
        check_text(path=self.path, factor=self.factor)
        for name in ("rank", "start", "gap"):
            whole_number(name, getattr(self, name), 0, ", at least 0.")
        whole_number("groups", self.groups, 1, ", at least 1.")
        for name in ("entries", "size"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1, ", at least 1, or None.")
        axes = axis_numbers("axes", self.axes)
        object.__setattr__(self, "axes", axes)
        # In two axes, 1 and -1 are the same, and 2 is out of range: (1, -1) and (1, 2) have one different axis here.
        different = {
            axis % self.rank for axis in axes if -self.rank <= axis < self.rank
        }
        if len(different) < len(axes):
            raise ValueError(
                f"({axes=}) must be different axes of the {self.rank} of one layer."
            )
        if not axes and self.entries is None:
            raise ValueError(
                "(axes=()) has no axis that counts entries: give entries=1."
            )
        self._check_span()
        check_range("power", self.power, "finite", ".")
        check_flag(optional=self.optional)

    def _check_span(self) -> None:
        """Raises unless `span` is (first, end) or (first, None), counted within the run of each entry."""
        if not isinstance(self.span, tuple) or len(self.span) != 2:
            raise TypeError(
                f"(span={shown(self.span)}) must be a pair (first, end), as (0, None)."
            )
        first, end = self.span
        whole_number("span", first, 0, " as its first position, at least 0.")
        if end is not None:
            # An empty span would scale nothing.
            whole_number(
                "span", end, first + 1, f" as its end, above {first}, or None."
            )


def run_length(scale: Scale, entries: int, size: int) -> int:
    """How many of `size` positions each entry has; 0 if they can't be divided among the entries.

    For 4 entries, 24 positions are runs of 6. In two groups with a gap of 8 they are runs of 4:
    two runs, the gap, two runs.
    """
    # Gaps lie between groups, so that there is one less than groups.
    without_gaps = size - (scale.groups - 1) * scale.gap
    if entries % scale.groups or without_gaps <= 0 or without_gaps % entries:
        return 0
    return without_gaps // entries


def first_positions(
    entries: int, run: int, *, start: int = 0, groups: int = 1, gap: int = 0
) -> np.ndarray:
    """[entries]: where the run of each entry begins on the flattened axes.

    The entries are `groups` of equally many, with `gap` positions between one group and the next.

    >>> first_positions(4, run=6), first_positions(4, run=4, groups=2, gap=8)
    (array([ 0,  6, 12, 18]), array([ 0,  4, 16, 20]))
    """
    # Every group before an entry adds a gap to its position.
    entry = np.arange(entries)
    group = entry // (entries // groups)
    return start + run * entry + gap * group


def runs_of(scale: Scale, entries: int, size: int) -> np.ndarray:
    """[entries, features]: the positions on the flattened axes that are scaled.

    >>> runs_of(Scale(path="kernel", rank=2, span=(1, None)), entries=2, size=6)
    array([[1, 2],
           [4, 5]])
    >>> pairs = Scale(path="kernel", rank=2, start=1, groups=2, gap=3)  # [_, a, b, _, _, _, c, d]
    >>> runs_of(pairs, entries=4, size=7).ravel()
    array([1, 2, 6, 7])
    """
    # `span` is counted from the first position of each run.
    run = run_length(scale, entries, size)
    first = first_positions(
        entries, run, start=scale.start, groups=scale.groups, gap=scale.gap
    )
    span = np.arange(run)[slice(*scale.span)]
    return first[:, None] + span


class PlacedScale(NamedTuple):
    """A `Scale` on one parameter, whose shape is known and whose layers may be stacked.

    Attributes:
      leaf: The path of the parameter.
      scale: Which of its entries are scaled.
      power: The exponent of γ.
      shape: The parameter's shape.
      stack: Its axes that count layers.
      entry_axes: Its axes that hold the entries.
      entries: How many entries there are, such as heads.
      size: How many positions of the flattened `entry_axes` hold them.
    """

    leaf: str
    scale: Scale
    power: float
    shape: tuple[int, ...]
    stack: tuple[int, ...]
    entry_axes: tuple[int, ...]
    entries: int
    size: int

    @property
    def factor(self) -> str:
        """The name of the factor of the signal that the parameter belongs to, such as "query"."""
        return self.scale.factor

    @property
    def layers(self) -> tuple[int, ...]:
        """The sizes of the axes that count layers."""
        return tuple(self.shape[axis] for axis in self.stack)

    @property
    def features(self) -> int:
        """How many positions of each entry are scaled."""
        return self.positions().shape[1]

    def positions(self) -> np.ndarray:
        """[entries, features]: the positions on the flattened axes that are scaled."""
        return runs_of(self.scale, self.entries, self.size)

    def overlaps(self, other: PlacedScale) -> bool:
        """Whether both may scale one number of the same parameter."""
        # Positions along different axes can't be compared, so that they count as shared.
        if self.entry_axes != other.entry_axes:
            return True
        return np.intersect1d(self.positions(), other.positions()).size > 0

    def spread(
        self, factors: Float[Array, "*layers entries"]
    ) -> Float[Array, "*#parameter"]:
        """The factors of the entries, in the parameter's axes; 1 where it holds no entry.

        For the first four of six columns and two entries, [a, b] -> [[a, a, b, b, 1, 1]]. An axis
        without entries has size one.
        """
        # [*layers, positions]: each position of the flattened `entry_axes` has its factor.
        layers = factors.shape[:-1]
        table = self._by_position(factors)
        # Before and after the entries the axes hold something else, as the values of a fused kernel.
        sizes = [self.shape[axis] for axis in self.entry_axes]
        before = self.scale.start
        after = math.prod(sizes) - before - self.size
        if before or after:
            widths = [(0, 0)] * len(layers) + [(before, after)]
            table = jnp.pad(table, widths, constant_values=1.0)
        table = table.reshape(*layers, *sizes)
        # Axis i of the table, [*layers, *sizes], belongs at axis order[i] of the parameter.
        order = (*self.stack, *self.entry_axes)
        table = jnp.transpose(table, np.argsort(order).tolist())
        other_axes = [axis for axis in range(len(self.shape)) if axis not in order]
        return jnp.expand_dims(table, other_axes)

    def _by_position(
        self, factors: Float[Array, "*layers entries"]
    ) -> Float[Array, "*layers size"]:
        """The factor of each of the `size` positions that hold the entries; 1 outside of the spans and in the gaps.

        Two entries have runs of 3, of which the span (0, 2) is scaled: [a, b] -> [a, a, 1, b, b, 1]. As two groups with
        a gap of 2 between them they give [a, a, 1, 1, 1, b, b, 1].
        """
        *layers, entries = factors.shape
        # [run], True in the span of an entry
        is_scaled = np.zeros(run_length(self.scale, entries, self.size), bool)
        is_scaled[slice(*self.scale.span)] = True
        # A `where` and no gather: with the heads sharded, a gather would need an exchange.
        is_scaled = is_scaled.reshape((1,) * factors.ndim + (-1,))
        # [*layers, entries, run]
        table = jnp.where(is_scaled, factors[..., None], 1.0)
        if self.scale.gap:
            # A gap follows each group of entries but the last, which `size` ends before.
            table = table.reshape(*layers, self.scale.groups, -1)
            widths = [(0, 0)] * (table.ndim - 1) + [(0, self.scale.gap)]
            table = jnp.pad(table, widths, constant_values=1.0)
        return table.reshape(*layers, -1)[..., : self.size]


def placed(
    scale: Scale, leaf: str, shape: tuple[int, ...], scan_axis: tuple[int, ...] | None
) -> PlacedScale:
    """Place a scale on the parameter `leaf` of this shape; raise ValueError where it does not fit."""
    # The axes that count layers, () for a single layer.
    stack = _stack(scale, leaf, shape, scan_axis)
    # A scale names axes of one layer, and they are counted without those of the stack: `nn.scan` on
    # axis 1 makes a kernel (d, L, heads, head_dim) but a bias (heads, L, head_dim).
    layer_axes = [axis for axis in range(len(shape)) if axis not in stack]
    entry_axes = tuple(layer_axes[axis] for axis in scale.axes)
    # What the scale leaves open follows from the shape: the first axis counts the entries, as heads in (d, heads,
    # head_dim), and they fill everything from `start` on.
    length = math.prod(shape[axis] for axis in entry_axes)
    entries = shape[entry_axes[0]] if scale.entries is None else scale.entries
    size = length - scale.start if scale.size is None else scale.size
    end = scale.start + size
    # The run of each head; 0 if the positions can't be divided among the heads.
    run = run_length(scale, entries, size)
    first, last = scale.span
    if last is None:
        last = run
    if not first < last <= run or end > length:
        raise ValueError(
            f"{leaf!r} of shape {shape} does not hold {entries} heads, features {scale.span} of each, in positions "
            f"{scale.start}:{end} of {length}. See the site's layout and sizes."
        )
    return PlacedScale(
        leaf, scale, scale.power, shape, stack, entry_axes, entries, size
    )


def _stack(
    scale: Scale, leaf: str, shape: tuple[int, ...], scan_axis: tuple[int, ...] | None
) -> tuple[int, ...]:
    """The axes of a parameter that count layers: as many as it has more than one layer's.

    They are `scan_axis`, or the leading ones. A parameter of a single layer has none.
    """
    # A site with `scan_axis` may match modules without a stack, which have no axis of layers.
    rank = len(shape)
    count = rank - scale.rank
    stack = scan_axis
    if stack is None or count == 0:
        stack = tuple(range(count))
    different = {axis % rank for axis in stack if -rank <= axis < rank}
    if not len(different) == len(stack) == count:
        where = "leading axes" if scan_axis is None else f"axes {scan_axis}"
        raise ValueError(
            f"{leaf!r} has shape {shape}; its site expects {scale.rank} axes for each layer, and layers on {where}. "
            "See the site's layout and scan_axis."
        )
    return tuple(axis % rank for axis in stack)
