"""Entries of a parameter that a factor scales, head by head: described by hand,
and placed on a parameter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

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
    from jaxtyping import Array, Shaped


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """Multiply by γ**power, entry by entry, the part of one parameter that feeds a signal.

    The signal has entries: heads, output dimensions, or groups of them. Flatten the parameter's
    `axes`, and take the positions `part`: they are `entries` runs of equal length, and of each run
    the positions `span` are scaled.

    A kernel (d, heads, head_dim) is `axes=(-2, -1)`, and the keys of a fused (d, 3·heads·head_dim)
    are `axes=(-1,)`, `part=(heads·head_dim, 2·heads·head_dim)`, `entries=heads`. A kernel that
    makes queries, keys and values group by group, [q q k v | q q k v], has two `groups`, and its
    queries are the `part` (0, 2·head_dim) of each.

    Attributes:
      path: The parameter's path below the site's module: "query/kernel".
      rank: Number of axes of one layer's parameter;
        the further ones of a stacked parameter count layers.
      axes: The axes of one layer's parameter, negative, that hold the entries.
      entries: How many there are; None: the length of the first of the axes, or 1 if there is no
        axis. 1 for a signal of one number per layer.
      part: (first, end) on the flattened axes, or within each group;
        an end of None is the end of it.
      span: (first, end) within the run of each entry; an end of None is the end of the run.
      groups: Into how many equal groups the flattened axes are cut.
      power: The exponent of γ.
      factor: Name of the linear factor that the parameter belongs to;
        a kernel and its bias share one.
      optional: Whether the parameter may be missing, as a bias may.

    Raises:
      ValueError: A number out of its range; while tracing, if the parameter's shape does not fit.
      TypeError: A field of another type.

    Example:
      >>> import muonjax
      >>> # The keys are the first half of a kernel (d, 2·32).
      >>> keys = muonjax.Scale(path="kv/kernel", rank=2, entries=4, part=(0, 32), factor="key")
      >>> keys.span  # all eight features of each of the four heads
      (0, None)
    """

    path: str
    rank: int
    axes: tuple[int, ...] = (-1,)
    entries: int | None = None
    part: tuple[int, int | None] = (0, None)
    span: tuple[int, int | None] = (0, None)
    groups: int = 1
    power: float = 1.0
    factor: str = "output"
    optional: bool = False

    @errors_of("Scale")
    def __post_init__(self):
        """Check each field, as far as it does not depend on a parameter's shape, and make `axes` a
        tuple."""
        # The factor is given by its name, such as "query".
        check_text(path=self.path, factor=self.factor)
        whole_number("rank", self.rank, 0, ", at least 0.")
        whole_number("groups", self.groups, 1, ", at least 1.")
        if self.entries is not None:
            whole_number("entries", self.entries, 1, ", at least 1, or None.")
        axes = axis_numbers("axes", self.axes)
        # The dataclass is frozen: `self.axes = axes` would raise.
        object.__setattr__(self, "axes", axes)
        # If a layer has two axes, (1, -1) names one twice, and (1, 2) one that is out of range: one
        # axis is left, fewer than were given.
        if len(_distinct_axes(axes, self.rank)) < len(axes):
            raise ValueError(
                f"({axes=}) must be different axes of the {self.rank} of one layer."
            )
        # Pairs (first, end) of positions; an end of None is the last one, so that (0, None) is all.
        _check_first_and_end("part", self.part)
        _check_first_and_end("span", self.span)
        check_range("power", self.power, "finite", ".")
        check_flag(optional=self.optional)


def _distinct_axes(axes: Iterable[int], rank: int) -> set[int]:
    """Those of these axes that an array of this rank has, each once: of two axes,
    (1, -1) and (1, 2) give {1}."""
    return {axis % rank for axis in axes if -rank <= axis < rank}


def _check_first_and_end(name: str, positions: Any) -> None:
    """Raises unless these are (first, end) or (first, None)."""
    if not isinstance(positions, tuple) or len(positions) != 2:
        raise TypeError(
            f"({name}={shown(positions)}) must be a pair (first, end), as (0, None)."
        )
    first, end = positions
    whole_number(name, first, 0, " as its first position, at least 0.")
    if end is not None:
        # Without a position nothing would be scaled.
        whole_number(name, end, first + 1, f" as its end, above {first}, or None.")


class PlacedScale(NamedTuple):
    """A `Scale` on one parameter, whose shape is known and whose layers may be stacked.

    Attributes:
      leaf: The parameter: its path, or its number in a program.
      scale: Which of its entries are scaled, without anything that is left open.
      shape: The parameter's shape.
      stack: Its axes that count layers.
      axes: Its axes that hold the entries, in the order in which they are flattened.
    """

    leaf: Any
    scale: Scale
    shape: tuple[int, ...]
    stack: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def factor(self) -> str:
        """The name of the factor of the signal that the parameter belongs to, such as "query"."""
        return self.scale.factor

    @property
    def layers(self) -> tuple[int, ...]:
        """The sizes of the axes that count layers."""
        return tuple(self.shape[axis] for axis in self.stack)

    @property
    def entries(self) -> int:
        """How many entries there are, such as heads."""
        return self.scale.entries or 1

    @property
    def features(self) -> int:
        """How many positions of each entry are scaled."""
        first, end = self.scale.span
        return (end or 0) - first

    def spread(
        self,
        values: Shaped[Array | np.ndarray, "*layers entries"],
        otherwise: float | bool,
    ) -> Any:
        """One value for each entry at all of its scaled positions,
        in the parameter's axes; `otherwise` in all others.

        The values [a, b] of two heads, which are the part (0, 4) of the six columns of a kernel
        [16, 6], give

            [[a, a, b, b, 1, 1]]    with 1 `otherwise`.

        An axis without entries has size one: it broadcasts to the parameter.
        An array of NumPy's gives one of NumPy's.
        """
        scale = self.scale
        *layers, entries = values.shape
        sizes = [self.shape[axis] for axis in self.axes]
        # An axis is cut into groups, the part of each group into the runs of its entries, and of a
        # run the span is scaled: [q q k v | q q k v] has two groups, and the part (0, 2 * head_dim)
        # of each has the runs of two of the four queries. `placed` has filled in the end.
        end: Any
        first, end = scale.part
        run_size = (end - first) * scale.groups // entries
        xp = values.__array_namespace__()  # NumPy or jax.numpy
        # [*layers, entries, features]: all features of a head have its value, [[a, a], [b, b]] in
        # the example.
        shape = (*layers, entries, self.features)
        values = xp.broadcast_to(values[..., None], shape)
        # [*layers, entries, run_size]: outside of its span a run is not scaled, as the values
        # behind MLA's keys. In the example the span is the run.
        table = _padded(values, scale.span[0], run_size, otherwise)
        # For a kernel [d, heads, size] these are the sizes of its axes already. It must not be
        # reshaped: on a mesh with explicit axis types JAX refuses that for sharded heads.
        if table.shape != (*layers, *sizes):
            # The runs of each group one after the other, [*layers, groups, part]: [[a, a, b, b]]
            table = table.reshape(*layers, scale.groups, -1)
            # [*layers, groups, group_size]: outside of its part a group is not scaled, as the
            # values of a fused kernel: [[a, a, b, b, 1, 1]]
            group_size = math.prod(sizes) // scale.groups
            table = _padded(table, first, group_size, otherwise)
            table = table.reshape((*layers, *sizes))
        # Axis i of the table, [*layers, *sizes], belongs at axis order[i] of the parameter.
        order = (*self.stack, *self.axes)
        table = table.transpose(np.argsort(order).tolist())
        other_axes = [axis for axis in range(len(self.shape)) if axis not in order]
        return xp.expand_dims(table, other_axes)


def _padded(values: Any, first: int, size: int, otherwise: float) -> Any:
    """An array with a last axis of `size` entries, which holds the values from `first` on."""
    after = size - first - values.shape[-1]
    # No pad where nothing is added: a sharded axis can't be padded under explicit axes.
    if not first and not after:
        return values
    widths = [(0, 0)] * (values.ndim - 1) + [(first, after)]
    return values.__array_namespace__().pad(values, widths, constant_values=otherwise)


def placed(
    scale: Scale, leaf: str, shape: tuple[int, ...], scan_axis: tuple[int, ...] | None
) -> PlacedScale:
    """Place a scale on the parameter `leaf` of this shape, which fills in what the scale leaves
    open: its number of entries, and the ends of its part and of its span.

    Raises ValueError where the shape does not fit. `scan_axis` has the axes that count layers;
    None: the leading ones that the scale leaves over.
    """
    # The axes of the parameter that count layers, () for a single layer.
    stack = _stack(scale, leaf, shape, scan_axis)
    # A scale names axes of one layer, and they are counted without those of the stack: `nn.scan` on
    # axis 1 makes a kernel (d, L, heads, head_dim) but a bias (heads, L, head_dim).
    layer_axes = [axis for axis in range(len(shape)) if axis not in stack]
    axes = tuple(layer_axes[axis] for axis in scale.axes)
    sizes = [shape[axis] for axis in axes]
    # In (d, heads, head_dim) the first of the two axes counts the heads. Without axes the whole
    # parameter is one entry.
    entries = scale.entries or (sizes[0] if sizes else 1)
    # The positions along the flattened axes come in equal groups. A fused kernel [d, 384] of eight
    # heads, [q | k | v], is one group of 384; [q q k v | q q k v] has two.
    group, rest = divmod(math.prod(sizes), scale.groups)
    # The positions of a group that belong to the entries, 128:256 for the keys of those 384
    first, end = scale.part
    if end is None:
        end = group
    # The parts of all groups together are cut into a run for each entry, 16 positions for each of
    # the eight keys.
    run, rest_of_run = divmod((end - first) * scale.groups, entries)
    # What is scaled of each run
    first_of_run, end_of_run = scale.span
    if end_of_run is None:
        end_of_run = run
    # Groups and runs have whole numbers of positions, and each group as many runs as the others.
    is_whole = rest == rest_of_run == entries % scale.groups == 0
    if not (is_whole and first_of_run < end_of_run <= run and first < end <= group):
        raise ValueError(
            f"{leaf!r} of shape {shape} does not hold {entries} heads, features {scale.span} of "
            f"each, in positions {first}:{end} of {group}. See the site's layout and sizes."
        )
    filled = dataclasses.replace(
        scale, entries=entries, part=(first, end), span=(first_of_run, end_of_run)
    )
    return PlacedScale(leaf, filled, shape, stack, axes)


def _stack(
    scale: Scale, leaf: str, shape: tuple[int, ...], scan_axis: tuple[int, ...] | None
) -> tuple[int, ...]:
    """The axes of a parameter that count layers, none negative: `scan_axis`, or the leading ones.

    They are (0,) for kernels [d, heads, size] in a stack [layers, d, heads, size]. A parameter of a
    single layer has none, even if the site has a `scan_axis` for other modules that it matches.
    """
    rank = len(shape)
    # How many axes there are besides the `scale.rank` axes of each layer
    count = rank - scale.rank
    stack = scan_axis
    if stack is None or count == 0:
        stack = tuple(range(count))
    # There must be so many, and `_distinct_axes` drops those that repeat one or are out of range.
    # A parameter with fewer axes than a layer has a negative count, and is refused too.
    if not len(_distinct_axes(stack, rank)) == len(stack) == count:
        raise ValueError(
            f"{leaf!r} has shape {shape}; its site expects {scale.rank} axes for each layer, and "
            f"layers on axes {stack}. See the site's layout and scan_axis."
        )
    return tuple(axis % rank for axis in stack)
