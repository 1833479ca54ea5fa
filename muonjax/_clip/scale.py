"""The factor of each signal, and how it is spread over the part of a parameter that feeds the signal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muonjax._common.arguments import axis_numbers, check_flag, check_range, check_text, shown, whole_number

if TYPE_CHECKING:
    from jaxtyping import Array, Float


# The power of γ for each factor of the logit; along a product they sum to one. A key that several query heads share
# stays as it is: whatever scales it also moves the calm heads of its group.
_OWN_KEYS = {"query": 0.5, "key": 0.5, "rotary": 1.0}
_SHARED_KEYS = {"query": 1.0, "key": 0.0, "rotary": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """Multiply by γ**power, entry by entry, the part of one parameter that feeds a signal.

    The signal has entries: heads, output dimensions, or groups of them. Flatten the parameter's `axes`, take `size`
    positions from `start`: they are `entries` runs of equal length, and of each run the positions `span` are scaled.
    So a kernel (d, heads, head_dim) is `axes=(-2, -1)`, and the keys of a fused (d, 3·heads·head_dim) are
    `axes=(-1,)`, `start=heads·head_dim`, `size=heads·head_dim`, `entries=heads`.

    Attributes:
      path: The parameter's path below the site's module: "query/kernel".
      rank: Number of axes of one layer's parameter; the further ones of a stacked parameter count layers.
      axes: The axes of one layer's parameter, negative, that hold the entries.
      entries: How many there are; None: the length of the first of the axes. 1 for a signal of one number per
        layer.
      start: First position on the flattened axes.
      size: How many positions; None: all from `start`.
      span: (first, end) within the run of each entry; an end of None is the end of the run.
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
    power: float = 1.0
    factor: str = "output"
    optional: bool = False

    def __post_init__(self):
        check_text("Scale", path=self.path, factor=self.factor)
        rank = whole_number("Scale", "rank", self.rank, 0, " of axes.")
        axes = axis_numbers("Scale", "axes", self.axes)
        if not all(-rank <= axis < rank for axis in axes) or len({axis % rank for axis in axes}) < len(axes):
            raise ValueError(
                f"Scale(axes={axes}) must be different axes of the {rank} of one layer's parameter."
            )
        if not axes and self.entries is None:
            raise ValueError(
                "Scale(axes=()) has no axis whose length says how many entries there are: give entries=1."
            )
        object.__setattr__(self, "axes", axes)
        if self.entries is not None:
            whole_number("Scale", "entries", self.entries, 1, " of heads or outputs, at least 1, or None.")
        whole_number("Scale", "start", self.start, 0, ", the first position, at least 0.")
        if self.size is not None:
            whole_number("Scale", "size", self.size, 1, " of positions, at least 1, or None for the rest.")
        self._check_span()
        check_range("Scale", "power", self.power, "finite", ".")
        check_flag("Scale", "optional", self.optional)

    def _check_span(self) -> None:
        if not isinstance(self.span, tuple) or len(self.span) != 2:
            raise TypeError(
                f"Scale(span={shown(self.span)}) must be a pair (first, end); an end of None is the last."
            )
        first, end = self.span
        first = whole_number("Scale", "span", first, 0, " as its first position, at least 0.")
        if end is not None:
            whole_number("Scale", "span", end, first + 1, f" or None as its end, above {first}.")


class Part(NamedTuple):
    """A `Scale` of one parameter of known shape, layers stacked."""

    scale: Scale
    path: str  # of the parameter, from the root of the tree
    shape: tuple[int, ...]
    stack: tuple[int, ...]  # axes that count layers
    layers: tuple[int, ...]  # their sizes
    held: tuple[int, ...]  # axes that hold the entries
    total: int  # positions on these
    size: int  # how many of them hold entries
    entries: int
    inside: np.ndarray  # which positions of the run of an entry are scaled


class Target(NamedTuple):
    """One module that a site matched. All static, so that every mistake raises while tracing."""

    path: str  # of the module
    signal: str  # full path of the statistic
    parts: tuple[Part, ...]  # only of parameters that exist
    layers: tuple[int, ...]  # sizes of the axes of stacked layers
    entries: int  # of the signal, in one layer
    groups: int  # how many groups of entries share a key head; `entries` where none do
    name: str = ""  # in a clip's state: the path of the module; the signal's where a module has several
    threshold: Any = None


def part_of(scale: Scale, path: str, shape: tuple[int, ...], scan_axis: tuple[int, ...] | None) -> Part:
    """The part of the parameter of this shape that `scale` scales; raises ValueError where it does not fit."""
    count = len(shape) - scale.rank
    stack = tuple(range(count)) if scan_axis is None or count == 0 else scan_axis
    if len(stack) != count or not all(-len(shape) <= axis < len(shape) for axis in stack):
        raise ValueError(
            f"{path!r} has shape {shape}; its site expects {scale.rank} axes for each layer, and layers on "
            f"{'leading axes' if scan_axis is None else f'axes {scan_axis}'}. See the site's layout and scan_axis."
        )
    stack = tuple(axis % len(shape) for axis in stack)
    # A scale names the axes of one layer: `nn.scan` on axis 1 makes a kernel (d, L, heads, head_dim) but a bias
    # (heads, L, head_dim), and no count from either end fits both.
    own = [axis for axis in range(len(shape)) if axis not in stack]
    held = tuple(own[axis] for axis in scale.axes)
    total = math.prod(shape[axis] for axis in held)
    entries = shape[held[0]] if scale.entries is None else scale.entries
    size = total - scale.start if scale.size is None else scale.size
    divides = entries > 0 and size >= entries and size % entries == 0
    inside = np.zeros(size // entries if divides else 0, bool)
    inside[slice(*scale.span)] = True
    if not inside.any() or scale.start + size > total:
        raise ValueError(
            f"{path!r} of shape {shape} does not hold {entries} heads, features {scale.span} of each, in positions "
            f"{scale.start}:{scale.start + size} of {total}. See the site's layout and sizes."
        )
    layers = tuple(shape[axis] for axis in stack)
    return Part(scale, path, shape, stack, layers, held, total, size, entries, inside)


def with_powers(target: Target) -> Target:
    """An attention with QK-Clip's powers; raises unless queries and keys can be multiplied, feature by feature."""
    powers = _OWN_KEYS if target.groups == target.entries else _SHARED_KEYS
    if unknown := {part.scale.factor for part in target.parts} - set(powers):
        raise ValueError(f"{target.path!r} has factors {sorted(unknown)}, not query, key or rotary.")
    first = {part.scale.factor: part for part in reversed(target.parts)}  # a kernel, before its bias
    heads = {factor: (part.entries, int(part.inside.sum())) for factor, part in first.items()}
    (queries, features), (keys, key_features) = (heads.get(factor, (0, 0)) for factor in ("query", "key"))
    if queries and keys and (queries < keys or features != key_features):
        width = first["key"].size
        count = "" if width % features else f": give num_kv_heads={width // features}"
        raise ValueError(
            f"{first['query'].path!r} has {queries} heads of {features} features and {first['key'].path!r} {keys} of "
            f"{key_features}: they can't be multiplied; several query heads may share a key head, and not the reverse. "
            f"See the site's layout and head counts{count}."
        )
    scales = [dataclasses.replace(part.scale, power=powers[part.scale.factor]) for part in target.parts]
    parts = (part._replace(scale=scale) for part, scale in zip(target.parts, scales, strict=True))
    return target._replace(parts=tuple(parts))


def overlap(a: Part, b: Part) -> bool:
    """Whether two parts of one parameter may have an entry in common."""

    def positions(part: Part) -> np.ndarray:
        found = np.zeros(part.total, bool)
        found[part.scale.start :][: part.size] = np.tile(part.inside, part.entries)
        return found

    return a.held != b.held or bool((positions(a) & positions(b)).any())


def scaled_update(
    u: Float[Array, "*parameter"], p: Float[Array, "*parameter"], f: Float[Array, "*#parameter"]
) -> Float[Array, "*parameter"]:
    """u' with p + u' = f·(p + u), and u bit for bit where f = 1 (where 0·p would turn −0 into 0, and inf into NaN)."""
    # A half-precision update of a float32 weight would miss the bound.
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.promote_types(u.dtype, p.dtype)
        wide = jnp.promote_types(dtype, jnp.float32)
    u, p, f = u.astype(wide), p.astype(wide), f.astype(wide)
    return jnp.where(f == 1, u, f * u + (f - 1) * p).astype(dtype)


def clip_factor(signal: Float[Array, "*layers entries"], threshold: Any) -> Float[Array, "*layers entries"]:
    """γ = min(1, threshold / S); exactly 1 where S is not a finite number above the threshold, and the threshold not
    positive (a schedule's can't be checked)."""
    threshold = jnp.asarray(threshold, jnp.float32)
    hot = (signal > threshold) & jnp.isfinite(signal) & (threshold > 0)
    gamma = jnp.where(hot, threshold / jnp.where(hot, signal, 1.0), 1.0)
    # Never zero: the head could not recover, and γ·γ^(-1/2) would be NaN.
    return jnp.maximum(gamma, jnp.finfo(jnp.float32).tiny)


def parameter_factors(targets: Sequence[Target], gammas: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """What each parameter is multiplied by: γ**power, head by head.

    `gammas` are [*layers, entries], by the name of the target.
    """
    factors: dict[str, jax.Array] = {}
    for target in targets:
        gamma = gammas[target.name]
        for part in target.parts:
            if part.scale.power == 0:
                continue
            f = _spread(_power(gamma, part.scale.power), part)
            factors[part.path] = factors[part.path] * f if part.path in factors else f
    return factors


def _power(x: Float[Array, "*shape"], power: float) -> Float[Array, "*shape"]:
    # By name where it can be: exact, and faster than a general power.
    return {0.5: jnp.sqrt, 1.0: lambda x: x}.get(power, lambda x: x**power)(x)


def _spread(factors: Float[Array, "*layers entries"], part: Part) -> Float[Array, "*#parameter"]:
    """Factors on the axes of the parameter that hold them, broadcastable to it; 1 outside."""
    layers = factors.shape[:-1]
    # A broadcast and no gather: with the heads sharded it needs no exchange.
    inside = part.inside.reshape((1,) * factors.ndim + (-1,))
    f = jnp.where(inside, factors[..., None], 1.0).reshape(*layers, part.size)
    if part.size != part.total:
        start = part.scale.start
        after = part.total - start - part.size
        f = jnp.pad(f, [(0, 0)] * len(layers) + [(start, after)], constant_values=1.0)
    f = f.reshape(*layers, *(part.shape[axis] for axis in part.held))
    order = (*part.stack, *part.held)  # axis i of f belongs at axis order[i] of the parameter
    f = jnp.transpose(f, np.argsort(order).tolist())
    return jnp.expand_dims(f, [axis for axis in range(len(part.shape)) if axis not in order])
