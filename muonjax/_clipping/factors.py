"""Before the clip, first of four: which part of a parameter feeds a signal, and how factors land on that part."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """Multiply by γ**power, entry by entry, the part of one parameter that feeds a signal.

    The signal has entries: heads, output dimensions, or groups of them. Flatten the parameter's `axes`, take `size`
    positions from `start`: they are `entries` runs of equal length, and of each run the positions `span` are scaled.
    So a kernel (d, heads, head_dim) is `axes=(-2, -1)`, and the keys of a fused (d, 3·heads·head_dim) are
    `axes=(-1,)`, `start=heads·head_dim`, `size=heads·head_dim`, `entries=heads`.

    Attributes:
      path: the parameter's path below the site's module: "query/kernel".
      rank: number of axes of one layer's parameter; the further ones of a stacked parameter count layers.
      axes: the axes of one layer's parameter, negative, that hold the entries.
      entries: how many; None: as many as the first of the axes is long. 1 for a signal of one number a layer.
      start: first position on the flattened axes.
      size: how many positions; None: all from `start`.
      span: (first, end) within each entry's run; an end of None is the run's own.
      power: a in γ**a · g**b, where g is the smallest γ of the entries that share a key head.
      group_power: b.
      factor: name of the linear factor that the parameter belongs to; a kernel and its bias share one.
      optional: whether the parameter may be missing, as a bias may.

    Raises:
      ValueError: while tracing, if the parameter's shape does not fit; naming both.

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
    group_power: float = 0.0
    factor: str = "output"
    optional: bool = False


def stack_sizes(
    call: str, scale: Scale, shape: tuple[int, ...], scan_axis: tuple[int, ...] | None
) -> tuple[int, ...]:
    count = len(shape) - scale.rank
    if count < 0 or (count > 0 and scan_axis is not None and len(scan_axis) != count):
        raise ValueError(
            f"{call}: {scale.path!r} has shape {shape}; its site expects {scale.rank} axes a layer, and layers on "
            f"{'leading axes' if scan_axis is None else f'axes {scan_axis}'}. See the site's layout and scan_axis."
        )
    return tuple(shape[axis] for axis in _stack(scale, shape, scan_axis))


def _stack(scale: Scale, shape: tuple[int, ...], scan_axis: tuple[int, ...] | None) -> tuple[int, ...]:
    """Axes of the stacked parameter that count layers."""
    count = len(shape) - scale.rank
    return tuple(range(count)) if scan_axis is None or not count else tuple(a % len(shape) for a in scan_axis)


def _held(scale: Scale, shape: tuple[int, ...], scan_axis: tuple[int, ...] | None) -> tuple[int, ...]:
    """Axes of the stacked parameter that hold the entries. A scale names them for one layer: `nn.scan` on axis 1 makes
    a kernel (d, L, heads, head_dim) but a bias (heads, L, head_dim), and no count from either end fits both."""
    stack = _stack(scale, shape, scan_axis)
    own = [axis for axis in range(len(shape)) if axis not in stack]
    return tuple(own[axis] for axis in scale.axes)


def count_entries(call: str, scale: Scale, shape: tuple[int, ...], scan_axis: tuple[int, ...] | None) -> int:
    held = [shape[axis] for axis in _held(scale, shape, scan_axis)]
    total = math.prod(held)
    entries = held[0] if scale.entries is None else scale.entries
    size = total - scale.start if scale.size is None else scale.size
    run = size // entries if entries > 0 else 0
    if run < 1 or size % entries or scale.start + size > total or not len(range(run)[slice(*scale.span)]):
        raise ValueError(
            f"{call}: {scale.path!r} of shape {shape} does not hold {entries} heads, features {scale.span} "
            f"of each, in positions {scale.start}:{scale.start + size} of {total}. See the site's layout and sizes."
        )
    return entries


def spread(
    factors: jax.Array, scale: Scale, shape: tuple[int, ...], scan_axis: tuple[int, ...] | None
) -> jax.Array:
    """Factors [*layers, entries] on the axes of the parameter that hold them, broadcastable to it; 1 outside."""
    *layers, entries = factors.shape
    held = _held(scale, shape, scan_axis)
    total = math.prod(shape[axis] for axis in held)
    size = total - scale.start if scale.size is None else scale.size
    inside = np.zeros(size // entries, bool)
    inside[slice(*scale.span)] = True
    # A broadcast and no gather: with the heads on several devices it needs no exchange.
    f = jnp.where(inside, factors[..., None], 1.0).reshape(*layers, size)
    if size != total:
        f = jnp.pad(
            f, [(0, 0)] * len(layers) + [(scale.start, total - scale.start - size)], constant_values=1.0
        )
    f = f.reshape(*layers, *(shape[axis] for axis in held))
    order = (*_stack(scale, shape, scan_axis), *held)  # axis i of f belongs at axis order[i] of the parameter
    f = jnp.transpose(f, sorted(range(f.ndim), key=order.__getitem__))
    return f.reshape([n if axis in order else 1 for axis, n in enumerate(shape)])
